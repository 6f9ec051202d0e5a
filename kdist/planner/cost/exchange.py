"""Seconds that devices take to exchange gradients, activations and variables.

    >>> round(ring_seconds(100e6, 8, 10e9), 6)   # 2 x 7/8 x 100 MB at 10 GB/s
    0.0175

All take numbers or NumPy arrays of them. Sizes are in bytes, rates in bytes a second each way.
"""

from collections.abc import Sequence

import numpy as np


def ring_seconds(size, devices, bytes_per_s):
    """A ring all-reduce: each device sends and receives 2 (n - 1) / n of `size`.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    2009. The latency of its hops is that of `ring_latency_seconds`.
    """
    return 2 * (devices - 1) / devices * size / bytes_per_s


def ring_latency_seconds(devices, hop_seconds):
    """The 2 (n - 1) steps of a ring all-reduce, one hop each."""
    return 2 * (devices - 1) * hop_seconds


def tree_seconds(size, devices, bytes_per_s):
    """A double binary tree: all of `size` goes up and comes down, at the full rate of a link.

    Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
    scan", 2009; in NCCL since 2.4.
    """
    return np.where(np.asarray(devices) > 1, 2.0, 0.0) * size / bytes_per_s


def tree_latency_seconds(devices, hop_seconds):
    """Up the tree and down again: 2 log2(n) hops, rounded up."""
    return 2 * np.ceil(np.log2(devices)) * hop_seconds


def all_reduce_parts(size, devices, bytes_per_s, hop_seconds):
    """The better of ring and tree, which is what NCCL chooses: its transfer and its latency."""
    transfers = ring_seconds(size, devices, bytes_per_s), tree_seconds(size, devices, bytes_per_s)
    hops = ring_latency_seconds(devices, hop_seconds), tree_latency_seconds(devices, hop_seconds)
    by_ring = transfers[0] + hops[0] <= transfers[1] + hops[1]
    return np.where(by_ring, *transfers), np.where(by_ring, *hops)


def all_reduce_seconds(size, devices, bytes_per_s, hop_seconds):
    """The better of ring and tree, latency included."""
    transfer, latency = all_reduce_parts(size, devices, bytes_per_s, hop_seconds)
    return transfer + latency


def server_on_host_seconds(size, devices, pcie_bytes_per_s):
    """Variables on the CPU of the node: weights down and gradients up, for each device.

    Two devices share the PCIe of a board or switch, so that from the third on traffic takes up to
    twice as long.

    Args:
        size: bytes of the gradients of one replica, which are those of its weights.
        devices: of the node.
        pcie_bytes_per_s: of one device.
    """
    return 2 * size * np.clip(np.asarray(devices) / 2, 1, 2) / pcie_bytes_per_s


def staged_seconds(total_bytes, device_bytes, host_bytes_per_s, device_bytes_per_s):
    """Without peer-to-peer all traffic goes through the memory of the host.

    What all devices send together and what the busiest of them sends have a limit each; neither
    fully hides the other: they add up as legs of a right triangle do.

    Args:
        total_bytes: of all devices of the node.
        device_bytes: of the busiest device.
        host_bytes_per_s: for all devices together.
        device_bytes_per_s: for one device.
    """
    return np.hypot(total_bytes / host_bytes_per_s, device_bytes / device_bytes_per_s)


def staged_ring_bytes(size, devices):
    """What a ring all-reduce stages: of all devices, and of each."""
    return 2 * (devices - 1) * size, 2 * (devices - 1) / devices * size


def staged_server_bytes(size, weight_bytes, largest_share, devices):
    """What variables spread over the devices stage: of all, and of the one with the largest.

    The owner of a variable gets the gradients of all others and sends them the new weights.
    """
    others = devices - 1
    owned = np.maximum(largest_share, 1 / np.asarray(devices)) * weight_bytes
    return others * (weight_bytes + size), others * owned


def worker_seconds(size, weight_bytes, network_bytes_per_s):
    """A worker's own traffic with parameter servers: it gets the weights, then sends gradients."""
    return (size + weight_bytes) / network_bytes_per_s


