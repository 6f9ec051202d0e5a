"""Handshake of a job's tasks before TensorFlow starts.

    run_handshake(cluster, {"kdist": kdist.__version__, "--model": "lenet"}, timeout_seconds=60)

TensorFlow waits forever for a task that does not start, and a job whose tasks run with different
flags hangs or trains a wrong model. The handshake finds both within seconds. Each task listens on
its own address and sends its settings to the first task, as one line of JSON. The first task waits
for all tasks, connects back to each address, and sends everyone the result.

Other programs may connect too, and never delay the tasks. Clients that are no tasks of this job are
dropped. A job whose tasks share a token (KDIST_JOB_TOKEN) also refuses everyone who does not have
it. The launcher gives each job a new token. The messages are not encrypted.
"""

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from kdist.cluster import Cluster
from kdist.cluster.lines import first_lines, receive_line
from kdist.json_text import parse_json

# Environment variable of each task: a secret that the tasks of a job share.
TOKEN_VARIABLE = "KDIST_JOB_TOKEN"

_TOKEN_REMEDY = f"set {TOKEN_VARIABLE} to the same value on all tasks, or on none"

_RETRY_SECONDS = 0.1
_NAME_RETRY_SECONDS = 1.0
# Time for a task to accept the result.
_SECONDS_TO_ANSWER = 10.0


class JobAlreadyRunningError(RuntimeError):
    """The handshake is over: TensorFlow's server answers at the first task's address."""


def run_handshake(
    cluster: Cluster,
    settings: Mapping[str, str],
    timeout_seconds: float = 60.0,
    payload: Any = None,
    token: str | None = None,
) -> dict[str, Any]:
    """Returns the payloads of all tasks, by name, when all have started with equal settings.

    Every task of the job must call it. A cluster of one task returns at once. `settings` are the
    values that must be equal, by name: versions, flags. The `payload` of this task must be
    JSON-serializable. The limit is for the whole handshake. The `token` is that of TOKEN_VARIABLE
    by default. A first task with an empty one accepts all tasks.

    Raises:
        TimeoutError: If a task does not start, or its address does not answer.
        ValueError: If two tasks have the same place, or settings or tokens differ.
        OSError: If this task cannot listen on its own address.
        JobAlreadyRunningError: If the job has started without this task.
    """
    if cluster.is_alone:
        return {cluster.name: payload}
    token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    deadline = time.monotonic() + timeout_seconds
    with _listening(cluster, deadline) as listener:
        if cluster == cluster.first_task:
            server = _HandshakeServer(cluster, settings, deadline, timeout_seconds, token)
            result = server.run(listener, payload)
        else:
            fields = {"settings": dict(settings), "payload": payload, "token": token}
            result = _report_to_first_task(cluster, fields, listener, deadline, timeout_seconds)
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
def _listening(cluster, deadline):
    host, port = parse_address(cluster.address)
    while True:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=1024)
            break
        except OSError as error:
            if _may_be_early(host, error) and time.monotonic() < deadline:
                time.sleep(_NAME_RETRY_SECONDS)
                continue
            raise OSError(
                f"{cluster.name} cannot listen on its address {cluster.address}: "
                f"{error.strerror or error}. Another task with the same index, or another program, "
                "may use it: start each task once, or choose another port"
            ) from error
    with listener:
        yield listener


