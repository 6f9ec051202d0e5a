"""Collects samples of the devices of all hosts of a job in the task that writes.

When tasks join a job, the first one listens (`Collector.listening`) and sends its port and a shared
token to the others, which connect and wait (`attend`). When training starts, it commands them to
sample, and they send a line of JSON per record. When training ends, it commands them to stop. All
of this happens in background threads. A task that disconnects is ignored from then on.

The first task listens only on the host of its own address in the job. It drops connections without
the token.
"""

import contextlib
import hmac
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kdist.cluster import Cluster
from kdist.cluster.handshake import parse_address
from kdist.telemetry.devices.sampler import DeviceSampler

if TYPE_CHECKING:
    import tensorflow as tf

# Many times the size of a record; tasks send no longer lines.
_MAX_LINE_BYTES = 1 << 16
# Time for a client to send its token, and the number of clients that may be without one.
_SECONDS_TO_AUTHENTICATE, _MAX_UNAUTHENTICATED = 10.0, 64
_SECONDS_TO_CONNECT = 30.0
_SECONDS_TO_STOP = 2.0

_Write = Callable[[dict[str, Any]], None]

_logger = logging.getLogger(__name__)


def collector_of(strategy: "tf.distribute.Strategy") -> "Collector":
    """Returns the collector of a strategy, always the same one.

    In a job that `create_strategy` joined, the first task's collector receives samples from all
    tasks. Any other collector samples this process only.

    Args:
        strategy: any strategy, also of a single process.

    Returns:
        The collector, which may be running.

    Example:

        collector = collector_of(strategy)
        collector.start(writer.write_device, every_seconds=5)
        ...
        collector.stop()
    """
    extended: Any = strategy.extended
    if not hasattr(extended, "_kdist_collector"):
        extended._kdist_collector = Collector()
    return extended._kdist_collector


def note_collector(strategy: "tf.distribute.Strategy", collector: "Collector"):
    """Sets the collector of a strategy, for `collector_of`."""
    strategy.extended._kdist_collector = collector


def node_of(cluster: Cluster) -> int | None:
    """Returns the number of this task's host, in the order of addresses; None on one host."""
    tasks = cluster.all_tasks()
    hosts = list(dict.fromkeys(parse_address(task.address)[0] for task in tasks))
    return hosts.index(parse_address(cluster.address)[0]) if len(hosts) > 1 else None


def task_name(cluster: Cluster) -> str:
    """Returns the name of this task in records, such as "worker-0" or "chief-0"."""
    return f"{cluster.role}-{cluster.index}"


class Collector:
    """Samples this task's devices and receives the samples of the other tasks of the job.

    If several tasks have the same host name, one of them samples cores, disks, and network: the
    first task, or else the one that connected first. A GPU that several tasks share is reported by
    one of them too. Each task reports its own process.

    Args:
        task: name of this process. Defaults to "chief-0".
        node: number of this host in the job; None on one host. Defaults to None.

    Example:

        collector = Collector()
        collector.start(writer.write_device, every_seconds=5)
        ...
        collector.close()
    """

    def __init__(self, task: str = "chief-0", node: int | None = None):
        self._task, self._node = task, node
        self._sampler: DeviceSampler | None = None
        self._clients: _Clients | None = None
        self._is_running = False

    @classmethod
    def listening(cls, cluster: Cluster, token: str) -> "Collector":
        """Creates the collector of a job's first task; logs a warning if it cannot listen.

        Args:
            cluster: the job, as seen by its first task.
            token: the job's secret, which authenticates its tasks.
        """
        collector = cls(task_name(cluster), node_of(cluster))
        host, _ = parse_address(cluster.address)
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, 0), family=family, backlog=1024)
        except OSError as error:
            _logger.warning(
                "devices of other tasks are not recorded: %s cannot listen on %s: %s",
                cluster.name,
                host,
                error.strerror or error,
            )
        else:
            collector._clients = _Clients(listener, token)
        return collector

    @property
    def port(self) -> int | None:
        """Port that other tasks connect to; None if this task does not listen."""
        return None if self._clients is None else self._clients.port

    @property
    def overhead_share(self) -> float | None:
        """CPU seconds of collecting in this process per second; None before the first sample.

        After `stop` it keeps its last value.
        """
        if self._sampler is None or self._sampler.overhead_share is None:
            return None
        others = self._clients.overhead_share if self._clients is not None else 0.0
        return self._sampler.overhead_share + others

    def start(self, write: _Write, every_seconds: float = 5.0, began: float | None = None):
        """Starts to sample and to collect, and returns at once; does nothing if it is running.

        Args:
            write: receives each record of `DeviceSampler`, in background threads, two of which may
                call it at the same time. All times are of this host's clock.
            every_seconds: interval between samples. Defaults to 5.
            began: when training began, in Unix seconds; now by default.
        """
        if self._is_running:
            return
        began = time.time() if began is None else began
        records = _UniqueSources(write)
        write = records.writer_of(self)
        self._sampler = DeviceSampler(
            write, every_seconds, self._task, node=self._node, began=began
        )
        self._sampler.start()
        if self._clients is not None:
            self._clients.start(records, {"every_seconds": every_seconds, "began": began})
        self._is_running = True

    def stop(self):
        """Stops sampling, also in the other tasks; does nothing if it is stopped.

        Afterwards `write` is not called, unless a driver needs longer than 2 s to answer. The
        collector can start again.
        """
        if not self._is_running:
            return
        self._is_running = False
        if self._clients is not None:
            self._clients.stop()
        self._sampler.stop()

    def close(self):
        """Stops sampling and listening; the collector cannot start again."""
        self.stop()
        if self._clients is not None:
            self._clients.close()
            self._clients = None


