"""Equations for the time of one update, and of exchanges between devices.

    >>> round(float(ring_seconds(100e6, 8, 10e9)), 6)   # 2 x 7/8 x 100 MB at 10 GB/s
    0.0175

All functions accept numbers or NumPy arrays: one setup or many. Sizes are in bytes, rates in bytes
per second and direction. `features` are `CostFeatures`, and constants those of
`kdist.planner.cost.constants`.
"""

import numpy as np

SOCKET_BYTES_PER_S = 9.6e9  # peer-to-peer over one of two links of 19.2 GB/s between two sockets
NETWORK_HOPS = 5  # latency of a hop between nodes, in hops within a node
_MAX_SECANTS = 20  # bound of the iteration, which converges in a few
_POLICY_MEGAPIXELS = 0.05  # 224 x 224 pixels, for which the time of augmentation policies is given


def ring_seconds(size, devices, bytes_per_s):
    """Returns the transfer time of a ring all-reduce, without latency.

    Each device sends and receives 2 (n - 1) / n of `size` (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009).
    """
    return 2 * (devices - 1) / devices * size / bytes_per_s


def ring_latency_seconds(devices, hop_seconds):
    """Returns the latency of a ring all-reduce: 2 (n - 1) hops."""
    return 2 * (devices - 1) * hop_seconds


def tree_seconds(size, devices, bytes_per_s):
    """Returns the transfer time of a double binary tree, without latency.

    All of `size` goes up and down at the full rate of a link (Sanders, Speck, and Träff, "Two-tree
    algorithms for full bandwidth broadcast, reduction and scan", 2009; in NCCL since 2.4).
    """
    return np.where(np.asarray(devices) > 1, 2.0, 0.0) * size / bytes_per_s


def tree_latency_seconds(devices, hop_seconds):
    """Returns the latency of a tree all-reduce: 2 log2(n) hops, rounded up."""
    return 2 * np.ceil(np.log2(devices)) * hop_seconds


def all_reduce_parts(size, devices, bytes_per_s, hop_seconds):
    """Returns transfer time and latency of the faster of ring and tree, as NCCL chooses."""
    transfers = ring_seconds(size, devices, bytes_per_s), tree_seconds(size, devices, bytes_per_s)
    hops = ring_latency_seconds(devices, hop_seconds), tree_latency_seconds(devices, hop_seconds)
    by_ring = transfers[0] + hops[0] <= transfers[1] + hops[1]
    return np.where(by_ring, *transfers), np.where(by_ring, *hops)


def all_reduce_seconds(size, devices, bytes_per_s, hop_seconds):
    """Returns the time of the faster of ring and tree, with latency."""
    transfer, latency = all_reduce_parts(size, devices, bytes_per_s, hop_seconds)
    return transfer + latency


def server_on_host_seconds(size, devices, pcie_bytes_per_s):
    """Returns the time of the exchange with variables on the CPU of the node.

    Weights go down and gradients of the same size go up for each device. Two devices share the PCIe
    lanes of a board or switch, so that from the third device on traffic takes up to twice as long.
    """
    return 2 * size * np.clip(np.asarray(devices) / 2, 1, 2) / pcie_bytes_per_s


def staged_seconds(total_bytes, device_bytes, host_bytes_per_s, device_bytes_per_s):
    """Returns the time of an exchange through the memory of the host, without peer-to-peer.

    The traffic of all devices of the node and that of the busiest device have a limit each. Neither
    fully hides the other: they add up like the legs of a right triangle.
    """
    return np.hypot(total_bytes / host_bytes_per_s, device_bytes / device_bytes_per_s)


def staged_ring_bytes(size, devices):
    """Returns the bytes that a staged ring all-reduce moves: of all devices, and of each."""
    return 2 * (devices - 1) * size, 2 * (devices - 1) / devices * size


def staged_server_bytes(size, weight_bytes, largest_share, devices):
    """Returns the bytes moved for variables spread over devices: of all, and of the busiest.

    The owner of a variable receives the gradients of all others and sends them the new weights.
    """
    others = devices - 1
    owned = np.maximum(largest_share, 1 / np.asarray(devices)) * weight_bytes
    return others * (weight_bytes + size), others * owned


