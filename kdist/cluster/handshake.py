"""Handshake of a job's tasks before TensorFlow starts.

    run_handshake(cluster, {"kdist": kdist.__version__, "--model": "lenet"}, timeout_seconds=60)

TensorFlow waits forever for a task that does not start, and a job whose tasks run with different
flags hangs or trains a wrong model. The handshake finds both within seconds. Each task listens on
its own address and sends its settings to the first task, as one line of JSON. The first task waits
for all tasks, connects back to each address, and sends everyone the result. The messages contain
nothing that is not on the command line.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from kdist.cluster import Cluster

_RETRY_SECONDS = 0.1

# No task sends a longer line; longer input comes from another program.
_MAX_LINE_BYTES = 1 << 20


class JobAlreadyRunningError(RuntimeError):
    """The handshake is over: TensorFlow's server answers at the first task's address."""


def run_handshake(
    cluster: Cluster,
    settings: Mapping[str, str],
    timeout_seconds: float = 60.0,
    payload: Any = None,
) -> dict[str, Any]:
    """Returns the payloads of all tasks, by name, when all have started with equal settings.

    Every task of the job must call it. A cluster of one task returns at once. `settings` are the
    values that must be equal, by name: versions, flags. The `payload` of this task must be
    JSON-serializable. The limit is for the whole handshake.

    Raises:
        TimeoutError: If a task does not start, or its address does not answer.
        ValueError: If two tasks have the same place, or settings differ.
        OSError: If this task cannot listen on its own address.
        JobAlreadyRunningError: If the job has started without this task.
    """
    if cluster.is_alone:
        return {cluster.name: payload}
    deadline = time.monotonic() + timeout_seconds
    with _listening(cluster) as listener:
        if cluster == cluster.first_task:
            server = _HandshakeServer(cluster, settings, deadline, timeout_seconds)
            result = server.run(listener, payload)
        else:
            result = _report_to_first_task(cluster, settings, deadline, timeout_seconds, payload)
    if result["errors"]:
        raise ValueError("\n".join(result["errors"]))
    if result["timeout"]:
        raise TimeoutError(result["timeout"])
    return result["payloads"]


def parse_address(address: str) -> tuple[str, int]:
    """Returns (host, port) of `"host:port"` or `"[host]:port"`, as sockets expect them."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _listening(cluster):
    host, port = parse_address(cluster.address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(
            f"{cluster.name} cannot listen on its address {cluster.address}: "
            f"{error.strerror or error}. Another task with the same index, or another program, may "
            "use it: start each task once, or choose another port"
        ) from error
    with listener:
        yield listener


# The first task.


class _HandshakeServer:
    """The first task's side: collects the messages of all tasks and sends the result."""

    def __init__(self, cluster, settings, deadline, timeout_seconds):
        self._cluster, self._settings = cluster, dict(settings)
        self._deadline, self._timeout_seconds = deadline, timeout_seconds
        self._connections = []
        self._payloads = {}  # by task name
        self._errors = []

    def run(self, listener, payload):
        self._payloads[self._cluster.name] = payload
        with contextlib.ExitStack() as connections:
            timeout = self._wait_for_all(listener, connections)
            if not timeout:
                self._connect_back()
            result = {"timeout": timeout, "errors": self._errors, "payloads": self._payloads}
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.sendall(_encode(result))
        return result

    def _wait_for_all(self, listener, connections):
        """Receives the tasks' messages; returns an error message if tasks are missing."""
        while missing := [t for t in self._cluster.all_tasks() if t.name not in self._payloads]:
            if self._errors:
                return ""
            listener.settimeout(max(self._deadline - time.monotonic(), 0.01))
            try:
                connection, peer = listener.accept()
            except TimeoutError:
                return _missing_message(missing, self._timeout_seconds)
            connections.enter_context(connection)
            self._receive(connection, peer)
        return ""

    def _receive(self, connection, peer):
        message = _decode(_read_line(connection, self._deadline))
        fields = {"task", "tasks", "settings", "payload"}
        if not isinstance(message, dict) or not fields <= message.keys():
            return  # not a task: a port scan or a health check
        name = message["task"]
        self._connections.append(connection)
        if name in self._payloads:
            self._errors.append(
                f"two tasks have the place of {name}, the second one at {peer[0]}; give each its "
                "own index"
            )
        elif message["tasks"] != _tasks(self._cluster):
            self._errors.append(
                f"{name} is configured with the cluster {json.dumps(message['tasks'])}, and "
                f"{self._cluster.name} with {json.dumps(_tasks(self._cluster))}; configure all "
                "tasks with the same cluster"
            )
        self._errors += self._differences(name, message["settings"])
        self._payloads.setdefault(name, message["payload"])

    def _differences(self, name, settings):
        own = self._settings
        return [
            f"{key} is {settings.get(key, 'not set')} on {name}, and {own.get(key, 'not set')} on "
            f"{self._cluster.name}; it must be the same on all tasks"
            for key in sorted(own.keys() | settings.keys())
            if own.get(key) != settings.get(key)
        ]

    def _connect_back(self):
        for task in self._cluster.others():
            try:
                left = max(self._deadline - time.monotonic(), 1.0)
                socket.create_connection(parse_address(task.address), timeout=left).close()
            except OSError as error:
                self._errors.append(
                    f"{task.name} runs, but its address {task.address} does not answer from "
                    f"{self._cluster.name}: {error.strerror or error}. Use the address by which "
                    "the other hosts reach it, and open the port"
                )


def _missing_message(tasks, seconds):
    names = ", ".join(f"{task.name} ({task.address})" for task in tasks)
    return (
        f"{names} did not start within {seconds:.0f} s; start {'it' if len(tasks) == 1 else 'them'}"
        ", correct the address, or allow more time (--cluster_timeout_seconds)"
    )


# The other tasks.


def _report_to_first_task(cluster, settings, deadline, timeout_seconds, payload):
    first = cluster.first_task
    message = {"task": cluster.name, "tasks": _tasks(cluster)}
    with _connect(first, deadline, timeout_seconds) as connection:
        connection.sendall(_encode({**message, "settings": dict(settings), "payload": payload}))
        # The first task may have started later, and its deadline is later by that much.
        answer = _read_line(connection, deadline + timeout_seconds)
    if _is_grpc(answer):
        raise JobAlreadyRunningError(f"the job of {cluster.name} is already running")
    result = _decode(answer)
    if not isinstance(result, dict):
        raise TimeoutError(
            f"{first.name} ({first.address}) ended before all tasks had started; see its own "
            "message for the reason"
        )
    return result


def _connect(first, deadline, timeout_seconds):
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(_missing_message([first], timeout_seconds))
        try:
            return socket.create_connection(parse_address(first.address), timeout=left)
        except OSError:
            time.sleep(min(_RETRY_SECONDS, max(left, 0)))


# Both sides.


def _tasks(cluster):
    return {role: list(addresses) for role, addresses in cluster.tasks.items()}


def _encode(data):
    return json.dumps(data).encode() + b"\n"


def _decode(line):
    """Returns the value of a line of JSON; None if it is malformed."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _read_line(connection, deadline):
    """Returns one line, or the bytes received before the connection ended or timed out."""
    connection.settimeout(max(deadline - time.monotonic(), 0.01))
    try:
        with connection.makefile("rb") as stream:
            return stream.readline(_MAX_LINE_BYTES)
    except OSError:
        return b""


def _is_grpc(answer):
    """Returns whether the bytes start with an HTTP/2 SETTINGS frame, as a gRPC server sends it."""
    return len(answer) >= 9 and answer[3:5] == b"\x04\x00" and answer[5:9] == bytes(4)
