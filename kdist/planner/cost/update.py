"""The equations of one update, for one set-up or for arrays of many: each is written once.

Every function takes `Facts`, of numbers or of arrays, and `kdist.planner.constants.Constants`.
"""

import numpy as np

from kdist.planner.cost import exchange, input_pipeline

SOCKET_BYTES_PER_S = 9.6e9  # peer-to-peer over one of two links of 19.2 GB/s between two sockets
NETWORK_HOPS = 5  # a hop between nodes, counted in hops within a node
SECANTS = 20  # far more than are needed


def update_seconds(facts, micro_step, constants):
    """The parts of an update by name; they sum to its seconds.

    Args:
        facts: of one set-up, or of many.
        micro_step: seconds of computation of a micro-step on one device by itself.
        constants: of `kdist.planner.constants`.
    """
    parts = {
        "compute": facts.accumulate * micro_step,
        "straggling": facts.accumulate * micro_step * straggling(facts, constants),
        **_exposed_exchange(facts, micro_step, constants),
        "coordination": coordination_seconds(facts, constants),
        "feed": feed_seconds(facts, constants),
    }
    busy = sum(parts.values())
    ready = input_seconds(facts, constants)
    both = input_pipeline.soft_maximum(busy, ready, constants.soft_maximum_exponent)
    parts["input wait"] = both - busy
    parts["slowest node"] = both * node_straggling(facts, constants)
    return parts


def straggling(facts, constants):
    """By what share computation takes longer than on one device alone."""
    doublings = np.where(facts.asynchronous > 0, 0, np.log2(facts.devices_in_node))
    power = constants.paired_dies_slowdown * facts.paired_dies * (facts.devices_in_node > 1)
    return constants.straggling_per_doubling * doublings + power


def node_straggling(facts, constants):
    """By what share an update takes longer for the slowest node's sake.

    What makes a node late is its host, all the less the faster that is.
    """
    host = np.where(facts.recent_host > 0, constants.recent_core_speed, 1)
    synchronous = 1 - facts.asynchronous
    return synchronous * constants.node_spread * facts.slowest_node / host


def ring_rate(facts, constants):
    """Bytes a second of a ring in a node with peer-to-peer.

    In a cube mesh two neighbours have a third of their links to each other. NCCL 1 has one ring
    over both sockets as soon as it needs more than half of a node.
    """
    linked = facts.ring_bytes_per_s * constants.nvlink_share
    linked = linked * np.where((facts.cube_mesh > 0) & (facts.devices_in_node == 2), 1 / 3, 1)
    crosses = (facts.nccl1 > 0) & (facts.devices_in_node > facts.gpus_per_node / 2)
    sockets = np.minimum(linked, SOCKET_BYTES_PER_S * constants.socket_share)
    linked = np.where(crosses, sockets, linked)
    return np.where(facts.nvlink > 0, linked, facts.pcie_bytes_per_s * constants.pcie_share)


def staged_rates(facts, constants):
    """Without peer-to-peer: bytes a second of all devices together, and of one.

    Devices share root ports, more of them the fuller the node is.
    """
    others = np.maximum(0, facts.devices_in_node - 2) / np.maximum(1, facts.gpus_per_node - 2)
    sharing = 1 + constants.shared_port_devices * others
    together = facts.pcie_bytes_per_s * constants.staged_host_share
    return together, facts.pcie_bytes_per_s * constants.staged_device_share / sharing


def exchange_in_node_seconds(facts, constants):
    """The exchange between the devices of a node, without latency."""
    size, devices = facts.gradient_bytes, facts.devices_in_node
    direct = exchange.ring_seconds(size, devices, ring_rate(facts, constants))
    ring = exchange.staged_ring_bytes(size, devices)
    server = exchange.staged_server_bytes(size, facts.weight_bytes, facts.largest_share, devices)
    total, busiest = (
        np.where(facts.on_devices > 0, *pair) for pair in zip(server, ring, strict=True)
    )
    staged = exchange.staged_seconds(total, busiest, *staged_rates(facts, constants))
    pcie = facts.pcie_bytes_per_s * constants.host_server_share
    on_host = np.where(devices > 1, exchange.server_on_host_seconds(size, devices, pcie), 0)
    between_devices = np.where(facts.direct > 0, direct, staged)
    return np.where(facts.on_host > 0, on_host, between_devices)


def exchange_between_nodes(facts, constants):
    """Seconds of the exchange over the network, and seconds of its latency.

    Nodes exchange with each other, or each of them with parameter servers.
    """
    network = facts.network_bytes_per_s * constants.network_share
    hop = constants.hop_ms * 1e-3 * NETWORK_HOPS
    transfer, latency = exchange.all_reduce_parts(facts.gradient_bytes, facts.nodes, network, hop)
    served = facts.on_servers > 0
    return np.where(served, 0, transfer), np.where(served, 2 * hop, latency)


