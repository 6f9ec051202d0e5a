"""Actors of a job on Ray: one that supervises it, and one per task on the node of the task.

The actor of a task runs the program as a child process, by the same `Task` as on one machine. If
the actor or its node is lost, the child and its own children are killed.
"""

import collections
import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import NamedTuple

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from kdist.cluster import Cluster
from kdist.cluster.handshake import TOKEN_VARIABLE
from kdist.cluster.heartbeat import Beat
from kdist.exit_codes import NO_ROOM
from kdist.hardware import CORES_VARIABLE
from kdist.launch import child_python
from kdist.launch.engines.base import Cost, Job, Status
from kdist.launch.engines.ray import bundle, room_seconds, strategy
from kdist.launch.local_engine import command_of, reserve_ports, share_threads
from kdist.launch.supervision import RestartPolicy, limit_seconds
from kdist.launch.task import PREFIX, Screen, Task
from kdist.launch.task_group import TaskGroup, Timeouts, failure_report
from kdist.launch.watchdog import MARKS_VARIABLE, Watchdog
from kdist.run_directory import RunDirectory

# Exit code of `sysexits.h`: the tasks could not be started.
_NO_TASKS = 70
# An ended job can be found for this time.
_KEPT_SECONDS = 3600.0
_MAX_LINES = 20_000
_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 0.3
_ROOM_POLL_SECONDS = 1  # Ray ignores fractions
# Time in which Ray answers if there is room, and between two looks for more of it.
_SHORT_ROOM_SECONDS, _GROW_INTERVAL_SECONDS = 5.0, 10.0
# Time for the last output of a task whose children keep its pipe open.
_OUTPUT_SECONDS = 1.0


class Seen(NamedTuple):
    """Output and state of a task since the last poll."""

    lines: list[str]
    beat: Beat | None
    silent_seconds: float  # since the heartbeat
    returncode: int | None  # None until the task has ended and its output was read


