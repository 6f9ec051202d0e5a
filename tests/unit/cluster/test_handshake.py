"""The handshake of tasks, as threads of one process on loopback."""

import concurrent.futures
import contextlib
import dataclasses
import socket
import time

import pytest

from kdist.cluster import Cluster
from kdist.cluster.handshake import run_handshake
from kdist.launch.local_engine import reserve_ports

SETTINGS = {"kdist": "1", "--model": "lenet"}


@pytest.fixture
def cluster_of():
    with contextlib.ExitStack() as stack:

        def cluster(number):
            ports = stack.enter_context(reserve_ports(number))
            return Cluster({"worker": [f"127.0.0.1:{port}" for port in ports]})

        yield cluster


def outcomes(tasks, settings=None, timeout_seconds=10):
    """Returns the exception of each task, or None."""
    settings = settings or [SETTINGS] * len(tasks)
    with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
        futures = [
            pool.submit(run_handshake, *args, timeout_seconds)
            for args in zip(tasks, settings, strict=True)
        ]
        return [future.exception() for future in futures]


def test_three_tasks_agree_and_free_their_ports(cluster_of):
    tasks = cluster_of(3).all_tasks()
    assert outcomes(tasks) == [None] * 3
    for task in tasks:
        socket.create_server(("127.0.0.1", int(task.address.split(":")[1]))).close()


def test_all_tasks_receive_all_payloads(cluster_of):
    first, second = cluster_of(2).all_tasks()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        other = pool.submit(run_handshake, second, SETTINGS, 10, {"devices": 2})
        payloads = {"worker 0": 7, "worker 1": {"devices": 2}}
        assert run_handshake(first, SETTINGS, 10, 7) == other.result() == payloads


def test_a_single_task_does_not_wait():
    assert run_handshake(Cluster(), SETTINGS, timeout_seconds=0, payload=1) == {"worker 0": 1}


def test_the_others_wait_for_a_late_task(cluster_of):
    first, second = cluster_of(2).all_tasks()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(run_handshake, second, SETTINGS, 10)
        time.sleep(0.5)
        run_handshake(first, SETTINGS, 10)
        waiting.result()


def test_other_versions_and_flags_are_named_on_all_tasks(cluster_of):
    settings = [SETTINGS, SETTINGS | {"kdist": "2"}]
    for error in outcomes(cluster_of(2).all_tasks(), settings):
        assert isinstance(error, ValueError)
        assert "kdist is 2 on worker 1, and 1 on worker 0" in str(error)
        assert "--model" not in str(error)


def test_a_setting_that_one_task_lacks(cluster_of):
    settings = [SETTINGS, {"kdist": "1"}]
    for error in outcomes(cluster_of(2).all_tasks(), settings):
        assert "--model is not set on worker 1, and lenet on worker 0" in str(error)


def test_other_clusters(cluster_of):
    first, second = cluster_of(2).all_tasks()
    tasks = {"worker": [*second.tasks["worker"], "127.0.0.1:9"]}
    for error in outcomes([first, dataclasses.replace(second, tasks=tasks)]):
        assert isinstance(error, ValueError)
        assert "worker 1 is configured with the cluster" in str(error)


def test_two_tasks_of_one_index_on_one_host(cluster_of):
    first, second, _ = cluster_of(3).all_tasks()
    errors = outcomes([first, second, second], timeout_seconds=2)
    listening = [error for error in errors if isinstance(error, OSError)]
    assert any("worker 1 cannot listen" in str(error) for error in listening)
    assert any("worker 2" in str(error) and "did not start" in str(error) for error in errors)


def test_two_tasks_of_one_index_on_two_hosts(cluster_of, monkeypatch):
    """The second host is another loopback address, where the port is free."""
    create_server = socket.create_server

    def on_some_host(address, **options):
        with contextlib.suppress(OSError):
            return create_server(address, **options)
        return create_server(("127.0.0.2", address[1]), **options)

    monkeypatch.setattr(socket, "create_server", on_some_host)
    first, second, _ = cluster_of(3).all_tasks()
    for error in outcomes([first, second, second]):
        assert isinstance(error, ValueError)
        assert "two tasks have the place of worker 1" in str(error)


def test_a_task_that_does_not_start_is_named_in_time(cluster_of):
    first, second, _ = cluster_of(3).all_tasks()
    began = time.monotonic()
    errors = outcomes([first, second], timeout_seconds=1)
    assert time.monotonic() - began < 5
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert "worker 2 (127.0.0.1:" in str(error)
        assert "did not start within 1 s" in str(error)


def test_a_first_task_that_does_not_start_is_named(cluster_of):
    _, second = cluster_of(2).all_tasks()
    (error,) = outcomes([second], timeout_seconds=1)
    assert isinstance(error, TimeoutError)
    assert "worker 0 (127.0.0.1:" in str(error)


def test_other_clients_are_ignored(cluster_of):
    first, second = cluster_of(2).all_tasks()
    address = ("127.0.0.1", int(first.address.split(":")[1]))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        handshake = pool.submit(run_handshake, first, SETTINGS, 10)
        for line in (b"GET / HTTP/1.0\r\n\r\n", b'{"task": 3}\n', b""):
            for _ in range(50):
                with contextlib.suppress(ConnectionRefusedError), socket.socket() as client:
                    client.connect(address)
                    client.sendall(line)
                    break
                time.sleep(0.05)
        run_handshake(second, SETTINGS, 10)
        handshake.result()


def test_an_address_that_others_cannot_reach(cluster_of):
    """Worker 1 listens on another loopback address than the cluster has."""
    first, second = cluster_of(2).all_tasks()
    with pytest.MonkeyPatch.context() as patch:
        create_server = socket.create_server

        def on_another_host(address, **options):
            host = "127.0.0.3" if address[1] == int(second.address.split(":")[1]) else address[0]
            return create_server((host, address[1]), **options)

        patch.setattr(socket, "create_server", on_another_host)
        for error in outcomes([first, second]):
            assert "worker 1 runs, but its address" in str(error)
            assert "open the port" in str(error)
