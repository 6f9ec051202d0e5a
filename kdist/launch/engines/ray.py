"""Ray: one actor per task, each on a node of its own, under an actor that supervises the job.

    handle = Ray().submit(job)          # later, from elsewhere: Ray().find("cats")
    code = handle.follow(print)

    result = kdist.launch.on("ray", train, workers=2)

Ray's core places the tasks, all or nothing, and kdist's launcher runs them: the same supervision,
heartbeats, and restarts as on one machine. The supervisor is a detached actor, so that the job
outlives the program that submitted it. Ray Train is not used. It sets TF_USE_LEGACY_KERAS, and has
no parameter servers.

Every node needs `pip install kdist[ray]`, the program under the same path, and the run directory on
a shared file system. Nothing here ends a process of Ray.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import signal
import threading
import time
import uuid
from collections.abc import Callable

from kdist.cluster import Cluster
from kdist.cluster.handshake import TOKEN_VARIABLE
from kdist.launch.engines.base import Cost, Engine, Handle, Job, NoSuchJobError, Status
from kdist.launch.engines.ray_task import Place, RayTask
from kdist.launch.output import Screen
from kdist.launch.restarts import RestartPolicy
from kdist.launch.task_group import TaskGroup, Timeouts, failure_report
from kdist.run_directory import RunDirectory

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    message = f"--engine=ray needs Ray: pip install kdist[ray] ({error})"
    raise ImportError(message) from error

_NAMESPACE = "kdist"
# A job that has no room by then is refused; within a minute, with what Ray takes to answer.
_ROOM_SECONDS = 45.0
# Exit codes: no room, tasks that could not be started, a task that has saved because it was asked to.
_NO_ROOM, _NO_TASKS, _SAVED = 69, 70, 143
# An ended job can be found for this time.
_KEPT_SECONDS = 3600.0
_MAX_LINES = 20_000


class Ray(Engine):
    """Actors of a Ray cluster that runs already."""

    name, program = "ray", "ray"
    options = {
        "address": "address of the cluster, by default RAY_ADDRESS or that of this machine",
        "cpus": "CPUs per task, by default 1",
        "strategy": "placement of the tasks: STRICT_SPREAD, the default, gives each a node of its "
        "own; SPREAD, PACK, and STRICT_PACK are Ray's others",
        "directory": "working directory on all nodes, by default the current one",
        "room_seconds": f"time to wait for free nodes, by default {_ROOM_SECONDS:g}",
    }

    def check(self, job: Job) -> list[str]:
        """Returns everything that is wrong with a job on Ray, and what to change."""
        problems = self.common_problems(job)
        strategies = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
        if job.options.get("strategy", strategies[0]) not in strategies:
            problems.append(
                f"strategy={job.options['strategy']} is none of {', '.join(strategies)}"
            )
        for name, given in (("image", job.image), ("setup", job.setup), ("spot", job.spot)):
            if given:
                problems.append(
                    f"Ray's nodes run already: leave {name} out, or start the cluster with it"
                )
        return problems

    def text(self, job: Job) -> str:
        """Returns the placement group and the tasks as JSON."""
        placement = {"strategy": _strategy(job), "bundles": [_bundle(job)] * job.num_machines}
        tasks = {"tasks": job.tasks, "command": job.command, "environment": dict(job.variables)}
        plan = {"plan": job.plan} if job.plan else {}
        hours = {"time_limit_hours": job.time_limit_hours} if job.time_limit_hours else {}
        described = {"name": job.name, **plan, **hours, "placement_group": placement, **tasks}
        return json.dumps(described, indent=2) + "\n"

    def submit(self, job: Job) -> "RayJob":
        """Starts the tasks of a job.

        Raises:
            RuntimeError: If the cluster has no room for all tasks, or has a job of this name.
            ConnectionError: If there is no cluster at the address.
        """
        return self.submit_call(job, None)

    def submit_call(self, job: Job, call: bytes | None) -> "RayJob":
        """Starts a job whose tasks call a pickled function, or execute the command if it is None.

        Raises:
            RuntimeError: As for `submit`.
        """
        _connect(job.options.get("address"))
        options = {"directory": os.getcwd(), **job.options}
        job = dataclasses.replace(job, options=options)
        with contextlib.suppress(NoSuchJobError):
            if not self.find(job.name).status().is_over:
                raise RuntimeError(
                    f"a job {job.name} runs; end it with kdist launch --job={job.name} --stop, or "
                    "choose another name"
                )
            ray.kill(_supervisor(job.name))
        actor = Supervisor.options(name=job.name, namespace=_NAMESPACE, lifetime="detached")
        supervisor = actor.remote(job, call)
        handle = RayJob(job.name, supervisor)
        if refusal := ray.get(supervisor.wait_for_room.remote()):
            handle.remove()
            raise RuntimeError(refusal)
        return handle

    def find(self, name: str) -> "RayJob":
        """Returns the job with this name, which runs or has ended within the last hour.

        Raises:
            NoSuchJobError: If the cluster has no such job.
            ConnectionError: If there is no cluster.
        """
        _connect(None)
        return RayJob(name, _supervisor(name))


class RayJob(Handle):
    """A job on a Ray cluster; `supervisor` is its actor."""

    def __init__(self, name: str, supervisor):
        super().__init__(name)
        self._supervisor = supervisor

    def status(self) -> Status:
        """Returns the state of the job."""
        return ray.get(self._supervisor.status.remote())

    def follow(self, show: Callable[[str], None]) -> int:
        """Shows the output of all tasks until the job is over, and returns its exit code."""
        start, code = 0, None
        while code is None:
            lines, start, code = ray.get(self._supervisor.read.remote(start))
            for line in lines:
                show(line)
        return code

    def stop(self):
        """Ends all tasks, which save a checkpoint before, and removes the job."""
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(self._supervisor.stop.remote())
        self.remove()

    def cost(self) -> Cost:
        """Returns the machine hours of the job."""
        return ray.get(self._supervisor.cost.remote())

    def result(self) -> tuple:
        """Returns the name and exit code of the task that failed, and what the chief returned."""
        return ray.get(self._supervisor.result.remote())

    def remove(self):
        """Removes the actor of the job, and with it all of its tasks."""
        ray.kill(self._supervisor)


@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=16)
class Supervisor:
    """Runs the tasks of a job, again after failures, and keeps their output.

    Ray creates it again if its node is lost; it then starts the job from its last checkpoint.
    """

    def __init__(self, job: Job, call: bytes | None):
        self._job, self._call = job, call
        self._condition = threading.Condition()
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)
        self._num_lines = self._restarts = 0
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
            if self._stopped or code in (0, _NO_ROOM) or self._seconds_left() == 0:
                return code
            # A task that has saved because it was asked to is started again free of charge.
            if code != _SAVED and not policy.wait_before_restart():
                return code
            self._restarts += 1

    def _seconds_left(self):
        limit = self._job.time_limit_hours
        return None if limit is None else max(0.0, self._began + limit * 3600 - time.time())

    def _run_once(self, policy):
        """Places and runs the tasks once; returns the exit code."""
        job = self._job
        group = placement_group([_bundle(job)] * job.num_machines, strategy=_strategy(job))
        places: list = []
        try:
            if not group.wait(float(job.options.get("room_seconds", _ROOM_SECONDS))):
                self._refuse(_no_room_message(job))
                return _NO_ROOM
            places += _create_places(job, group)
            addresses = ray.get([place.reserve.remote() for place in places])
            self._refuse("")
            return self._run_tasks(places, addresses, policy)
        except ray.exceptions.RayError as error:  # such as a node that was lost meanwhile
            self._announce(f"the tasks could not be started: {error}")
            return _NO_TASKS
        finally:
            for place in places:
                ray.kill(place)
            remove_placement_group(group)

    def _run_tasks(self, places, addresses, policy):
        job, rest = self._job, iter(addresses)
        by_role = {role: [next(rest) for _ in range(count)] for role, count in job.tasks.items()}
        clusters = Cluster(by_role, next(iter(by_role)), 0).all_tasks()
        self._announce(f"{clusters[0].counts()} at {', '.join(addresses)}")
        token = {TOKEN_VARIABLE: secrets.token_hex(16)}
        ray_tasks = [
            RayTask(place, cluster, job, token, self._call)
            for place, cluster in zip(places, clusters, strict=True)
        ]
        timeouts = Timeouts(float(job.grace_seconds), timeout_seconds=self._seconds_left())
        # No process of this machine has the mark.
        mark, screen = uuid.uuid4().hex, _Lines(self._add)
        tasks = TaskGroup(ray_tasks, mark, screen, timeouts, policy.may_replace)
        with self._condition:
            self._group = tasks
            if self._stopped:
                return 128 + signal.SIGTERM
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

    def _refuse(self, refusal):
        with self._condition:
            if refusal:
                self._announce(refusal)
            if self._refusal is None:
                self._refusal = refusal
            self._condition.notify_all()

    def _announce(self, message):
        self._add(f"launch: {message}")

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
        self._add(f"launch: {message}")


def _connect(address):
    """Connects this process to the cluster, unless it is."""
    if not ray.is_initialized():
        address = address or os.environ.get("RAY_ADDRESS") or "auto"
        ray.init(address, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR")


def _supervisor(name):
    try:
        return ray.get_actor(name, namespace=_NAMESPACE)
    except ValueError:
        raise NoSuchJobError(f"the Ray cluster has no job {name}") from None


def _strategy(job):
    return job.options.get("strategy", "STRICT_SPREAD")


def _bundle(job):
    gpus = {"GPU": job.machine.num_devices} if job.machine.num_devices else {}
    return {"CPU": float(job.options.get("cpus", 1)), **gpus}


def _create_places(job, group):
    bundle = _bundle(job)
    return [
        Place.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(job.num_machines)
    ]


def _no_room_message(job):
    nodes = [
        ", ".join(f"{node['Resources'].get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return (
        f"no room: the job needs {job.num_machines} × {_bundle(job)} by {_strategy(job)}, and the "
        f"cluster has {len(nodes)} nodes ({'; '.join(nodes)}), some of which are in use; add nodes, "
        "or use fewer --workers"
    )