class _UniqueSources:
    """Accepts the records of each device from the first source that sends any."""

    def __init__(self, write):
        self._write = write
        self._has_failed = False
        self._source_of = {}

    def writer_of(self, source) -> _Write:
        """Returns the function that writes the records of a source."""

        def write(record):
            # Two threads may call this at the same time; setdefault is atomic.
            if self._source_of.setdefault((record["host"], record["device"]), source) is source:
                self._try_to_write(record)

        return write

    def _try_to_write(self, record):
        try:
            self._write(record)
        except Exception as error:  # training continues without the record
            if not self._has_failed:
                self._has_failed = True
                _logger.warning("devices: writing failed: %s: %s", type(error).__name__, error)

    def forget(self, source):
        """Lets other sources report the devices of a source that has disconnected."""
        self._source_of = {k: other for k, other in self._source_of.items() if other is not source}


# The server, in the first task.


class _Clients:
    """The connections of the other tasks, served by a thread."""

    def __init__(self, listener, token):
        self._listener, self._token = listener, token
        self.port = listener.getsockname()[1]
        listener.setblocking(False)
        self._clients = []
        self._thread = None
        self._stopping = False
        self._starts = 0
        self.overhead_share = 0.0

    def start(self, records, command):
        """Starts the thread, which sends `command` to the tasks and receives their records."""
        self._stopping = False
        self._starts += 1
        command = {**command, "start": self._starts}
        self._wake_up, woken = socket.socketpair()
        self._thread = threading.Thread(
            target=self._run, args=(records, command, woken), name="kdist-collector", daemon=True
        )
        self._thread.start()

    def stop(self):
        """Commands the tasks to stop, and ends the thread."""
        self._stopping = True
        self._wake_up.close()
        self._thread.join(_SECONDS_TO_STOP)

    def close(self):
        self._listener.close()
        for client in self._clients:
            client.close()

    # The methods below run in the thread.

    def _run(self, records, command, woken):
        began, cpu_began = time.monotonic(), time.thread_time()
        self._records, self._command = records, command
        # Host name -> the client that samples its cores, disks, and network; self for this host.
        self._host_samplers = {socket.gethostname(): self}
        with selectors.DefaultSelector() as selector, woken:
            self._selector = selector
            selector.register(woken, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            for client in list(self._clients):
                selector.register(client.connection, selectors.EVENT_READ, client)
                if client.host is not None:
                    self._start_sampling(client)
            while not self._stopping:
                for key, _ in selector.select(1.0):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._receive(key.data)
                self._drop_unauthenticated()
                seconds = time.monotonic() - began
                self.overhead_share = (time.thread_time() - cpu_began) / seconds
            for client in list(self._clients):
                if client.host is not None:
                    self._send(client, {"stop": True})

    def _accept(self):
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has disconnected
        connection.setblocking(False)
        client = _Client(connection)
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _receive(self, client):
        try:
            for message in client.receive():
                if client.host is None:
                    self._authenticate(client, message)
                else:
                    self._write(client, message)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # It has disconnected, or does not follow the protocol.
            self._drop(client)

    def _write(self, client, message):
        record = message["record"]
        if record["host"] != client.host:
            raise ValueError("a record of another host")
        if message["start"] == self._starts:  # else it was sent before the last training ended
            client.write(record)

    def _authenticate(self, client, message):
        if not hmac.compare_digest(message["token"].encode(), self._token.encode()):
            raise ValueError("wrong token")
        client.host = str(message["host"])
        self._start_sampling(client)

    def _start_sampling(self, client):
        client.write = self._records.writer_of(client)
        samples_host = self._host_samplers.setdefault(client.host, client) is client
        # The client's clock may differ, so it receives the time of this one.
        command = {**self._command, "samples_host": samples_host, "now": time.time()}
        self._send(client, command)

    def _send(self, client, command):
        try:
            # Commands are short and rare: if one does not fit, the task has not read for long.
            client.connection.sendall(_line(command))
        except OSError:
            self._drop(client)

    def _drop(self, client):
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._selector.unregister(client.connection)
        client.close()
        self._records.forget(client)
        if self._host_samplers.get(client.host) is client:
            del self._host_samplers[client.host]
            same_host = (other for other in self._clients if other.host == client.host)
            successor = next(same_host, None)
            if successor is not None and not self._stopping:
                self._start_sampling(successor)

    def _drop_unauthenticated(self):
        now = time.monotonic()
        unknown = [client for client in self._clients if client.host is None]
        for number, client in enumerate(reversed(unknown)):
            too_late = now - client.connected_at > _SECONDS_TO_AUTHENTICATE
            if number >= _MAX_UNAUTHENTICATED or too_late:
                self._drop(client)


class _Client:
    """One connection; `host` is known once the client has sent the token."""

    def __init__(self, connection):
        self.connection = connection
        self.connected_at = time.monotonic()
        self.host = None
        self.write = None
        self._received = b""

    def receive(self):
        """Yields the objects in the lines that are complete.

        Raises OSError if the client has disconnected, and ValueError if a line is too long, or is
        no JSON.
        """
        try:
            received = self.connection.recv(_MAX_LINE_BYTES)
        except BlockingIOError:
            return
        if not received:
            raise ConnectionError("disconnected")
        *lines, self._received = (self._received + received).split(b"\n")
        if len(self._received) > _MAX_LINE_BYTES:
            raise ValueError("line too long")
        for line in lines:
            yield json.loads(line)

    def close(self):
        self.connection.close()


# The clients, in the other tasks.


def attend(cluster: Cluster, port: int | None, token: str):
    """Samples this task's devices whenever the first task commands it, in a background thread.

    It returns at once. The thread ends with the connection, and logs a warning if the first task
    cannot be reached. The first task's collector listens on `port` of its host, or not at all
    (None).
    """
    if port is None:
        return
    threading.Thread(
        target=_attend, args=(cluster, port, token), name="kdist-attend", daemon=True
    ).start()


def _attend(cluster, port, token):
    first = cluster.first_task
    host, _ = parse_address(first.address)
    try:
        connection = socket.create_connection((host, port), _SECONDS_TO_CONNECT)
    except OSError as error:
        _logger.warning(
            "the devices of %s are not recorded: %s does not answer at %s:%s: %s. Allow tasks of "
            "the job to connect to each other on all ports",
            cluster.name,
            first.name,
            host,
            port,
            error.strerror or error,
        )
        return
    with connection, contextlib.suppress(OSError):
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sendall(_line({"token": token, "host": socket.gethostname()}))
        _follow_commands(connection, task_name(cluster), node_of(cluster))


def _follow_commands(connection, task, node):
    """Starts and stops sampling as commanded, until the first task disconnects."""
    sampler = None
    try:
        with connection.makefile("rb") as lines:
            while line := lines.readline(_MAX_LINE_BYTES):
                command = json.loads(line)
                if sampler is not None:
                    sampler.stop()
                    sampler = None
                if "every_seconds" in command:
                    sampler = _sampler(connection, task, node, command)
                    sampler.start()
    except ValueError:
        return  # an incomplete line: the first task was killed
    finally:
        if sampler is not None:
            sampler.stop()


def _sampler(connection, task, node, command: Mapping[str, Any]):
    def send(record):
        with contextlib.suppress(OSError):  # the first task has disconnected
            connection.sendall(_line({"start": command["start"], "record": record}))

    return DeviceSampler(
        send,
        command["every_seconds"],
        task,
        node=node,
        samples_host=command["samples_host"],
        began=command["began"],
        ahead_seconds=time.time() - command["now"],
    )


def _line(data):
    return json.dumps(data).encode() + b"\n"
