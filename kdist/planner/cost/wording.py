"""The arithmetic of each part of an update, as a person would write it."""

import numpy as np

from kdist.planner.constants import Constants
from kdist.planner.cost import exchange, input_pipeline, update
from kdist.planner.cost.facts import Facts
from kdist.planner.cost.setup import Setup


def how(name: str, setup: Setup, facts: Facts, micro_step: float, constants: Constants) -> str:
    """How the part of an update with this name is computed.

    Args:
        name: a key of `update.update_seconds`.
        setup: of the update.
        facts: of the same.
        micro_step: seconds of computation of a micro-step.
        constants: that it was computed with.
    """
    return _WORDING[name](setup, facts, micro_step, constants)


def _compute(setup, facts, micro_step, constants):
    steps = f"{setup.accumulate} micro-steps x " if setup.accumulate > 1 else ""
    return f"{steps}{micro_step * 1e3:.4g} ms for {setup.local_batch:g} examples on each device"


def _straggling(setup, facts, micro_step, constants):
    each = f"{constants.straggling_per_doubling:.3g} x log2({setup.devices_in_node})"
    pair = f" + {constants.paired_dies_slowdown:.3g}" if facts.paired_dies else ""
    compute = setup.accumulate * micro_step * 1e3
    return f"({each}{pair}) x {compute:.4g} ms of computation: all wait for the slowest device"


def _exchange_in_node(setup, facts, micro_step, constants):
    size, devices = _megabytes(facts.gradient_bytes), setup.devices_in_node
    if setup.update == "server_on_host":
        rate = facts.pcie_bytes_per_s * constants.host_server_share
        crowd = min(max(devices / 2, 1), 2)
        text = f"2 x {size} x {crowd:g} for shared PCIe / {_rate(rate)}"
    elif facts.direct:
        rate = _rate(update.ring_rate(facts, constants))
        text = f"2 x ({devices} - 1) / {devices} x {size} / {rate}"
    else:
        text = _staged(setup, facts, constants)
    return text + _exposed(setup, facts, micro_step, constants)


def _staged(setup, facts, constants):
    sizes = exchange.staged_ring_bytes(facts.gradient_bytes, setup.devices_in_node)
    if setup.update == "server_on_devices":
        sizes = exchange.staged_server_bytes(
            facts.gradient_bytes, facts.weight_bytes, facts.largest_share, setup.devices_in_node
        )
    legs = [
        f"{_megabytes(float(size))} of {whose} / {_rate(rate)}"
        for whose, size, rate in zip(
            ("all devices", "the busiest"),
            sizes,
            update.staged_rates(facts, constants),
            strict=True,
        )
    ]
    return f"no peer-to-peer, through the memory of the host: hypot({', '.join(legs)})"


def _exchange_between_nodes(setup, facts, micro_step, constants):
    size, nodes = _megabytes(facts.gradient_bytes), setup.nodes
    network = _rate(facts.network_bytes_per_s * constants.network_share)
    if setup.update == "parameter_servers":
        both = _megabytes(facts.gradient_bytes + facts.weight_bytes)
        many = f"{setup.nodes} workers on {setup.servers} servers"
        text = f"{both} of gradients and weights of one worker / {network}"
        if setup.asynchronous:
            text += f", and what {many} take longer than its whole cycle"
        else:
            text += f", or what {many} take if that is longer"
    else:
        text = (
            f"the better of a ring, 2 x ({nodes} - 1) / {nodes} x {size}, and a tree, 2 x {size}, "
            f"/ {network} for all devices of a node"
        )
    return text + _exposed(setup, facts, micro_step, constants)


def _latency(setup, facts, micro_step, constants):
    hop = constants.hop_ms
    text = f"2 x ({setup.devices_in_node} - 1) hops x {hop:.3g} ms"
    if setup.nodes > 1:
        text += f", and between {setup.nodes} nodes {update.NETWORK_HOPS * hop:.3g} ms a hop"
    return text + _exposed(setup, facts, micro_step, constants)


def _coordination(setup, facts, micro_step, constants):
    return f"{constants.horovod_ms:.3g} ms of Horovod's cycle{_every(setup)}"


def _feed(setup, facts, micro_step, constants):
    images = f"{facts.node_examples:g} examples x {_megabytes(facts.bytes_to_device)}"
    if facts.numpy:
        return (
            f"{images} x {constants.numpy_feed_ns_per_byte:.3g} ns/byte in one Python thread + "
            f"{setup.devices_in_node} devices x {facts.tensors:g} tensors x "
            f"{constants.dispatch_ms_per_tensor:.3g} ms"
        )
    return f"{images} / {constants.in_graph_copy_gb_s:.3g} GB/s of the one process that feeds them"


def _input_wait(setup, facts, micro_step, constants):
    each = float(facts.decoded * input_pipeline.core_seconds(facts, constants))
    processes = facts.horovod * facts.devices_in_node
    cores = float(input_pipeline.effective_cores(facts, processes, constants))
    ready = float(update.input_seconds(facts, constants)) * 1e3
    parts = update.update_seconds(facts, micro_step, constants)
    busy = float(sum(parts.values()) - parts["input wait"] - parts["slowest node"]) * 1e3
    power = constants.soft_maximum_exponent
    return (
        f"input: {facts.node_examples:g} examples x {each * 1e3:.3g} core ms / {cores:.3g} cores = "
        f"{ready:.4g} ms beside the devices' {busy:.4g} ms: ({busy:.4g}^{power:.3g} + "
        f"{ready:.4g}^{power:.3g})^(1/{power:.3g}) - {busy:.4g}"
    )


def _slowest_node(setup, facts, micro_step, constants):
    share = float(update.node_straggling(facts, constants))
    return (
        f"{share:.3g} x all of the above: the slowest of {setup.nodes} nodes is "
        f"{setup.slowest_node:.3g} standard deviations behind"
    )


def _exposed(setup, facts, micro_step, constants):
    """How much of an exchange nothing hides."""
    if not (facts.on_host or facts.on_servers or facts.overlap):
        return _every(setup)
    parts = update.exchange_parts(facts, micro_step, constants)
    share = float(update.exposed_share(facts, sum(parts.values()), micro_step, constants))
    hidden = "" if np.isclose(share, 1) else f", of which computation hides {1 - share:.0%}"
    return hidden + _every(setup)


def _every(setup):
    return f", every {setup.local_steps} updates" if setup.local_steps > 1 else ""


def _megabytes(size):
    return f"{size / 1e6:.4g} MB"


def _rate(bytes_per_s):
    return f"({float(bytes_per_s) / 1e9:.3g} GB/s)"


_WORDING = {
    "compute": _compute,
    "straggling": _straggling,
    "exchange in node": _exchange_in_node,
    "exchange between nodes": _exchange_between_nodes,
    "latency": _latency,
    "coordination": _coordination,
    "feed": _feed,
    "input wait": _input_wait,
    "slowest node": _slowest_node,
}