def _may_be_early(host, error):
    """Returns whether a host name may not be known yet, or still be that of an earlier machine.

    On Kubernetes a new pod starts before its name is published.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return False
    return isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL


# The first task.


class _HandshakeServer:
    """The first task's side: collects the messages of all tasks and sends the result."""

    def __init__(self, cluster, settings, deadline, timeout_seconds, token):
        self._cluster, self._settings, self._token = cluster, dict(settings), token
        self._deadline, self._timeout_seconds = deadline, timeout_seconds
        self._payloads = {}  # by task name
        self._errors = []
        self._refused_hosts = []

    def run(self, listener, payload):
        self._payloads[self._cluster.name] = payload
        with contextlib.ExitStack() as stack:
            connections = []
            timeout = self._wait_for_all(listener, stack, connections)
            if not timeout:
                self._connect_back()
            result = {"timeout": timeout, "errors": self._errors, "payloads": self._payloads}
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.settimeout(_SECONDS_TO_ANSWER)
                    connection.sendall(_encode(result))
        return result

    def _wait_for_all(self, listener, stack, connections):
        """Receives the tasks' messages; returns an error message if tasks are missing.

        It appends the connections of the tasks, which the stack closes.
        """
        with contextlib.closing(first_lines(listener, self._deadline)) as lines:
            for connection, host, line in lines:
                if not self._is_from_task(connection, host, message := _decode(line)):
                    connection.close()
                    continue
                connections.append(stack.enter_context(connection))
                self._receive(message, host)
                if self._errors or not self._missing():
                    return ""
        return _missing_message(self._missing(), self._timeout_seconds) + self._refusals()

    def _missing(self):
        return [task for task in self._cluster.all_tasks() if task.name not in self._payloads]

    def _is_from_task(self, connection, host, message):
        """Returns whether a message is from a task of this job; refuses those without the token."""
        if not _is_report(message):
            return False  # such as a port scan or a health check
        if self._token and not _is_equal(message.get("token"), self._token):
            self._refused_hosts.append(host)
            error = f"{self._cluster.name} has another token; {_TOKEN_REMEDY}"
            with contextlib.suppress(OSError):
                connection.sendall(_encode({"timeout": "", "errors": [error], "payloads": {}}))
            return False
        # A task that is configured with another cluster may have any place.
        others = {task.name for task in self._cluster.others()}
        return message["tasks"] != _tasks(self._cluster) or message["task"] in others

    def _refusals(self):
        """Returns the part of an error message about tasks with another token."""
        if not self._refused_hosts:
            return ""
        return (
            f". Clients with another token: {len(self._refused_hosts)}, the last one from "
            f"{self._refused_hosts[-1]}; {_TOKEN_REMEDY}"
        )

    def _receive(self, message, host):
        name = message["task"]
        if name in self._payloads:
            self._errors.append(
                f"two tasks have the place of {name}, the second one at {host}; give each its "
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


def _report_to_first_task(cluster, fields, listener, deadline, timeout_seconds):
    first = cluster.first_task
    message = {"task": cluster.name, "tasks": _tasks(cluster), **fields}
    with _connect(first, deadline, timeout_seconds) as connection:
        connection.sendall(_encode(message))
        # The first task may have started later, and its deadline is later by that much.
        answer = receive_line(connection, listener, deadline + timeout_seconds)
    if _is_grpc(answer):
        raise JobAlreadyRunningError(f"the job of {cluster.name} is already running")
    result = _decode(answer)
    if not _has_fields(result, timeout=str, errors=list, payloads=dict):
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
        return parse_json(line)
    except ValueError:
        return None


def _is_report(message):
    """Returns whether a message has the form of a task's report."""
    return _has_fields(message, task=str, tasks=dict, settings=dict, payload=object) and all(
        isinstance(value, str) for value in message["settings"].values()
    )


def _has_fields(value, **types):
    """Returns whether a value is a dictionary that has these keys, with values of these types."""
    return isinstance(value, dict) and all(
        key in value and isinstance(value[key], kind) for key, kind in types.items()
    )


def _is_equal(value, token):
    """Returns whether a value equals the token, without revealing by its time how similar it is."""
    return isinstance(value, str) and hmac.compare_digest(
        value.encode(errors="backslashreplace"), token.encode(errors="backslashreplace")
    )


def _is_grpc(answer):
    """Returns whether the bytes start with an HTTP/2 SETTINGS frame, as a gRPC server sends it."""
    return len(answer) >= 9 and answer[3:5] == b"\x04\x00" and answer[5:9] == bytes(4)