def servers_seconds(bytes_per_worker, largest_share, workers, servers, network_bytes_per_s):
    """What the busiest of several parameter servers needs for one update from each worker.

    It holds an equal part of the variables, or the largest of them, which is on one server alone.

    Args:
        bytes_per_worker: gradients and weights where all workers send first and then receive; the
            larger of both where some send while others receive.
        largest_share: of the model in its largest tensor.
        workers: how many.
        servers: how many.
        network_bytes_per_s: each way of a server.
    """
    share = np.maximum(largest_share, 1 / np.asarray(servers))
    return workers * share * bytes_per_worker / network_bytes_per_s


def parameter_servers_seconds(worker, servers):
    """Synchronous updates: the busier side of the network, a worker's or the servers'."""
    return np.maximum(worker, servers)


def asynchronous_seconds(compute, worker, servers):
    """What an asynchronous worker waits between two steps.

    It waits for its own traffic. Only when all workers together ask for more than the servers can
    send (`servers` is longer than a worker's whole cycle) does it wait for them as well.
    """
    return worker + np.maximum(0, servers - compute - worker)


def exposed_seconds(exchange, hideable, unhidden_share=0.0):
    """What is left of an exchange that runs, tensor by tensor, beside computation.

    The more there is to hide the less of it finds a place: r - h (1 - exp(-r / h)).

    Args:
        exchange: its seconds.
        hideable: seconds of computation beside it, h.
        unhidden_share: of the exchange that cannot hide, such as one large tensor that is ready
            last; r is the rest.
    """
    room = np.maximum(hideable, 1e-9)
    rest = exchange * (1 - np.asarray(unhidden_share))
    return exchange - room * -np.expm1(-rest / room)


def buckets(sizes: Sequence[float], bucket_bytes: float) -> list[list[int]]:
    """Indices of gradients, in the order in which they get ready, put together into buckets.

    A bucket is closed as soon as it has `bucket_bytes`.

    Raises:
        ValueError: `bucket_bytes` is not above 0.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is above 0, not {bucket_bytes}")
    filled: list[list[int]] = [[]]
    held = 0.0
    for index, size in enumerate(sizes):
        if held >= bucket_bytes:
            filled.append([])
            held = 0.0
        filled[-1].append(index)
        held += size
    return [bucket for bucket in filled if bucket]


def exposed_buckets_seconds(
    ready_seconds: Sequence[float], exchange_seconds: Sequence[float], backward_seconds: float
) -> float:
    """Seconds after the backward pass until the last of several buckets is exchanged.

    Buckets are exchanged one after the other, each as soon as it is ready and the one before is
    through (Li et al., "PyTorch Distributed", 2020).

    Args:
        ready_seconds: from the start of the backward pass, of each bucket.
        exchange_seconds: of each bucket.
        backward_seconds: of the whole backward pass.
    """
    through = 0.0
    for ready, seconds in zip(ready_seconds, exchange_seconds, strict=True):
        through = max(through, ready) + seconds
    return max(0.0, through - backward_seconds)


def tensor_parallel_seconds(activation_bytes, layers, devices, bytes_per_s, hop_seconds=0.0):
    """All-reduces of layers that are split over devices.

    A transformer layer has two in the forward pass and two in the backward pass (Shoeybi et al.,
    "Megatron-LM", 2019), each of the layer's output; nothing hides them.

    Args:
        activation_bytes: of a layer's output for the local batch.
        layers: that are split.
        devices: over which each layer is split.
        bytes_per_s: of a ring between them.
        hop_seconds: latency of a hop.
    """
    return 4 * layers * all_reduce_seconds(activation_bytes, devices, bytes_per_s, hop_seconds)


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Share of a step in which a stage of a pipeline waits: (p - 1) / (m + p - 1).

    Huang et al., "GPipe", 2019, for stages that take equally long.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def pipeline_transfer_seconds(
    boundary_bytes: float,
    stages: int,
    micro_batches: int,
    bytes_per_s: float,
    hop_seconds: float = 0.0,
) -> float:
    """Transfers of activations between stages that nothing hides, forward and backward.

    The last micro-batch leaves the first stage after m - 1 others, and crosses p - 1 boundaries.

    Args:
        boundary_bytes: of the activations of one micro-batch between two stages.
        stages: p; with one there is nothing to transfer.
        micro_batches: m.
        bytes_per_s: between two stages.
        hop_seconds: latency of a transfer.
    """
    if stages == 1:
        return 0.0
    one = boundary_bytes / bytes_per_s + hop_seconds
    return 2 * (micro_batches + stages - 2) * one
