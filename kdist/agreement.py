"""Before TensorFlow starts, all tasks of a job meet and compare what they were told.

    agree(cluster, {"kdist": kdist.__version__, "--model": "lenet"}, timeout_seconds=60)

TensorFlow itself waits without end for a task that does not come, and a job whose tasks were told
different things hangs or trains to something else. So every task listens on its own address and
tells the first task what it knows, in one line of JSON; the first task waits until all have come,
calls back each address, and tells everybody the verdict. Nothing is sent that is not in the
command line.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from kdist.cluster import Cluster

_PAUSE_SECONDS = 0.1


class AlreadyRunning(RuntimeError):
    """The job's tasks have agreed before: TensorFlow answers at the first task's address."""


# More than a job tells; what sends more is no task of it.
_LONGEST_LINE = 1 << 20


def agree(
    cluster: Cluster,
    facts: Mapping[str, str],
    timeout_seconds: float = 60.0,
    own: Any = None,
) -> dict[str, Any]:
    """Returns when all tasks have come and agree; every task has to call it.

    Args:
        cluster: the job and this process's place in it; alone it has nobody to agree with.
        facts: what has to be the same everywhere, by name: versions, flags.
        timeout_seconds: for all of it.
        own: what this task tells the others besides, as JSON takes it.

    Returns:
        What each task told besides, by its name: the same on all of them.

    Raises:
        TimeoutError: a task did not come, or its address does not answer.
        ValueError: two tasks take the same place, or were told different things.
        OSError: this task cannot listen on its own address.
        AlreadyRunning: this task comes when the job runs.
    """
    if cluster.is_alone:
        return {cluster.name: own}
    deadline = time.monotonic() + timeout_seconds
    with _listening(cluster) as listener:
        if cluster == first_task(cluster):
            verdict = _Meeting(cluster, facts, deadline, timeout_seconds).hold(listener, own)
        else:
            verdict = _attend(cluster, facts, deadline, timeout_seconds, own)
    if verdict["complaints"]:
        raise ValueError("\n".join(verdict["complaints"]))
    if verdict["late"]:
        raise TimeoutError(verdict["late"])
    return verdict["own"]


def first_task(cluster: Cluster) -> Cluster:
    """The task whose word counts where others differ: the chief, or worker 0."""
    return cluster.all_tasks()[0]


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of "host:port", or of "[host]:port", as sockets take them."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _listening(cluster):
    host, port = host_and_port(cluster.address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(
            f"{cluster.name} cannot listen on its address {cluster.address}: "
            f"{error.strerror or error}. Is another task of the same index, or another program, "
            "there? Start each task once, or name another port"
        ) from error
    with listener:
        yield listener


# The first task.


class _Meeting:
    def __init__(self, cluster, facts, deadline, timeout_seconds):
        self._cluster, self._facts = cluster, dict(facts)
        self._deadline, self._timeout_seconds = deadline, timeout_seconds
        self._connections = []
        self._own = {}  # what each task told besides, by its name
        self._complaints = []

    def hold(self, listener, own):
        self._own[self._cluster.name] = own
        with contextlib.ExitStack() as connections:
            late = self._wait_for_all(listener, connections)
            if not late:
                self._call_back()
            verdict = {"late": late, "complaints": self._complaints, "own": self._own}
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.sendall(_line(verdict))
        return verdict

    def _wait_for_all(self, listener, connections):
        """Takes what the tasks tell; gives a message about those that do not come."""
        while missing := [t for t in self._cluster.all_tasks() if t.name not in self._own]:
            if self._complaints:
                return ""
            listener.settimeout(max(self._deadline - time.monotonic(), 0.01))
            try:
                connection, peer = listener.accept()
            except TimeoutError:
                return _did_not_come(missing, self._timeout_seconds)
            connections.enter_context(connection)
            self._hear(connection, peer)
        return ""

    def _hear(self, connection, peer):
        told = _read(connection, self._deadline)
        if not isinstance(told, dict) or not {"task", "tasks", "facts", "own"} <= told.keys():
            return  # no task: a port scan, a health check
        name = told["task"]
        self._connections.append(connection)
        if name in self._own:
            self._complaints.append(
                f"two tasks say that they are {name}, the second one from {peer[0]}; give each "
                "its own index"
            )
        elif told["tasks"] != _tasks(self._cluster):
            self._complaints.append(
                f"{name} was told of the cluster {json.dumps(told['tasks'])}, {self._cluster.name} "
                f"of {json.dumps(_tasks(self._cluster))}; give all tasks the same"
            )
        self._complaints += self._differences(name, told["facts"])
        self._own.setdefault(name, told["own"])

    def _differences(self, name, facts):
        mine = self._facts
        return [
            f"{fact} is {facts.get(fact, 'not set')} on {name}, and {mine.get(fact, 'not set')} on "
            f"{self._cluster.name}; it has to be the same on all tasks"
            for fact in sorted(mine.keys() | facts.keys())
            if mine.get(fact) != facts.get(fact)
        ]

    def _call_back(self):
        for task in self._cluster.others():
            try:
                left = max(self._deadline - time.monotonic(), 1.0)
                socket.create_connection(host_and_port(task.address), timeout=left).close()
            except OSError as error:
                self._complaints.append(
                    f"{task.name} runs, but its address {task.address} does not answer from "
                    f"{self._cluster.name}: {error.strerror or error}. Name the address by which "
                    "the other hosts reach it, and open the port"
                )


def _did_not_come(tasks, seconds):
    names = ", ".join(f"{task.name} ({task.address})" for task in tasks)
    return (
        f"{names} did not come within {seconds:.0f} s; start {'it' if len(tasks) == 1 else 'them'} "
        "as well, correct the address, or allow more time (--cluster_timeout_seconds)"
    )


# The others.


def _attend(cluster, facts, deadline, timeout_seconds, own):
    first = first_task(cluster)
    with _connection(first, deadline, timeout_seconds) as connection:
        told = {"tasks": _tasks(cluster), "facts": dict(facts), "own": own}
        connection.sendall(_line({"task": cluster.name, **told}))
        # The first task's deadline may be later by what it started later.
        answer = _read_line(connection, deadline + timeout_seconds)
    if _is_of_grpc(answer):
        raise AlreadyRunning(f"the job of {cluster.name} runs already")
    verdict = _parsed(answer)
    if not isinstance(verdict, dict):
        raise TimeoutError(
            f"{first.name} ({first.address}) ended before all tasks had come; its own message "
            "says why"
        )
    return verdict


def _connection(first, deadline, timeout_seconds):
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(_did_not_come([first], timeout_seconds))
        try:
            return socket.create_connection(host_and_port(first.address), timeout=left)
        except OSError:
            time.sleep(min(_PAUSE_SECONDS, max(left, 0)))


# Both.


def _tasks(cluster):
    return {role: list(addresses) for role, addresses in cluster.tasks.items()}


def _line(data):
    return json.dumps(data).encode() + b"\n"


def _read(connection, deadline):
    """One line of JSON; None if there comes none in time."""
    return _parsed(_read_line(connection, deadline))


def _read_line(connection, deadline):
    """What comes until the end of a line, in time."""
    connection.settimeout(max(deadline - time.monotonic(), 0.01))
    try:
        with connection.makefile("rb") as stream:
            return stream.readline(_LONGEST_LINE)
    except OSError:
        return b""


def _parsed(line):
    try:
        return json.loads(line)
    except ValueError:
        return None


def _is_of_grpc(answer):
    """Whether these bytes begin as an HTTP/2 server's: with a frame of settings."""
    return len(answer) >= 9 and answer[3:5] == b"\x04\x00" and answer[5:9] == bytes(4)