def servers_seconds(bytes_per_worker, largest_share, workers, servers, network_bytes_per_s):
    """Returns the time of the busiest parameter server for one update from each worker.

    It holds an equal part of the variables, or the largest variable, which is never divided.
    `bytes_per_worker` are gradients and weights if all workers first send and then receive, the
    larger of both if some workers send while others receive.
    """
    share = np.maximum(largest_share, 1 / np.asarray(servers))
    return workers * share * bytes_per_worker / network_bytes_per_s


def asynchronous_seconds(compute, worker, servers):
    """Returns the time that an asynchronous worker waits between two steps.

    It waits for its own traffic. It waits for the servers only if these take longer (`servers`)
    than the worker's whole cycle.
    """
    return worker + np.maximum(0, servers - compute - worker)


def exposed_seconds(exchange, hideable, unhidden_share=0.0):
    """Returns the part of an exchange, tensor by tensor, that computation does not hide.

    The more there is to hide, the smaller the part that fits: r - h (1 - exp(-r / h)), where h is
    `hideable`, the seconds of computation at the same time, and r is the exchange without the
    fraction that cannot be hidden, such as a large tensor that is ready last.
    """
    room = np.maximum(hideable, 1e-9)
    rest = exchange * (1 - np.asarray(unhidden_share))
    return exchange - room * -np.expm1(-rest / room)


def pipeline_transfer_seconds(
    boundary_bytes: float,
    stages: int,
    micro_batches: int,
    bytes_per_s: float,
    hop_seconds: float = 0.0,
) -> float:
    """Returns the exposed transfer time between pipeline stages, forward and backward.

    The last micro-batch leaves the first of p stages after m - 1 others, and crosses p - 1
    boundaries, each with `boundary_bytes` of activations of one micro-batch.
    """
    if stages == 1:
        return 0.0
    one = boundary_bytes / bytes_per_s + hop_seconds
    return 2 * (micro_batches + stages - 2) * one


def update_seconds(features, micro_step, constants):
    """Returns the terms of an update by name; they add up to its seconds.

    `micro_step` is the seconds of computation of a micro-step on one device alone.
    """
    terms = {
        "compute": features.accumulate * micro_step,
        "straggling": features.accumulate * micro_step * straggling_share(features, constants),
        **_exposed_exchange(features, micro_step, constants),
        "coordination": coordination_seconds(features, constants),
        "feed": feed_seconds(features, constants),
    }
    busy = sum(terms.values())
    ready = input_seconds(features, constants)
    both = soft_maximum(busy, ready, constants.soft_maximum_exponent)
    terms["input wait"] = both - busy
    terms["slowest node"] = both * node_straggling_share(features, constants)
    return terms


def infer_micro_step(features, rate, constants):
    """Returns the computation of a micro-step on one device, in seconds, from a measured rate.

    Inverts `update_seconds` by the secant method from above, since the time of an update is nearly
    proportional to that of its computation. The result is close to zero if everything else already
    takes longer than the measured update. The rate is in examples per second of all devices.
    """
    measured = features.devices * features.local_batch * features.accumulate / rate
    largest = measured / features.accumulate
    smallest = largest * 1e-6
    previous, current = largest, largest * 0.9
    previous_error = _total(features, previous, constants) - measured
    for _ in range(_MAX_SECANTS):
        error = _total(features, current, constants) - measured
        if np.all(np.abs(error) < 1e-9 * measured):
            break
        slope = (error - previous_error) / np.where(current == previous, 1, current - previous)
        step = error / np.where(slope > 0, slope, 1)
        previous, previous_error = current, error
        current = np.clip(current - step, smallest, largest)
    return current


def _total(features, micro_step, constants):
    return sum(update_seconds(features, micro_step, constants).values())


def straggling_share(features, constants):
    """Returns the fraction by which computation is slower than on one device alone."""
    doublings = np.where(features.asynchronous > 0, 0, np.log2(features.devices_in_node))
    power = constants.paired_dies_slowdown * features.paired_dies * (features.devices_in_node > 1)
    return constants.straggling_per_doubling * doublings + power


def node_straggling_share(features, constants):
    """Returns the fraction by which the slowest node delays an update.

    The host is what delays a node; a faster host delays it less.
    """
    host = np.where(features.recent_host > 0, constants.recent_core_speed, 1)
    synchronous = 1 - features.asynchronous
    return synchronous * constants.node_spread * features.slowest_node / host


# Exchange of gradients and weights.


