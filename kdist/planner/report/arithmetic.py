"""Arithmetic of each term of an update and of each part of the memory, written out."""

import numpy as np

from kdist.layout import Layout
from kdist.planner.cost import memory, update
from kdist.planner.cost.constants import Constants
from kdist.planner.cost.setup import Gradients, InputWork, Setup, make_features
from kdist.planner.cost.sharding import DividedState
from kdist.planner.cost.split import ModelParts
from kdist.planner.tables.machines import Machine
from kdist.planner.workload.layers import Workload


def term_texts(
    setup: Setup,
    gradients: Gradients,
    input_work: InputWork,
    micro_step: float,
    constants: Constants,
) -> dict[str, str]:
    """Returns how each term of an update is computed, by the names of `Term`.

    `micro_step` is the seconds of computation of a micro-step.
    """
    features = make_features(setup, gradients, input_work)
    return {name: text(setup, features, micro_step, constants) for name, text in _TEXTS.items()}


def split_texts(
    split: ModelParts, layout: Layout, local_batch: int, machine: Machine
) -> dict[str, str]:
    """Returns how the terms of a split model's step are computed, by the names of `Term`."""
    rows = local_batch / layout.micro_batches
    recomputed = ", with activations computed twice" if layout.recompute else ""
    stages = f"{layout.micro_batches} micro-batches of {rows:g} examples x the longest stage"
    busiest = f"{rows:g} examples on each device, which has its part of {split.divided} layers"
    return {
        "compute": f"{stages if layout.pipeline > 1 else busiest}{recomputed}",
        "pipeline bubble": "all other stages once, while the pipeline fills and drains",
        "between stages": f"2 x ({layout.micro_batches} + {layout.pipeline} - 2) messages of "
        f"{_megabytes(max(split.received_bytes) * rows)} in {machine.link or 'PCIe'}",
        "divided layers": f"2 x {_megabytes(split.gathered_bytes * rows)}, the inputs and outputs "
        f"of divided layers, and 4 x {split.divided} hops",
    }


def memory_of_part_text(layout: Layout, rows: int) -> str:
    """Returns how the activations of a part of a split model come about."""
    if layout.pipeline == 1:
        return f"all activations of {rows} examples, and gradients of its part of the weights"
    kept = "inputs" if layout.recompute else "activations"
    return (
        f"{kept} of up to {min(layout.pipeline, layout.micro_batches)} micro-batches of {rows} "
        "examples, temporaries of the whole model, and gradients"
    )


def memory_texts(
    needed: memory.Memory,
    workload: Workload,
    local_batch: int,
    precision: str,
    optimizer: str,
    accumulate: int,
) -> dict[str, str]:
    """Returns how each part of the memory of a GPU comes about, by the names of `Memory`.

    `needed` is the estimate of the other arguments.
    """
    per_number = memory.OPTIMIZERS[optimizer]
    return {
        "weights": f"{workload.parameters:,.0f} numbers of {memory.variable_bytes(precision)} "
        "bytes",
        "slots": f"{per_number.slots} for each trained number under {optimizer}",
        "accumulated": f"the sum of the gradients of {accumulate} micro-steps",
        "input": f"{memory.BATCHES_AHEAD['gpu']} x {local_batch} examples that wait for their step",
        "step": _step_text(workload, local_batch, precision),
        "update": f"{per_number.early} for each trained number, computed before the gradients are "
        "there",
        "workspace": _workspace_text(needed.buffers),
        "reduce_buffers": "a copy of the gradients, packed for their way to other replicas",
        "framework": "the CUDA context: an allowance",
    }


def sharded_texts(divided: DividedState, layout: Layout, optimizer: str) -> dict[str, str]:
    """Returns how terms of a step and parts of the memory differ if replicas divide state."""
    transfers, parts = divided.transfers(layout.accumulate), layout.num_parts
    updated = (
        f"{divided.updated:,.0f} numbers: 1/{parts} of {divided.divided:,.0f}, and "
        f"{divided.small:,.0f} in small weights, which stay whole"
    )
    texts = {
        "slots": f"{memory.OPTIMIZERS[optimizer].slots} under {optimizer} for each of {updated}",
        "update": f"{memory.OPTIMIZERS[optimizer].early} for each of these numbers, computed "
        "before the gradients are there",
        "exchange in node": f"of large weights and their gradients, {transfers} x ({parts} - 1) "
        f"/ {parts} of {_megabytes(4 * divided.divided)} in all (ZeRO, section 7), and an "
        "all-reduce of the others",
    }
    if divided.divides_gradients:
        texts["accumulated"] = f"sums of gradients of {updated}"
    if not divided.divides_weights:
        texts["slots"] += f", and a copy of the {divided.own:,.0f}"
        return texts
    return texts | {
        "weights": updated,
        "gathered": f"{divided.gathered:,.0f} numbers: the two largest divided weights, and all "
        "divided vectors",
        "reduce_buffers": "gradients of gathered and of small weights, on their way",
    }


def _step_text(workload, local_batch, precision):
    text = f"activations and gradients of {local_batch} examples, and {memory.STEP_MARGIN - 1:.0%}"
    if memory.bits(precision) == memory.bits(workload.precision):
        return text
    if memory.bits(precision) == 16:
        return f"{text}, at most: as in {workload.precision}, and 16-bit weights"
    return f"{text}, at most: twice that in {workload.precision}"


