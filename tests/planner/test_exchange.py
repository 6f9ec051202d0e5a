"""Exchanges take what their definitions say, computed by hand."""

import math

import numpy as np
import pytest

from kdist.planner.cost.exchange import (
    all_reduce_parts,
    all_reduce_seconds,
    asynchronous_seconds,
    buckets,
    exposed_buckets_seconds,
    exposed_seconds,
    parameter_servers_seconds,
    pipeline_bubble,
    pipeline_transfer_seconds,
    ring_latency_seconds,
    ring_seconds,
    server_on_host_seconds,
    servers_seconds,
    staged_ring_bytes,
    staged_seconds,
    staged_server_bytes,
    tensor_parallel_seconds,
    tree_latency_seconds,
    tree_seconds,
    worker_seconds,
)


def test_ring():
    assert ring_seconds(100e6, 8, 10e9) == pytest.approx(0.0175)
    assert ring_seconds(100e6, 1, 10e9) == 0
    assert ring_latency_seconds(8, 1e-5) == pytest.approx(14e-5)


def test_a_ring_takes_longer_with_more_devices_but_less_than_twice_the_size():
    times = ring_seconds(100e6, np.arange(1, 1000), 10e9)
    assert (np.diff(times) > 0).all()
    assert times[-1] < 0.02


def test_tree():
    assert tree_seconds(100e6, 8, 10e9) == pytest.approx(0.02)
    assert tree_seconds(100e6, 1, 10e9) == 0
    assert tree_latency_seconds(8, 1e-5) == pytest.approx(6e-5)
    assert tree_latency_seconds(9, 1e-5) == pytest.approx(8e-5)


def test_small_messages_go_by_tree_and_large_ones_by_ring():
    assert all_reduce_seconds(1e3, 64, 10e9, 1e-5) == pytest.approx(2 * 1e3 / 10e9 + 12e-5)
    transfer, latency = all_reduce_parts(1e9, 64, 10e9, 1e-5)
    assert transfer == pytest.approx(2 * 63 / 64 * 0.1)
    assert latency == pytest.approx(126e-5)


@pytest.mark.parametrize(("devices", "seconds"), [(1, 0.02), (2, 0.02), (3, 0.03), (8, 0.04)])
def test_variables_on_the_host(devices, seconds):
    assert server_on_host_seconds(100e6, devices, 10e9) == pytest.approx(seconds)


def test_staging_without_peer_to_peer():
    assert staged_ring_bytes(100.0, 4) == (600.0, 150.0)
    # Weights of 200 and gradients of 100 bytes, to and from three others; half of them with one.
    assert staged_server_bytes(100.0, 200.0, 0.5, 4) == (900.0, 300.0)
    assert staged_server_bytes(100.0, 200.0, 0.01, 4)[1] == 150.0
    assert staged_seconds(3.0, 8.0, 1.0, 2.0) == pytest.approx(5.0)


def test_parameter_servers():
    assert worker_seconds(100e6, 200e6, 1e9) == pytest.approx(0.3)
    # Eight workers, each 300 MB, over four servers.
    assert servers_seconds(300e6, 0.1, 8, 4, 1e9) == pytest.approx(0.6)
    # A tensor of half of the model is on one server, however many there are.
    assert servers_seconds(300e6, 0.5, 8, 4, 1e9) == pytest.approx(1.2)
    assert parameter_servers_seconds(0.3, 0.6) == 0.6


def test_asynchronous_workers_wait_for_servers_that_are_too_slow():
    assert asynchronous_seconds(1.0, 0.3, 0.6) == pytest.approx(0.3)
    assert asynchronous_seconds(1.0, 0.3, 2.0) == pytest.approx(1.0)


def test_what_runs_beside_computation_hides_but_for_the_largest_tensor():
    assert exposed_seconds(1.0, 0.0) == pytest.approx(1.0)
    assert exposed_seconds(0.1, 10.0) == pytest.approx(0.1 - 10 * (1 - math.exp(-0.01)))
    assert exposed_seconds(1.0, 1.0, 0.75) == pytest.approx(1 - (1 - math.exp(-0.25)))
    exposed = exposed_seconds(1.0, np.linspace(0, 5, 50), 0.2)
    assert (np.diff(exposed) < 0).all()
    assert exposed[-1] > 0.2


def test_buckets_are_filled_in_order():
    assert buckets([5, 5, 1, 20, 3], 10) == [[0, 1], [2, 3], [4]]
    assert buckets([], 10) == []
    with pytest.raises(ValueError, match="bucket_bytes is above 0"):
        buckets([1], 0)


def test_only_what_comes_after_the_backward_pass_is_waited_for():
    # The first bucket hides, the second begins at 0.6 and ends at 1.1.
    assert exposed_buckets_seconds([0.3, 0.6], [0.2, 0.5], 1.0) == pytest.approx(0.1)
    # One bucket at the very end hides nothing.
    assert exposed_buckets_seconds([1.0], [0.7], 1.0) == pytest.approx(0.7)
    # The second waits for the first.
    assert exposed_buckets_seconds([0.0, 0.1], [2.0, 0.5], 1.0) == pytest.approx(1.5)
    assert exposed_buckets_seconds([0.1], [0.1], 1.0) == 0


def test_tensor_parallel_layers_have_four_all_reduces():
    one = ring_seconds(8e6, 4, 100e9)
    assert tensor_parallel_seconds(8e6, 24, 4, 100e9) == pytest.approx(96 * one)
    assert tensor_parallel_seconds(8e6, 24, 1, 100e9, 1e-5) == 0


def test_pipeline():
    assert pipeline_bubble(4, 12) == pytest.approx(3 / 15)
    assert pipeline_bubble(1, 8) == 0
    # Three micro-batches over one boundary, there and back.
    assert pipeline_transfer_seconds(1e6, 2, 3, 1e9, 1e-4) == pytest.approx(6 * 1.1e-3)
    assert pipeline_transfer_seconds(1e6, 1, 3, 1e9) == 0
    assert pipeline_bubble(8, 8) > pipeline_bubble(8, 64)