def ring_rate(features, constants):
    """Returns the bytes per second of a ring in a node with peer-to-peer.

    In a cube mesh two neighbors share a third of their links. NCCL 1 has one ring over both sockets
    if it needs more than half of a node.
    """
    linked = features.ring_bytes_per_s * constants.nvlink_share
    neighbors = (features.cube_mesh > 0) & (features.devices_in_node == 2)
    linked = linked * np.where(neighbors, 1 / 3, 1)
    crosses = (features.nccl1 > 0) & (features.devices_in_node > features.gpus_per_node / 2)
    sockets = np.minimum(linked, SOCKET_BYTES_PER_S * constants.socket_share)
    linked = np.where(crosses, sockets, linked)
    return np.where(features.nvlink > 0, linked, features.pcie_bytes_per_s * constants.pcie_share)


def link_rate(features, constants):
    """Returns the bytes per second of one device that sends to another one of its node."""
    staged = staged_rates(features, constants)[1]
    return np.where(features.direct > 0, ring_rate(features, constants), staged)


def staged_rates(features, constants):
    """Returns bytes per second without peer-to-peer: of all devices together, and of one.

    Devices share root ports, more of them the fuller the node is.
    """
    others = np.maximum(0, features.devices_in_node - 2) / np.maximum(1, features.gpus_per_node - 2)
    sharing = 1 + constants.shared_port_devices * others
    all_devices = features.pcie_bytes_per_s * constants.staged_host_share
    return all_devices, features.pcie_bytes_per_s * constants.staged_device_share / sharing


def exchange_in_node_seconds(features, constants):
    """Returns the time of the exchange between the devices of a node, without latency."""
    size, devices = features.gradient_bytes, features.devices_in_node
    direct = ring_seconds(size, devices, ring_rate(features, constants))
    ring = staged_ring_bytes(size, devices)
    shares = features.weight_bytes, features.largest_share
    server = staged_server_bytes(size, *shares, devices)
    total, busiest = (
        np.where(features.on_devices > 0, *pair) for pair in zip(server, ring, strict=True)
    )
    staged = staged_seconds(total, busiest, *staged_rates(features, constants))
    pcie = features.pcie_bytes_per_s * constants.host_server_share
    on_host = np.where(devices > 1, server_on_host_seconds(size, devices, pcie), 0)
    between_devices = np.where(features.direct > 0, direct, staged)
    return np.where(features.on_host > 0, on_host, between_devices)


def exchange_between_nodes(features, constants):
    """Returns transfer time and latency of the network: an all-reduce or parameter servers."""
    network = features.network_bytes_per_s * constants.network_share
    hop = constants.hop_ms * 1e-3 * NETWORK_HOPS
    size, nodes = features.bytes_between_nodes, features.nodes
    transfer, latency = all_reduce_parts(size, nodes, network, hop)
    served = features.on_servers > 0
    return np.where(served, 0, transfer), np.where(served, 2 * hop, latency)


def exchange_with_servers_seconds(features, micro_step, constants):
    """Returns the time that a node waits for parameter servers, without latency."""
    network = features.network_bytes_per_s * constants.network_share
    sizes = features.gradient_bytes, features.weight_bytes
    worker = sum(sizes) / network  # receives weights, then sends gradients
    # Some asynchronous workers send while others receive.
    both_ways = np.where(features.asynchronous > 0, np.maximum(*sizes), sum(sizes))
    servers = servers_seconds(
        both_ways, features.largest_share, features.nodes, features.servers, network
    )
    computing = features.accumulate * micro_step * features.local_steps
    asynchronous = asynchronous_seconds(computing, worker, servers)
    synchronous = np.maximum(worker, servers)  # the busier side of the network
    waiting = np.where(features.asynchronous > 0, asynchronous, synchronous)
    return features.on_servers * waiting


def exchange_parts(features, micro_step, constants):
    """Returns the terms of an exchange by name, before computation hides any of it."""
    between, network_latency = exchange_between_nodes(features, constants)
    in_node = exchange_in_node_seconds(features, constants)
    hops = ring_latency_seconds(features.devices_in_node, constants.hop_ms * 1e-3)
    return {
        "exchange in node": np.where(features.devices > 1, in_node, 0),
        "exchange between nodes": between
        + exchange_with_servers_seconds(features, micro_step, constants),
        "latency": hops + network_latency,
    }


