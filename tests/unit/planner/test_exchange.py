"""Time of exchanges against values computed by hand."""

import math

import numpy as np
import pytest

from kdist.planner.cost.update import (
    all_reduce_parts,
    all_reduce_seconds,
    asynchronous_seconds,
    exposed_seconds,
    pipeline_transfer_seconds,
    ring_latency_seconds,
    ring_seconds,
    server_on_host_seconds,
    servers_seconds,
    staged_ring_bytes,
    staged_seconds,
    staged_server_bytes,
    tree_latency_seconds,
    tree_seconds,
)


def test_ring():
    assert ring_seconds(100e6, 8, 10e9) == pytest.approx(0.0175)
    assert ring_seconds(100e6, 1, 10e9) == 0
    assert ring_latency_seconds(8, 1e-5) == pytest.approx(14e-5)


def test_ring_time_grows_with_devices_up_to_a_limit():
    times = ring_seconds(100e6, np.arange(1, 1000), 10e9)
    assert (np.diff(times) > 0).all()
    assert times[-1] < 0.02


def test_tree():
    assert tree_seconds(100e6, 8, 10e9) == pytest.approx(0.02)
    assert tree_seconds(100e6, 1, 10e9) == 0
    assert tree_latency_seconds(8, 1e-5) == pytest.approx(6e-5)
    assert tree_latency_seconds(9, 1e-5) == pytest.approx(8e-5)


def test_small_messages_use_a_tree_and_large_ones_a_ring():
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
    # Eight workers, each 300 MB, over four servers.
    assert servers_seconds(300e6, 0.1, 8, 4, 1e9) == pytest.approx(0.6)
    # A tensor of half of the model is on one server, however many there are.
    assert servers_seconds(300e6, 0.5, 8, 4, 1e9) == pytest.approx(1.2)


def test_asynchronous_workers_wait_for_slow_servers():
    assert asynchronous_seconds(1.0, 0.3, 0.6) == pytest.approx(0.3)
    assert asynchronous_seconds(1.0, 0.3, 2.0) == pytest.approx(1.0)


def test_computation_hides_all_but_the_largest_tensor():
    assert exposed_seconds(1.0, 0.0) == pytest.approx(1.0)
    assert exposed_seconds(0.1, 10.0) == pytest.approx(0.1 - 10 * (1 - math.exp(-0.01)))
    assert exposed_seconds(1.0, 1.0, 0.75) == pytest.approx(1 - (1 - math.exp(-0.25)))
    exposed = exposed_seconds(1.0, np.linspace(0, 5, 50), 0.2)
    assert (np.diff(exposed) < 0).all()
    assert exposed[-1] > 0.2


def test_pipeline():
    # Three micro-batches over one boundary, there and back.
    assert pipeline_transfer_seconds(1e6, 2, 3, 1e9, 1e-4) == pytest.approx(6 * 1.1e-3)
    assert pipeline_transfer_seconds(1e6, 1, 3, 1e9) == 0
