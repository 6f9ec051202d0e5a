"""The devices of all of a job's hosts, in one place: the task that writes.

    collector = collector_of(strategy)     # of any strategy, also of one process alone
    collector.start(writer.write_device, every_seconds=5)
    ...
    collector.stop()

When tasks join a job, the first one listens (`Collector.listening`) and tells the others where, and
a word that only they know; they call and wait (`attend`). When training starts, it tells them to
sample, and they send a line of JSON for each record; when it ends, to stop. All of this happens in
threads of its own. A task that has gone sends nothing more, and that is all.

The first task listens on the host of its own address in the job and nowhere else. What it hears
from strangers it drops.
"""

import contextlib
import hmac
import json
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kdist.agreement import first_task, host_and_port
from kdist.cluster import Cluster
from kdist.telemetry.sampler import DeviceSampler

if TYPE_CHECKING:
    import tensorflow as tf

# Many times a record; who sends more without ending a line is no task.
_LONGEST_LINE = 1 << 16
# So long a caller may leave open who it is, and so many may at once.
_SECONDS_TO_SAY_WHO, _MOST_UNKNOWN = 10.0, 64
_SECONDS_TO_CONNECT = 30.0
_SECONDS_TO_STOP = 2.0

_Write = Callable[[dict[str, Any]], None]


def collector_of(strategy: "tf.distribute.Strategy") -> "Collector":
    """The collector that belongs to a strategy; the same one each time.

    Of a job that `create_strategy` joined, the first task's hears from all tasks. Any other knows
    this process alone.
    """
    extended: Any = strategy.extended
    if not hasattr(extended, "_kdist_collector"):
        extended._kdist_collector = Collector()
    return extended._kdist_collector


def note_collector(strategy: "tf.distribute.Strategy", collector: "Collector"):
    """Gives a strategy the collector of the job that this process has joined."""
    strategy.extended._kdist_collector = collector


def task_name(cluster: Cluster) -> str:
    """What this task is called in records, such as "worker-0" or "chief-0"."""
    return f"{cluster.role}-{cluster.index}"


class Collector:
    """Samples this task's devices, and has the other tasks of the job sample theirs.

    Of several tasks on one machine (their host names are the same), one samples cores, disks and
    network: the first task, else whichever came first. A GPU that several tasks share comes from
    one of them as well. Each task's process comes always.

    Args:
        task: what this process is called.
    """

    def __init__(self, task: str = "chief-0"):
        self._task = task
        self._sampler: DeviceSampler | None = None
        self._others: _Others | None = None
        self._runs = False

    @classmethod
    def listening(cls, cluster: Cluster, token: str) -> "Collector":
        """The collector of a job's first task. If it cannot listen, that is said.

        Args:
            cluster: the job, and the first task's place in it.
            token: what a task says to be known as one of the job; nobody else may know it.
        """
        collector = cls(task_name(cluster))
        host, _ = host_and_port(cluster.address)
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, 0), family=family, backlog=1024)
        except OSError as error:
            print(
                f"kdist: devices of other tasks are not recorded: {cluster.name} cannot listen on "
                f"{host}: {error.strerror or error}",
                file=sys.stderr,
            )
        else:
            collector._others = _Others(listener, token)
        return collector

    @property
    def port(self) -> int | None:
        """Where other tasks call; None if nobody listens."""
        return None if self._others is None else self._others.port

    @property
    def overhead_share(self) -> float | None:
        """CPU seconds that this takes in this process, for each second; None before a sample.

        After `stop` it is that of the time before.
        """
        if self._sampler is None or self._sampler.overhead_share is None:
            return None
        others = self._others.overhead_share if self._others is not None else 0.0
        return self._sampler.overhead_share + others

    def start(self, write: _Write, every_seconds: float = 5.0, began: float | None = None):
        """Begins to sample and to collect, and returns at once; does nothing if it runs.

        Args:
            write: gets each record, as `DeviceSampler` makes it, in threads of this module: two
                of them may call it at once. All times are of this machine's clock.
            every_seconds: from one sample to the next. Defaults to 5.
            began: when training began, in Unix seconds; by default now.
        """
        if self._runs:
            return
        began = time.time() if began is None else began
        once = _Once(write)
        self._sampler = DeviceSampler(once.of(self), every_seconds, self._task, began=began)
        self._sampler.start()
        if self._others is not None:
            self._others.start(once, {"every_seconds": every_seconds, "began": began})
        self._runs = True

    def stop(self):
        """Ends it, here and in the other tasks; does nothing if it does not run.

        Afterwards `write` is not called any more, unless a driver does not answer within 2 s. It
        may start again.
        """
        if not self._runs:
            return
        self._runs = False
        if self._others is not None:
            self._others.stop()
        self._sampler.stop()

    def close(self):
        """Stops, and listens no longer; it cannot start again."""
        self.stop()
        if self._others is not None:
            self._others.close()
            self._others = None