def _workspace_text(buffers):
    kernels = buffers.kernels > buffers.temporaries
    text = "kernels of convolutions" if kernels else "temporaries of the update"
    if buffers.next_update:
        text += ", and the next matrix's gradient and update"
    if buffers.cudnn:
        text += ", and cuDNN's: an allowance of the largest convolution's input and output"
    return text


def _compute(setup, features, micro_step, constants):
    steps = f"{setup.accumulate} micro-steps x " if setup.accumulate > 1 else ""
    return f"{steps}{micro_step * 1e3:.4g} ms for {setup.local_batch:g} examples on each device"


def _straggling(setup, features, micro_step, constants):
    each = f"{constants.straggling_per_doubling:.3g} x log2({setup.devices_in_node})"
    pair = f" + {constants.paired_dies_slowdown:.3g}" if features.paired_dies else ""
    compute = setup.accumulate * micro_step * 1e3
    return f"({each}{pair}) x {compute:.4g} ms of computation: all wait for the slowest device"


def _exchange_in_node(setup, features, micro_step, constants):
    size, devices = _megabytes(features.gradient_bytes), setup.devices_in_node
    if setup.update == "server_on_host":
        rate = features.pcie_bytes_per_s * constants.host_server_share
        sharing = min(max(devices / 2, 1), 2)
        text = f"2 x {size} x {sharing:g} for shared PCIe / {_rate(rate)}"
    elif features.direct:
        rate = _rate(update.ring_rate(features, constants))
        text = f"2 x ({devices} - 1) / {devices} x {size} / {rate}"
    else:
        text = _staged(setup, features, constants)
    return text + _exposed(setup, features, micro_step, constants)


def _staged(setup, features, constants):
    size, devices = features.gradient_bytes, setup.devices_in_node
    sizes = update.staged_ring_bytes(size, devices)
    if setup.update == "server_on_devices":
        sizes = update.staged_server_bytes(
            size, features.weight_bytes, features.largest_share, devices
        )
    rates = update.staged_rates(features, constants)
    legs = [
        f"{_megabytes(float(leg))} of {whose} / {_rate(rate)}"
        for whose, leg, rate in zip(("all devices", "the busiest"), sizes, rates, strict=True)
    ]
    return f"no peer-to-peer, through the memory of the host: hypot({', '.join(legs)})"


def _exchange_between_nodes(setup, features, micro_step, constants):
    size, nodes = _megabytes(features.bytes_between_nodes), setup.nodes
    network = _rate(features.network_bytes_per_s * constants.network_share)
    if setup.update == "parameter_servers":
        both = _megabytes(features.gradient_bytes + features.weight_bytes)
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
    return text + _exposed(setup, features, micro_step, constants)


def _latency(setup, features, micro_step, constants):
    hop = constants.hop_ms
    text = f"2 x ({setup.devices_in_node} - 1) hops x {hop:.3g} ms"
    if setup.nodes > 1:
        text += f", and between {setup.nodes} nodes {update.NETWORK_HOPS * hop:.3g} ms a hop"
    return text + _exposed(setup, features, micro_step, constants)


def _coordination(setup, features, micro_step, constants):
    return f"{constants.horovod_ms:.3g} ms of Horovod's cycle{_every(setup)}"


def _feed(setup, features, micro_step, constants):
    images = f"{features.node_examples:g} examples x {_megabytes(features.bytes_to_device)}"
    if features.numpy:
        return (
            f"{images} x {constants.numpy_feed_ns_per_byte:.3g} ns/byte in one Python thread + "
            f"{setup.devices_in_node} devices x {features.tensors:g} tensors x "
            f"{constants.dispatch_ms_per_tensor:.3g} ms"
        )
    return f"{images} / {constants.in_graph_copy_gb_s:.3g} GB/s of the one process that feeds them"


def _input_wait(setup, features, micro_step, constants):
    each = float(features.decoded * update.core_seconds(features, constants))
    processes = features.horovod * features.devices_in_node
    cores = float(update.effective_cores(features, processes, constants))
    ready = float(update.input_seconds(features, constants)) * 1e3
    parts = update.update_seconds(features, micro_step, constants)
    busy = float(sum(parts.values()) - parts["input wait"] - parts["slowest node"]) * 1e3
    power = constants.soft_maximum_exponent
    return (
        f"input: {features.node_examples:g} examples x {each * 1e3:.3g} core ms / {cores:.3g} "
        f"cores = {ready:.4g} ms while the devices take {busy:.4g} ms: ({busy:.4g}^{power:.3g} + "
        f"{ready:.4g}^{power:.3g})^(1/{power:.3g}) - {busy:.4g}"
    )


def _slowest_node(setup, features, micro_step, constants):
    share = float(update.node_straggling_share(features, constants))
    return (
        f"{share:.3g} x all of the above: the slowest of {setup.nodes} nodes is "
        f"{setup.slowest_node:.3g} standard deviations behind"
    )


def _exposed(setup, features, micro_step, constants):
    """Returns the share of an exchange that computation hides, and how often it happens."""
    if not (features.on_host or features.on_servers or features.overlap):
        return _every(setup)
    parts = update.exchange_parts(features, micro_step, constants)
    share = float(update.exposed_share(features, sum(parts.values()), micro_step, constants))
    hidden = "" if np.isclose(share, 1) else f", of which computation hides {1 - share:.0%}"
    return hidden + _every(setup)


def _every(setup):
    return f", every {setup.local_steps} updates" if setup.local_steps > 1 else ""


def _megabytes(size):
    return f"{size / 1e6:.4g} MB"


def _rate(bytes_per_s):
    return f"({float(bytes_per_s) / 1e9:.3g} GB/s)"


_TEXTS = {
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