@ray.remote(max_concurrency=8)  # type: ignore[call-overload]
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
            command = [sys.executable, "-u", *child_python.options(), "-m", module]
            command += [str(path), str(self._directory)]
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
        assert task is not None, "the task has not started"
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

    def close(self):
        """Deletes the files of the task."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def result(self, name: str) -> bytes | None:
        """Returns the pickled result of the function, None if its process ended before."""
        try:
            return (self._directory / name).read_bytes()
        except OSError:
            return None


class RayTask(Task):
    """The task of a `Place`, as a `TaskGroup` sees it."""

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
    def pid(self) -> None:
        """None: the process runs on another machine."""
        return None

    @property
    def output(self) -> int:
        """The file descriptor that is readable when there is new output."""
        return self._wake[0] if self._wake else -1

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


@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=16)  # type: ignore[call-overload]
class Supervisor:
    """Runs the tasks of a job, again after failures, and keeps their output.

    Ray creates it again if its node is lost; it then starts the job from its last checkpoint.
    """

    def __init__(self, job: Job, call: bytes | None):
        self._job, self._call = job, call
        self._condition = threading.Condition()
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)
        self._num_lines = self._restarts = 0
        self._workers = job.workers  # that ran last, or that have just got room
        self._is_growing = False  # the job ended because there is room for more workers
        self._refusal: str | None = None  # until the first placement has succeeded or failed
        self._code: int | None = None
        self._group: TaskGroup | None = None
        self._stopped = False
        self._failed: tuple[str, int] | None = None
        self._result: bytes | None = None
        self._began, self._ended = time.time(), 0.0
        threading.Thread(target=self._run, daemon=True).start()

    # For handles.

    def wait_for_room(self) -> str:
        """Returns why the job is refused, or "" once its tasks have nodes."""
        with self._condition:
            self._condition.wait_for(lambda: self._refusal is not None)
        return self._refusal or ""

    def read(self, start: int) -> tuple[list[str], int, int | None]:
        """Returns lines from an index on, the next index, and the exit code of an ended job."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._num_lines > start or self._code is not None, timeout=5.0
            )
            new = min(self._num_lines - start, len(self._lines))
            lines = list(self._lines)[len(self._lines) - new :]
            return lines, self._num_lines, self._code

    def status(self) -> Status:
        """Returns the state of the job."""
        state = "pending" if self._refusal is None else "running"
        if self._code is not None:
            state = "stopped" if self._stopped else "failed" if self._code else "done"
        detail = f"exit code {self._code}" if self._code else ""
        return Status(state, detail, self._restarts)

    def stop(self):
        """Ends the job, and returns when its tasks have ended."""
        with self._condition:
            self._stopped = True
            if self._group:
                self._group.stop(signal.SIGTERM)
            self._condition.wait_for(lambda: self._code is not None)

    def cost(self) -> Cost:
        """Returns the machine hours of the job."""
        seconds = (self._ended or time.time()) - self._began
        return Cost(self._job.num_machines * seconds / 3600)

    def result(self) -> tuple:
        """Returns (name, exit code) of the task that failed, or None, and the chief's result."""
        return self._failed, self._result

    # The job.

    def _run(self):
        try:
            code = self._run_with_restarts()
        except Exception as error:  # such as a lost connection to Ray
            self._announce(f"the supervisor failed: {type(error).__name__}: {error}")
            code = 1
        with self._condition:
            self._code, self._ended = code, time.time()
            self._refusal = self._refusal or ""
            self._condition.notify_all()
        time.sleep(_KEPT_SECONDS)
        ray.kill(ray.get_runtime_context().current_actor)

    def _run_with_restarts(self):
        job = self._job
        checkpoints = RunDirectory(pathlib.Path(job.options["directory"]) / job.run_dir).checkpoints
        policy = RestartPolicy(job.max_restarts, checkpoints, self._announce)
        while True:
            code = self._run_once(policy)
            if self._stopped or code in (0, NO_ROOM) or self._seconds_left() == 0:
                return code
            if not self._is_growing and not policy.wait_before_restart(code):
                return code
            if self._stopped:
                return code
            self._restarts += 1

    def _seconds_left(self):
        limit = self._job.time_limit_hours
        return None if limit is None else max(0.0, self._began + limit * 3600 - time.time())

    def _run_once(self, policy):
        """Places and runs the tasks once; returns the exit code."""
        self._is_growing = False
        group = self._find_room()
        if group is None:
            self._refuse(_no_room_message(self._job))
            return 128 + signal.SIGTERM if self._stopped else NO_ROOM
        places: list = []
        try:
            places += _create_places(self._job, group)
            addresses = ray.get([place.reserve.remote() for place in places])
            self._refuse("")
            return self._run_tasks(places, addresses, policy, group)
        except ray.exceptions.RayError as error:  # such as a node that was lost meanwhile
            self._announce(f"the tasks could not be started: {error}")
            return _NO_TASKS
        finally:
            closed = [place.close.remote() for place in places]
            if closed:
                ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_SECONDS)
            for place in places:
                ray.kill(place)
            remove_placement_group(group)

    def _find_room(self):
        """Returns a placement group for as many tasks as there is room for, or None.

        All tasks are needed, unless the job may run with fewer workers.
        """
        job, limits = self._job, self._job.worker_limits
        attempts = [(job.num_machines, room_seconds(job))]
        if limits:
            seconds = room_seconds(job) if self._refusal is None else limits.wait_seconds
            attempts = limits.attempts(self._workers, seconds, _SHORT_ROOM_SECONDS)
        for number, seconds in attempts:
            group = placement_group([bundle(job)] * number, strategy=strategy(job))
            has_room = self._has_room(group, min(seconds, _SHORT_ROOM_SECONDS))
            if not has_room and seconds > _SHORT_ROOM_SECONDS:
                if limits:
                    self._announce(
                        f"no room for {limits.share(number)}; waiting up to {seconds:.0f} s for it"
                    )
                has_room = self._has_room(group, seconds - _SHORT_ROOM_SECONDS)
            if has_room:
                self._workers = number if limits else job.workers
                return group
            remove_placement_group(group)
        return None

    def _has_room(self, group, seconds):
        """Returns whether a placement group gets its resources in time, unless the job is ended."""
        left = self._seconds_left()
        deadline = time.monotonic() + (seconds if left is None else min(seconds, left))
        while not (has_room := group.wait(_ROOM_POLL_SECONDS)):
            if self._stopped or time.monotonic() >= deadline:
                break
        return has_room

    def _run_tasks(self, places, addresses, policy, group):
        job, rest = self._job, iter(addresses)
        limits, counts, planned = job.worker_limits, job.tasks, None
        if limits:
            counts, planned = {"worker": len(places)}, job.workers
        by_role = {role: [next(rest) for _ in range(count)] for role, count in counts.items()}
        clusters = Cluster(by_role, next(iter(by_role)), 0, planned).all_tasks()
        started = limits.share(len(places)) if limits else clusters[0].counts()
        self._announce(f"{started} at {', '.join(addresses)}")
        token = {TOKEN_VARIABLE: secrets.token_hex(16)}
        ray_tasks = [
            RayTask(place, cluster, job, token, self._call)
            for place, cluster in zip(places, clusters, strict=True)
        ]
        timeouts = Timeouts(
            float(job.grace_seconds),
            timeout_seconds=self._seconds_left(),
            hang_seconds=limit_seconds(job.variables),
        )
        # No process of this machine has the mark.
        mark, screen = uuid.uuid4().hex, _Lines(self._add)
        tasks = TaskGroup(ray_tasks, mark, screen, timeouts, policy.may_replace)
        with self._condition:
            self._group = tasks
            if self._stopped:
                return 128 + signal.SIGTERM
        with self._growing(tasks, group):
            code = tasks.run()
        self._group = None
        self._failed = (tasks.failed.name, tasks.failed.exit_code) if tasks.failed else None
        if tasks.failed:
            self._announce(failure_report(tasks.failed))
        if self._call:
            source = tasks.failed or tasks.chief
            with contextlib.suppress(ray.exceptions.RayError):
                self._result = ray.get(source.place.result.remote(source.name))
        return code

    @contextlib.contextmanager
    def _growing(self, tasks, group):
        """Yields while a thread restarts the job as soon as there is room for another worker."""
        over = threading.Event()
        if self._workers < self._job.workers:
            threading.Thread(target=self._grow, args=[tasks, group, over], daemon=True).start()
        try:
            yield
        finally:
            over.set()
            self._is_growing = tasks.is_restarting

    def _grow(self, tasks, group, over):
        used = set(placement_group_table(group)["bundles_to_node_id"].values())
        while not over.wait(_GROW_INTERVAL_SECONDS):
            if _is_room_elsewhere(self._job, used) and not over.is_set():
                self._workers += 1
                share = self._job.worker_limits.share(self._workers)
                self._announce(
                    f"there is room for {share}: the tasks save a checkpoint, and the job restarts"
                )
                tasks.restart()
                return

    def _refuse(self, refusal):
        with self._condition:
            if refusal:
                self._announce(refusal)
            if self._refusal is None:
                self._refusal = refusal
            self._condition.notify_all()

    def _announce(self, message):
        self._add(f"{PREFIX}{message}")

    def _add(self, line):
        with self._condition:
            self._lines.append(line)
            self._num_lines += 1
            self._condition.notify_all()