class _Once:
    """Takes records of one device of one host from one source alone."""

    def __init__(self, write):
        self._write = write
        self._has_failed = False
        self._source_of = {}

    def of(self, source) -> _Write:
        """The function that writes what a source sends."""

        def write(record):
            # Two threads may come at once; setdefault is atomic.
            if self._source_of.setdefault((record["host"], record["device"]), source) is source:
                self._try_to_write(record)

        return write

    def _try_to_write(self, record):
        try:
            self._write(record)
        except Exception as error:  # training goes on without
            if not self._has_failed:
                self._has_failed = True
                print(
                    f"kdist: devices: writing failed: {type(error).__name__}: {error}",
                    file=sys.stderr,
                )

    def forget(self, source):
        """What a source that has gone sent, another may send."""
        self._source_of = {k: other for k, other in self._source_of.items() if other is not source}


# The first task hears the others.


class _Others:
    """Hears the other tasks, in a thread."""

    def __init__(self, listener, token):
        self._listener, self._token = listener, token
        self.port = listener.getsockname()[1]
        listener.setblocking(False)
        self._callers = []
        self._thread = None
        self._stopping = False
        self._starts = 0
        self.overhead_share = 0.0

    def start(self, once, order):
        """Begins to hear; `order` is what the tasks are told."""
        self._stopping = False
        self._starts += 1
        order = {**order, "start": self._starts}
        self._bell, wake = socket.socketpair()
        self._thread = threading.Thread(
            target=self._run, args=(once, order, wake), name="kdist-collector", daemon=True
        )
        self._thread.start()

    def stop(self):
        """Has the tasks stop, and hears no more."""
        self._stopping = True
        self._bell.close()  # wakes the thread up
        self._thread.join(_SECONDS_TO_STOP)

    def close(self):
        self._listener.close()
        for caller in self._callers:
            caller.close()

    # In the thread.

    def _run(self, once, order, wake):
        began, cpu_began = time.monotonic(), time.thread_time()
        self._once, self._order = once, order
        # Whose cores, disks and network are sampled, and by whom; this one's by this task.
        self._samples_host = {socket.gethostname(): self}
        with selectors.DefaultSelector() as selector, wake:
            self._selector = selector
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            for caller in list(self._callers):
                selector.register(caller.connection, selectors.EVENT_READ, caller)
                if caller.host is not None:
                    self._order_to_sample(caller)
            while not self._stopping:
                for key, _ in selector.select(1.0):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._hear(key.data)
                self._drop_unknown()
                seconds = time.monotonic() - began
                self.overhead_share = (time.thread_time() - cpu_began) / seconds
            for caller in list(self._callers):
                if caller.host is not None:
                    self._tell(caller, {"stop": True})

    def _accept(self):
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has hung up
        connection.setblocking(False)
        caller = _Caller(connection)
        self._callers.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _hear(self, caller):
        try:
            for told in caller.hear():
                if caller.host is None:
                    self._greet(caller, told)
                else:
                    self._take(caller, told)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # It has gone, or what it says is not what a task says.
            self._drop(caller)

    def _take(self, caller, told):
        record = told["record"]
        if record["host"] != caller.host:
            raise ValueError("another host's devices")
        if told["start"] == self._starts:  # else it was on its way when the last training ended
            caller.write(record)

    def _greet(self, caller, told):
        if not hmac.compare_digest(told["token"].encode(), self._token.encode()):
            raise ValueError("a stranger")
        caller.host = str(told["host"])
        self._order_to_sample(caller)

    def _order_to_sample(self, caller):
        caller.write = self._once.of(caller)
        samples_host = self._samples_host.setdefault(caller.host, caller) is caller
        # The caller's clock may be another: it is told what time it is.
        order = {**self._order, "samples_host": samples_host, "now": time.time()}
        self._tell(caller, order)

    def _tell(self, caller, order):
        try:
            # A few bytes now and then: if they do not fit, the task has not read for long.
            caller.connection.sendall(_line(order))
        except OSError:
            self._drop(caller)

    def _drop(self, caller):
        if caller not in self._callers:
            return
        self._callers.remove(caller)
        self._selector.unregister(caller.connection)
        caller.close()
        self._once.forget(caller)
        if self._samples_host.get(caller.host) is caller:
            del self._samples_host[caller.host]
            heir = next((other for other in self._callers if other.host == caller.host), None)
            if heir is not None and not self._stopping:
                self._order_to_sample(heir)

    def _drop_unknown(self):
        now = time.monotonic()
        unknown = [caller for caller in self._callers if caller.host is None]
        for number, caller in enumerate(reversed(unknown)):
            if number >= _MOST_UNKNOWN or now - caller.called > _SECONDS_TO_SAY_WHO:
                self._drop(caller)