def exposed_share(features, total, micro_step, constants):
    """Returns the fraction of an exchange of `total` seconds that computation does not hide.

    Parameter servers receive gradients tensor by tensor while others are computed. The largest
    tensor cannot be hidden: it belongs to the first or the last layer.
    """
    by_tensor = np.maximum(features.on_host, features.on_servers * (1 - features.asynchronous))
    hides = np.maximum(by_tensor * constants.host_server_overlap, features.overlap)
    unhidden = np.where(by_tensor > 0, features.largest_share, 0)
    exposed = exposed_seconds(total, hides * micro_step, unhidden)
    return np.where(total > 0, exposed / np.maximum(total, 1e-12), 1)


def _exposed_exchange(features, micro_step, constants):
    """Returns the exposed terms of the exchange, averaged over local steps."""
    parts = exchange_parts(features, micro_step, constants)
    total = sum(parts.values())
    share = exposed_share(features, total, micro_step, constants) / features.local_steps
    return {name: seconds * share for name, seconds in parts.items()}


def coordination_seconds(features, constants):
    """Returns the time in which Horovod's processes agree on which gradients are ready."""
    cycle = constants.horovod_ms * 1e-3 * features.horovod
    return np.where(features.devices > 1, cycle, 0) / features.local_steps


# Input of the devices.


def feed_seconds(features, constants):
    """Returns the host's time for copies and dispatch in an update, while devices wait."""
    size, examples = features.bytes_to_device, features.node_examples
    copied = copy_seconds(size, examples, constants)
    fed = numpy_feed_seconds(size, examples, features.tensors, features.devices_in_node, constants)
    return np.where(features.numpy > 0, fed, features.in_graph * copied)


def input_seconds(features, constants):
    """Returns the time in which the host of a node prepares the examples of an update."""
    each = features.decoded * core_seconds(features, constants)
    processes = features.horovod * features.devices_in_node
    cores = effective_cores(features, processes, constants)
    return features.node_examples * each / cores


def core_seconds(work, constants):
    """Returns the time of one core of a PCIe-3 host for one example: decode, resize, augment.

    `work` has the sizes and flags of `InputWork` as numbers, and `dali`.
    """
    pixels = work.model_megapixels
    policy = (pixels / _POLICY_MEGAPIXELS) ** constants.policy_exponent * _POLICY_MEGAPIXELS
    milliseconds = (
        constants.decode_core_ms_per_megapixel * work.source_megapixels
        + constants.resize_core_ms_per_megapixel * pixels
        + constants.policy_core_ms_per_megapixel * work.policy * policy
        + constants.masks_core_ms * work.masks
    )
    return milliseconds * 1e-3 * np.where(work.dali, constants.dali_cpu_share, 1)


def effective_cores(host, processes, constants):
    """Returns the number of cores of a PCIe-3 host that prepare input equally fast.

    A vCPU is less than a core, newer hosts have faster cores, and each of `processes` Horovod
    processes keeps some of them busy. `host.input_threads` is an upper bound of the cores in use.
    """
    cores = np.minimum(host.cores, host.input_threads) * np.where(
        host.vcpus, constants.cores_per_vcpu, 1
    )
    free = 1 / (1 + constants.horovod_process_cores * processes / cores)
    return cores * free * np.where(host.recent_host, constants.recent_core_speed, 1)


def copy_seconds(bytes_per_example, examples, constants):
    """Returns the time in which one process copies images to all devices of a node."""
    return examples * bytes_per_example / (constants.in_graph_copy_gb_s * 1e9)


def numpy_feed_seconds(bytes_per_example, examples, tensors, devices, constants):
    """Returns the time of one Python thread that feeds arrays and dispatches to all devices.

    Keras's `multi_gpu_model` worked this way and read its variables tensor by tensor.
    """
    feed = examples * bytes_per_example * constants.numpy_feed_ns_per_byte * 1e-9
    return feed + devices * tensors * constants.dispatch_ms_per_tensor * 1e-3


def soft_maximum(first, second, exponent):
    """Returns a little more than the longer of two concurrent activities: (a^p + b^p)^(1/p).

    The one that is faster on average is sometimes late.
    """
    longer = np.maximum(first, second)
    return longer * ((first / longer) ** exponent + (second / longer) ** exponent) ** (1 / exponent)
