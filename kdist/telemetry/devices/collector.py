"""Collects samples of the devices of all hosts of a job in the task that writes.

When tasks join a job, the first one listens (`Collector.listening`) and sends its port and a shared
token to the others, which connect and wait (`attend`). When training starts, it commands them to
sample, and they send a line of JSON per record. When training ends, it commands them to stop. All
of this happens in background threads. A task that disconnects is ignored from then on.

The same connections carry the heartbeats of the tasks, and the command to end after one of them has
hung, for `kdist.job`.

The first task listens only on the host of its own address in the job. It drops connections without
the token.
"""

import contextlib
import dataclasses
import hmac
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kdist.cluster import Cluster, heartbeat
from kdist.cluster.handshake import parse_address
from kdist.cluster.heartbeat import Beat
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
# Receives the name of a task, and its heartbeat or, once it has disconnected, None.
_NoteBeat = Callable[[str, Beat | None], None]

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

    def pass_heartbeats(self, note: _NoteBeat):
        """Passes the heartbeats of the other tasks to a function, in a background thread.

        Args:
            note: receives the name of a task, such as "worker 1", and its heartbeat; None instead
                of a heartbeat once the task has disconnected.
        """
        if self._clients is not None:
            self._clients.note_beat = note

    def end_tasks(self, hung: str, reason: str):
        """Commands the other tasks to end because the task named `hung` hangs."""
        if self._clients is not None:
            self._clients.send_to_all({"end": hung, "reason": reason})

    def start(self, write: _Write, every_seconds: float = 5.0, began: float | None = None):
        """Starts to sample and to collect, and returns at once.

        If it is running, for a training that failed, the records of that training end.

        Args:
            write: receives each record of `DeviceSampler`, in background threads, two of which may
                call it at the same time. All times are of this host's clock.
            every_seconds: interval between samples. Defaults to 5.
            began: when training began, in Unix seconds; now by default.
        """
        self.stop()
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
    """The connections of the other tasks, served by a thread until they are closed."""

    def __init__(self, listener, token):
        self._listener, self._token = listener, token
        self.port = listener.getsockname()[1]
        listener.setblocking(False)
        self.note_beat: _NoteBeat = lambda name, beat: None
        self.overhead_share = 0.0
        self._clients = []
        self._starts = 0
        self._command = None  # to sample; None before and after a training
        self._is_closing = False
        self._lock = threading.RLock()  # of everything that the thread shares
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake_up, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._run, args=[woken], name="kdist-collector", daemon=True
        )
        self._thread.start()

    def start(self, records, command):
        """Sends `command` to all tasks, also those that connect later; receives their records."""
        with self._lock:
            self._starts += 1
            self._records, self._command = records, {**command, "start": self._starts}
            # Host name -> the client that samples its cores, disks, and network; self for this one.
            self._host_samplers = {socket.gethostname(): self}
            self._began, self._cpu_began = time.monotonic(), None
            for client in self._authenticated():
                self._start_sampling(client)

    def stop(self):
        """Commands the tasks to stop sampling, and ignores their later records."""
        # A write that does not return must not hold up the training.
        if not self._lock.acquire(timeout=_SECONDS_TO_STOP):
            return
        self._command = None
        self.send_to_all({"stop": True})
        self._lock.release()

    def send_to_all(self, command):
        """Sends a command to all tasks."""
        with self._lock:
            for client in self._authenticated():
                self._send(client, command)

    def close(self):
        self._is_closing = True
        self._wake_up.close()
        self._thread.join(_SECONDS_TO_STOP)

    def _authenticated(self):
        return [client for client in self._clients if client.host is not None]

    # The methods below run in the thread, or hold the lock.

    def _run(self, woken):
        with self._selector, self._listener, woken:
            while not self._is_closing:
                ready = self._selector.select(1.0)
                with self._lock:
                    for key, _ in ready:
                        if key.fileobj is self._listener:
                            self._accept()
                        elif key.data is not None:
                            self._receive(key.data)
                    self._drop_unauthenticated()
                    self._measure_overhead()
            for client in self._clients:
                client.close()

    def _measure_overhead(self):
        """Updates the share of this thread's CPU time since the start of the training."""
        if self._command is None:
            return
        if self._cpu_began is None:
            self._cpu_began = time.thread_time()
        seconds = max(time.monotonic() - self._began, 1e-3)
        self.overhead_share = (time.thread_time() - self._cpu_began) / seconds

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
                elif "beat" in message:
                    self.note_beat(client.task, Beat(**message["beat"]))
                else:
                    self._write(client, message)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # It has disconnected, or does not follow the protocol.
            self._drop(client)

    def _write(self, client, message):
        record = message["record"]
        if record["host"] != client.host:
            raise ValueError("a record of another host")
        # Otherwise it was sent before the last training ended.
        if self._command is not None and message["start"] == self._starts:
            client.write(record)

    def _authenticate(self, client, message):
        if not hmac.compare_digest(message["token"].encode(), self._token.encode()):
            raise ValueError("wrong token")
        client.host, client.task = str(message["host"]), str(message.get("task", ""))
        if self._command is not None:
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
        if client.host is not None:
            self.note_beat(client.task, None)
        if self._command is None:
            return
        self._records.forget(client)
        if self._host_samplers.get(client.host) is client:
            del self._host_samplers[client.host]
            same_host = (other for other in self._clients if other.host == client.host)
            successor = next(same_host, None)
            if successor is not None:
                self._start_sampling(successor)

    def _drop_unauthenticated(self):
        now = time.monotonic()
        unknown = [client for client in self._clients if client.host is None]
        for number, client in enumerate(reversed(unknown)):
            too_late = now - client.connected_at > _SECONDS_TO_AUTHENTICATE
            if number >= _MAX_UNAUTHENTICATED or too_late:
                self._drop(client)


