"""Time of exchanging gradients, activations, and variables between devices.

    >>> round(float(ring_seconds(100e6, 8, 10e9)), 6)   # 2 x 7/8 x 100 MB at 10 GB/s
    0.0175

All functions accept numbers or NumPy arrays. Sizes are in bytes, rates in bytes per second and
direction.
"""

import numpy as np


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