class _Lines(Screen):
    """Screen that passes each line to a function."""

    def __init__(self, add: Callable[[str], None]):
        super().__init__()
        self._add = add

    def show(self, name: str, line: str):
        """Passes a line of the task with this name."""
        self._add(f"[{name}] {line}")

    def announce(self, message: str):
        """Passes a message of the launcher."""
        self._add(f"{PREFIX}{message}")


def _create_places(job, group):
    resources = bundle(job)
    return [
        Place.options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(group.bundle_count)
    ]


@ray.remote
def _answer():
    """Runs on a node that has room."""


def _is_room_elsewhere(job, used):
    """Returns whether a node other than the used ones has room for a task."""
    resources = bundle(job)
    for node in ray.nodes():
        fits = all(node["Resources"].get(kind, 0) >= number for kind, number in resources.items())
        if not node["Alive"] or node["NodeID"] in used or not fits:
            continue
        answer = _answer.options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote()
        if ray.wait([answer], timeout=_SHORT_ROOM_SECONDS)[0]:
            with contextlib.suppress(ray.exceptions.RayError):  # the node was lost again
                ray.get(answer)
                return True
        ray.cancel(answer, force=True)
    return False


def _no_room_message(job):
    nodes = [
        ", ".join(f"{node['Resources'].get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return (
        f"no room: the job needs {job.min_workers or job.num_machines} × {bundle(job)} by "
        f"{strategy(job)}, and the "
        f"cluster has {len(nodes)} nodes ({'; '.join(nodes)}), some of which are in use; add "
        "nodes, or use fewer --workers"
    )