class _Client:
    """One connection; `host` and `task` are known once the client has sent the token."""

    def __init__(self, connection):
        self.connection = connection
        self.connected_at = time.monotonic()
        self.host = self.task = None
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


def attend(
    cluster: Cluster,
    port: int | None,
    token: str,
    end: Callable[[str, str], None] | None = None,
):
    """Samples this task's devices whenever the first task commands it, in a background thread.

    It returns at once. The thread ends with the connection, and logs a warning if the first task
    cannot be reached. The first task's collector listens on `port` of its host, or not at all
    (None). With `end`, heartbeats are sent as well, and the command to end calls it with the name
    of the task that hangs, and the reason.
    """
    if port is None:
        return
    threading.Thread(
        target=_attend, args=(cluster, port, token, end), name="kdist-attend", daemon=True
    ).start()


def _attend(cluster, port, token, end):
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
        sender = _Sender(connection)
        sender.send({"token": token, "host": socket.gethostname(), "task": cluster.name})
        if end is not None:
            heartbeat.add_receiver(sender.send_beat)
        _follow_commands(connection, sender, cluster, end)


class _Sender:
    """Sends lines from several threads, one at a time."""

    def __init__(self, connection):
        self._connection, self._lock = connection, threading.Lock()

    def send(self, data):
        with self._lock:
            self._connection.sendall(_line(data))

    def send_beat(self, beat):
        self.try_to_send({"beat": dataclasses.asdict(beat)})

    def try_to_send(self, data):
        with contextlib.suppress(OSError):  # the first task has disconnected
            self.send(data)


def _follow_commands(connection, sender, cluster, end):
    """Starts and stops sampling as commanded, until the first task disconnects."""
    sampler = None
    try:
        with connection.makefile("rb") as lines:
            while line := lines.readline(_MAX_LINE_BYTES):
                command = json.loads(line)
                if "end" in command:
                    if end is not None:
                        end(command["end"], command["reason"])
                    continue
                if sampler is not None:
                    sampler.stop()
                    sampler = None
                if "every_seconds" in command:
                    sampler = _sampler(sender, cluster, command)
                    sampler.start()
    except ValueError:
        return  # an incomplete line: the first task was killed
    finally:
        if sampler is not None:
            sampler.stop()


def _sampler(sender, cluster, command: Mapping[str, Any]):
    return DeviceSampler(
        lambda record: sender.try_to_send({"start": command["start"], "record": record}),
        command["every_seconds"],
        task_name(cluster),
        node=node_of(cluster),
        samples_host=command["samples_host"],
        began=command["began"],
        ahead_seconds=time.time() - command["now"],
    )


def _line(data):
    return json.dumps(data).encode() + b"\n"
