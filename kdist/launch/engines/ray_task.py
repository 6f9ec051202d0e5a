"""A task of a job on Ray: an actor on its node, and its proxy in the supervisor.

The actor runs the program as a child process, by the same `Task` as on one machine. If the actor or
its node is lost, the child and its own children are killed.
"""

import collections
import contextlib
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from typing import NamedTuple

import ray

from kdist.cluster import Cluster
from kdist.cluster.heartbeat import Beat
from kdist.hardware import CORES_VARIABLE
from kdist.launch.engines.base import Job
from kdist.launch.local_engine import command_of, reserve_ports, share_threads
from kdist.launch.task import Task
from kdist.launch.watchdog import MARKS_VARIABLE, Watchdog

_POLL_SECONDS = 0.3
# Time for the last output of a task whose children keep its pipe open.
_OUTPUT_SECONDS = 1.0


class Seen(NamedTuple):
    """What a task has done since it was last asked."""

    lines: list[str]
    beat: Beat | None
    silent_seconds: float  # since the heartbeat
    returncode: int | None  # None until the task has ended and its output was read


@ray.remote(max_concurrency=8)
class Place:
    """Room for one task on a node."""

    def __init__(self):
        self._directory = pathlib.Path(tempfile.mkdtemp(prefix="kdist-"))
        self._condition = threading.Condition()
        self._lines: list[str] = []
        self._returncode: int | None = None
        self._task: Task | None = None
        self._ports = contextlib.ExitStack()

    def reserve(self) -> str:
        """Returns the address of the task, whose port no other task gets."""
        [port] = self._ports.enter_context(reserve_ports(1))
        return f"{ray.util.get_node_ip_address()}:{port}"

    def start(self, cluster: Cluster, job: Job, variables: Mapping[str, str], call: bytes | None):
        """Starts the program, or the pickled function."""
        os.chdir(job.options["directory"])
        cores = {CORES_VARIABLE: str(max(1, int(float(job.options.get("cpus", 1)))))}
        environment = {**os.environ, **job.variables, **variables, **cores}
        environment |= share_threads([cluster], environment)
        mark = environment[MARKS_VARIABLE] = uuid.uuid4().hex
        cluster.publish(environment)
        if call is None:
            command = command_of(job.command, environment)
        else:
            path = self._directory / "call"
            path.write_bytes(call)
            module = "kdist.launch.function_job"
            command = [sys.executable, "-u", "-m", module, str(path), str(self._directory)]
        logs = pathlib.Path(job.run_dir, "logs") if job.run_dir else self._directory
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{cluster.name.replace(' ', '-')}.log"
        self._task = Task(cluster, command, environment, log)
        threading.Thread(target=self._run, args=[self._task, mark], daemon=True).start()

    def _run(self, task, mark):
        """Starts the task and reads its output; the kernel kills a child of a thread that ends."""
        with Watchdog(mark) as watchdog:
            task.start()
            watchdog.guard(task.pid)
            more, ended = True, None
            while more and (ended is None or time.monotonic() - ended < _OUTPUT_SECONDS):
                if task.has_ended() and ended is None:
                    ended = time.monotonic()
                lines, more = task.read()
                task.read_heartbeat()
                if lines:
                    with self._condition:
                        self._lines += lines
                        self._condition.notify_all()
                elif more:
                    time.sleep(_POLL_SECONDS / 10)
            while not task.has_ended():  # it has closed its output
                time.sleep(_POLL_SECONDS / 10)
            task.close()
        with self._condition:
            self._returncode = task.returncode
            self._condition.notify_all()

    def poll(self) -> Seen:
        """Returns what the task has done, after at most `_POLL_SECONDS`."""
        task = self._task
        with self._condition:
            self._condition.wait_for(
                lambda: self._lines or self._returncode is not None, _POLL_SECONDS
            )
            lines, self._lines = self._lines, []
            silent = time.monotonic() - task.beat_at
            return Seen(lines, task.beat, silent, self._returncode)

    def signal(self, number: int):
        """Sends a signal to the task and its children."""
        if self._task:
            self._task.signal(number)

    def result(self, name: str) -> bytes | None:
        """Returns the pickled result of the function, None if its process ended before."""
        try:
            return (self._directory / name).read_bytes()
        except OSError:
            return None


class RayTask(Task):
    """The task of a `Place`, as a `TaskGroup` sees it."""

    pid = None  # it is a process of another machine

    def __init__(
        self,
        place,
        cluster: Cluster,
        job: Job,
        variables: Mapping[str, str],
        call: bytes | None,
    ):
        super().__init__(cluster, job.command, {}, pathlib.Path(f"logs of {cluster.name}"))
        self.place = place
        self._start = cluster, job, variables, call
        self._unread: collections.deque[str] = collections.deque()
        self._seen_returncode: int | None = None
        self._wake: tuple[int, int] | None = None

    def start(self):
        """Starts the program on its node, and a thread that follows it."""
        self.returncode, self.beat, self.hung = None, None, ""
        self._seen_returncode, self._ended = None, 0.0
        self._started = time.monotonic()
        ray.get(self.place.start.remote(*self._start))
        self._wake = os.pipe()
        os.set_blocking(self._wake[0], False)
        threading.Thread(target=self._follow, args=[self._wake[1]], daemon=True).start()

    @property
    def output(self) -> int:
        """The file descriptor that is readable when there is new output."""
        return self._wake[0]

    def has_ended(self) -> bool:
        """Returns whether the process has ended, without waiting."""
        if self.returncode is None and self._seen_returncode is not None:
            self.returncode, self._ended = self._seen_returncode, time.monotonic()
        return self.returncode is not None

    def signal(self, number: int):
        """Sends a signal to the task and its children, unless it has ended."""
        if not self.has_ended():
            self.place.signal.remote(number)

    def read(self) -> tuple[list[str], bool]:
        """Returns the new lines of output, and whether more may come."""
        more = True
        with contextlib.suppress(BlockingIOError):
            more = bool(os.read(self.output, 1 << 16))
        lines = [self._unread.popleft() for _ in range(len(self._unread))]
        self.last_lines.extend(lines)
        return lines, more

    def read_heartbeat(self):
        """Does nothing: the thread updates `beat`."""

    def close_output(self):
        """Stops reading the output."""

    def close(self):
        """Stops reading the output."""
        if self._wake:
            os.close(self._wake[0])
            self._wake = None

    def _follow(self, writer):
        """Polls the place until the task has ended, or the actor or its node is lost."""
        with os.fdopen(writer, "wb", buffering=0) as wake:
            code = None
            while code is None:
                try:
                    lines, beat, silent, code = ray.get(self.place.poll.remote())
                except ray.exceptions.RayError as error:
                    lines = [f"(kdist: the task's actor or its node is gone: {error})"]
                    beat, silent, code = None, 0.0, -signal.SIGKILL
                if beat:
                    self.beat, self.beat_at = beat, time.monotonic() - silent
                self._unread.extend(lines)
                with contextlib.suppress(OSError):  # nobody reads any more
                    if lines:
                        wake.write(b".")
            self._seen_returncode = code