class _Caller:
    """Somebody who has called; a task once its host is known."""

    def __init__(self, connection):
        self.connection = connection
        self.called = time.monotonic()
        self.host = None
        self.write = None
        self._heard = b""

    def hear(self):
        """The objects in the lines that have come to their end.

        Raises:
            OSError: it has hung up.
            ValueError: these are no such lines.
        """
        try:
            heard = self.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        if not heard:
            raise ConnectionError("it has hung up")
        *lines, self._heard = (self._heard + heard).split(b"\n")
        if len(self._heard) > _LONGEST_LINE:
            raise ValueError("a line without an end")
        for line in lines:
            yield json.loads(line)

    def close(self):
        self.connection.close()


# The other tasks.


def attend(cluster: Cluster, port: int | None, token: str):
    """Has this task sample its devices whenever the first task says so; returns at once.

    It happens in a thread, as long as the first task is there. If that does not answer, it is said.

    Args:
        cluster: the job, and this task's place in it.
        port: where the first task's collector listens, on the host of its address; None if it
            does not.
        token: the job's.
    """
    if port is None:
        return
    threading.Thread(
        target=_attend, args=(cluster, port, token), name="kdist-attend", daemon=True
    ).start()


def _attend(cluster, port, token):
    first = first_task(cluster)
    host, _ = host_and_port(first.address)
    try:
        connection = socket.create_connection((host, port), _SECONDS_TO_CONNECT)
    except OSError as error:
        print(
            f"kdist: the devices of {cluster.name} are not recorded: {first.name} does not answer "
            f"at {host}:{port}: {error.strerror or error}. Let tasks of the job reach each other "
            "at all ports",
            file=sys.stderr,
        )
        return
    with connection, contextlib.suppress(OSError):
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sendall(_line({"token": token, "host": socket.gethostname()}))
        _obey(connection, task_name(cluster))


def _obey(connection, task):
    """Samples as it is told, until the first task hangs up."""
    sampler = None
    try:
        with connection.makefile("rb") as lines:
            while line := lines.readline(_LONGEST_LINE):
                told = json.loads(line)
                if sampler is not None:
                    sampler.stop()
                    sampler = None
                if "every_seconds" in told:
                    sampler = _sampler(connection, task, told)
                    sampler.start()
    except ValueError:
        return  # half a line: the first task was killed
    finally:
        if sampler is not None:
            sampler.stop()


def _sampler(connection, task, told: Mapping[str, Any]):
    def send(record):
        with contextlib.suppress(OSError):  # that the first task has gone is no news
            connection.sendall(_line({"start": told["start"], "record": record}))

    return DeviceSampler(
        send,
        told["every_seconds"],
        task,
        samples_host=told["samples_host"],
        began=told["began"],
        ahead_seconds=time.time() - told["now"],
    )


def _line(data):
    return json.dumps(data).encode() + b"\n"
