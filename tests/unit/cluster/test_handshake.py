"""The handshake of tasks, as threads of one process on loopback."""

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import socket
import time
import types

import pytest

from kdist.cluster import Cluster, handshake, lines
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


@pytest.mark.parametrize(
    "error", [socket.gaierror(socket.EAI_NONAME, "unknown"), OSError(errno.EADDRNOTAVAIL, "other")]
)
def test_a_host_name_that_is_published_late(cluster_of, monkeypatch, error):
    """As that of a new Kubernetes pod, which is unknown, or still that of an earlier pod."""
    create_server, errors = socket.create_server, [error, error]

    def later(address, **options):
        if errors and address[0] == "localhost":
            raise errors.pop()
        return create_server(address, **options)

    monkeypatch.setattr(socket, "create_server", later)
    monkeypatch.setattr(handshake, "_NAME_RETRY_SECONDS", 0.01)
    addresses = [a.replace("127.0.0.1", "localhost") for a in cluster_of(2).tasks["worker"]]
    assert outcomes(Cluster({"worker": addresses}).all_tasks()) == [None] * 2
    assert not errors


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


def connect(task):
    """Returns a connection to a task that may not listen yet."""
    host, _, port = task.address.partition(":")
    for _ in range(200):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), 10)
        time.sleep(0.05)
    raise AssertionError(f"{task.name} does not listen")


def is_dropped(connection):
    """Returns whether the other side ends the connection without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:  # unread data was left
        return True
    except TimeoutError:
        return False


def message(cluster, /, **changes):
    fields = {"task": "worker 1", "tasks": cluster.tasks, "settings": SETTINGS, "payload": None}
    return json.dumps(fields | changes).encode() + b"\n"


def strange_lines(task):
    return [
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff\xfe\xfd\n",
        b"\n",
        b"[1]\n",
        b"3\n",
        b'{"task": 3}\n',
        b"[" * 100_000 + b"\n",
        b"9" * 10_000 + b"\n",
        b"x" * (lines.MAX_LINE_BYTES + 1),
        message(task, task=["worker 1"]),
        message(task, task={}),
        message(task, task=1e999),
        message(task, task="worker 7"),
        message(task, task="worker 0"),
        message(task, tasks=3),
        message(task, settings=None),
        message(task, settings=["kdist"]),
        message(task, settings={"kdist": {}}),
    ]


def test_odd_lines_are_ignored(cluster_of):
    first, second = cluster_of(2).all_tasks()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        shaken = pool.submit(run_handshake, first, SETTINGS, 30)
        connect(first).close()
        for line in strange_lines(first):
            with connect(first) as stranger:
                stranger.sendall(line)
                assert is_dropped(stranger), line[:80]
        run_handshake(second, SETTINGS, 30)
        shaken.result()


def test_silent_clients_delay_no_task(cluster_of, monkeypatch):
    """There are more of them than the first task waits for; the oldest are dropped."""
    monkeypatch.setattr(lines, "_SECONDS_TO_SEND", 3600.0)
    first, second = cluster_of(2).all_tasks()
    with concurrent.futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as strangers:
        shaken = pool.submit(run_handshake, first, SETTINGS, 30)
        silent = [strangers.enter_context(connect(first)) for _ in range(100)]
        assert is_dropped(silent[0])
        run_handshake(second, SETTINGS, 30)
        shaken.result()


def test_clients_that_send_no_line_get_seconds(cluster_of, monkeypatch):
    monkeypatch.setattr(lines, "_SECONDS_TO_SEND", 0.1)
    monkeypatch.setattr(lines, "_MAX_SELECT_SECONDS", 0.1)
    first, second = cluster_of(2).all_tasks()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        shaken = pool.submit(run_handshake, first, SETTINGS, 30)
        with connect(first) as silent, connect(first) as slow:
            slow.sendall(b"{")
            assert is_dropped(silent)
            assert is_dropped(slow)
        monkeypatch.undo()
        run_handshake(second, SETTINGS, 30)
        shaken.result()


def test_the_other_tasks_drop_their_clients(cluster_of):
    """Otherwise many clients fill the queue, and the first task cannot connect back."""
    first, second = cluster_of(2).all_tasks()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        shaken = pool.submit(run_handshake, second, SETTINGS, 30)
        with socket.create_server(("127.0.0.1", int(first.address.split(":")[1]))) as server:
            reported, _ = server.accept()
            with reported, connect(second) as stranger:
                assert is_dropped(stranger)
        with pytest.raises(TimeoutError):
            shaken.result()


def answering(first, pieces):
    """Answers at the first task's address; returns whether all pieces were sent."""
    with socket.create_server(("127.0.0.1", int(first.address.split(":")[1]))) as server:
        connection, _ = server.accept()
        with connection:
            try:
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0.02)
            except ConnectionError:
                return False
            return True


@pytest.mark.parametrize("answer", [b"{}\n", b"[1]\n", b"[" * 100_000 + b"\n", b"\xff\n", b"3"])
def test_odd_answers(cluster_of, answer):
    first, second = cluster_of(2).all_tasks()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(answering, first, [answer])
        with pytest.raises(TimeoutError, match="worker 0 .* ended before"):
            run_handshake(second, SETTINGS, 30)


def test_an_answer_in_drops_has_the_same_limit(cluster_of):
    first, second = cluster_of(2).all_tasks()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        server = pool.submit(answering, first, [b"x"] * 500)
        with pytest.raises(TimeoutError):
            run_handshake(second, SETTINGS, 0.2)
        assert not server.result()


def test_tasks_with_equal_tokens_agree(cluster_of, monkeypatch):
    monkeypatch.setenv(handshake.TOKEN_VARIABLE, "a-\udcff-secret")  # not UTF-8
    assert outcomes(cluster_of(2).all_tasks()) == [None] * 2


def test_clients_without_the_token_cannot_end_a_task(cluster_of):
    first, second = cluster_of(2).all_tasks()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        shaken = pool.submit(run_handshake, first, SETTINGS, 30, None, "secret")
        for changes in ({}, {"settings": {}}, {"tasks": {}}, {"token": "wrong"}, {"token": 3}):
            with connect(first) as stranger, stranger.makefile() as answer:
                stranger.sendall(message(first, **changes))
                line = answer.readline()
            assert handshake.TOKEN_VARIABLE in line
            assert "secret" not in line
        run_handshake(second, SETTINGS, 30, None, "secret")
        assert shaken.result() == {"worker 0": None, "worker 1": None}


def test_another_token_is_named_on_both_sides(cluster_of, monkeypatch):
    first, second = cluster_of(2).all_tasks()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        shaken = pool.submit(run_handshake, first, SETTINGS, 30, None, "secret")
        with pytest.raises(ValueError, match=handshake.TOKEN_VARIABLE):
            run_handshake(second, SETTINGS, 30, None, "")
        later = types.SimpleNamespace(monotonic=lambda: float("inf"))
        monkeypatch.setattr(lines, "time", later)
        with pytest.raises(TimeoutError, match=rf"another token: 1,.*{handshake.TOKEN_VARIABLE}"):
            shaken.result()


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