def exchange_with_servers_seconds(facts, micro_step, constants):
    """Seconds that a node waits for parameter servers, without latency."""
    network = facts.network_bytes_per_s * constants.network_share
    sizes = facts.gradient_bytes, facts.weight_bytes
    worker = exchange.worker_seconds(*sizes, network)
    # Asynchronous workers send while others receive, both ways at once.
    both_ways = np.where(facts.asynchronous > 0, np.maximum(*sizes), sum(sizes))
    servers = exchange.servers_seconds(
        both_ways, facts.largest_share, facts.nodes, facts.servers, network
    )
    computing = facts.accumulate * micro_step * facts.local_steps
    alone = exchange.asynchronous_seconds(computing, worker, servers)
    together = exchange.parameter_servers_seconds(worker, servers)
    return facts.on_servers * np.where(facts.asynchronous > 0, alone, together)


def exchange_parts(facts, micro_step, constants):
    """The parts of an exchange by name, before any of it hides."""
    between, network_latency = exchange_between_nodes(facts, constants)
    several = facts.devices > 1
    hops = exchange.ring_latency_seconds(facts.devices_in_node, constants.hop_ms * 1e-3)
    return {
        "exchange in node": np.where(several, exchange_in_node_seconds(facts, constants), 0),
        "exchange between nodes": between
        + exchange_with_servers_seconds(facts, micro_step, constants),
        "latency": hops + network_latency,
    }


def exposed_share(facts, total, micro_step, constants):
    """Share of an exchange of `total` seconds that no computation hides.

    Parameter servers get gradients tensor by tensor while others are computed, but the largest
    tensor of a model cannot hide: it belongs to the layer that comes first or last.
    """
    by_tensor = np.maximum(facts.on_host, facts.on_servers * (1 - facts.asynchronous))
    hides = np.maximum(by_tensor * constants.host_server_overlap, facts.overlap)
    unhidden = np.where(by_tensor > 0, facts.largest_share, 0)
    exposed = exchange.exposed_seconds(total, hides * micro_step, unhidden)
    return np.where(total > 0, exposed / np.maximum(total, 1e-12), 1)


def _exposed_exchange(facts, micro_step, constants):
    """What an update waits for its exchange; with local steps there is one in several updates."""
    parts = exchange_parts(facts, micro_step, constants)
    share = exposed_share(facts, sum(parts.values()), micro_step, constants) / facts.local_steps
    return {name: seconds * share for name, seconds in parts.items()}


def coordination_seconds(facts, constants):
    """Horovod's processes agree on which gradients are ready."""
    cycle = constants.horovod_ms * 1e-3 * facts.horovod
    return np.where(facts.devices > 1, cycle, 0) / facts.local_steps


def feed_seconds(facts, constants):
    """What the host does for an update while devices wait: copies of images, dispatch."""
    size, examples = facts.bytes_to_device, facts.node_examples
    copied = input_pipeline.copy_seconds(size, examples, constants)
    fed = input_pipeline.numpy_feed_seconds(
        size, examples, facts.tensors, facts.devices_in_node, constants
    )
    return np.where(facts.numpy > 0, fed, facts.in_graph * copied)


def input_seconds(facts, constants):
    """Preparing the examples of an update on the host of a node."""
    each = facts.decoded * input_pipeline.core_seconds(facts, constants)
    processes = facts.horovod * facts.devices_in_node
    cores = input_pipeline.effective_cores(facts, processes, constants)
    return facts.node_examples * each / cores


def micro_step_of(facts, rate, constants):
    """Seconds of computation of a micro-step on one device, from a measured rate.

    The inverse of `update_seconds`, by the secant method from above: the time of an update is
    nearly in proportion to that of its computation. Where all else already takes longer than the
    measured update, it is next to nothing.

    Args:
        facts: of the set-ups that were measured.
        rate: examples a second of all devices together.
        constants: of `kdist.planner.constants`.
    """
    measured = facts.devices * facts.local_batch * facts.accumulate / rate
    most = measured / facts.accumulate
    least = most * 1e-6
    before, here = most, most * 0.9
    off_before = _seconds(facts, before, constants) - measured
    for _ in range(SECANTS):
        off = _seconds(facts, here, constants) - measured
        if np.all(np.abs(off) < 1e-9 * measured):
            break
        slope = (off - off_before) / np.where(here == before, 1, here - before)
        step = off / np.where(slope > 0, slope, 1)
        before, off_before, here = here, off, np.clip(here - step, least, most)
    return here


def _seconds(facts, micro_step, constants):
    return sum(update_seconds(facts, micro_step, constants).values())
