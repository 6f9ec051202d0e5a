"""Ray: one actor per task, each on a node of its own, under an actor that supervises the job.

    handle = Ray().submit(job)          # later, from elsewhere: Ray().find("cats")
    code = handle.follow(print)

    result = kdist.launch.on("ray", train, workers=2)

Ray's core places the tasks, all or nothing, and kdist's launcher runs them: the same supervision,
heartbeats, and restarts as on one machine. The supervisor is a detached actor, so that the job
outlives the program that submitted it. Ray Train is not used. It sets TF_USE_LEGACY_KERAS, and has
no parameter servers.

Every node needs `pip install kdist[ray]`, the program under the same path, and the run directory on
a shared file system. Nothing here ends a process of Ray. The library is imported when it is used.
"""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping

from kdist.cluster.handshake import parse_address
from kdist.launch.engines.base import Cost, Engine, Handle, Job, NoSuchJobError, Status

_NAMESPACE = "kdist"
# A job that has no room by then is refused; within a minute, with what Ray takes to answer.
_ROOM_SECONDS = 45.0
_CONNECTION_SECONDS = 5.0  # as in Ray
_STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")


class Ray(Engine):
    """Actors of a Ray cluster that runs already."""

    name, program = "ray", "ray"
    options: Mapping[str, str] = {
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
        if strategy(job) not in _STRATEGIES:
            problems.append(f"strategy={strategy(job)} is none of {', '.join(_STRATEGIES)}")
        if job.min_workers is not None and strategy(job) == "STRICT_PACK":
            problems.append(
                "STRICT_PACK loses all tasks with their node: leave min_workers out, or use "
                "another strategy"
            )
        for name, given in (("image", job.image), ("setup", job.setup), ("spot", job.spot)):
            if given:
                problems.append(
                    f"Ray's nodes run already: leave {name} out, or start the cluster with it"
                )
        return problems

    def is_installed(self) -> bool:
        """Returns whether Ray is installed in this Python."""
        return importlib.util.find_spec("ray") is not None

    def text(self, job: Job) -> str:
        """Returns the placement group and the tasks as JSON."""
        placement = {"strategy": strategy(job), "bundles": [bundle(job)] * job.num_machines}
        limits = job.worker_limits
        elastic = dataclasses.asdict(limits) if limits else {}
        tasks = {"tasks": job.tasks, "command": job.command, "environment": dict(job.variables)}
        plan = {"plan": job.plan} if job.plan else {}
        hours = {"time_limit_hours": job.time_limit_hours} if job.time_limit_hours else {}
        described = {
            "name": job.name,
            **plan,
            **hours,
            "placement_group": placement,
            **elastic,
            **tasks,
        }
        return json.dumps(described, indent=2) + "\n"

    def submit(self, job: Job) -> "RayJob":
        """Starts the tasks of a job.

        Raises:
            RuntimeError: If the cluster has no room for all tasks, or has a job of this name.
            NoSuchJobError: If there is no cluster.
        """
        return self.submit_call(job, None)

    def submit_call(self, job: Job, call: bytes | None) -> "RayJob":
        """Starts a job whose tasks call a pickled function, or execute the command if it is None.

        Raises:
            RuntimeError: As for `submit`.
        """
        connect(job.options.get("address"))
        job = dataclasses.replace(job, options={"directory": os.getcwd(), **job.options})
        with contextlib.suppress(NoSuchJobError):
            if not self.find(job.name).status().is_over:
                raise RuntimeError(
                    f"a job {job.name} runs; end it with kdist launch --job={job.name} --stop, or "
                    "choose another name"
                )
            self.find(job.name).remove()
        from kdist.launch.engines.ray_actors import Supervisor

        options = {"name": job.name, "namespace": _NAMESPACE, "lifetime": "detached"}
        actor = Supervisor.options(**options)  # type: ignore[attr-defined]
        handle = RayJob(job.name, actor.remote(job, call))
        if refusal := handle.refusal():
            handle.remove()
            raise RuntimeError(refusal)
        return handle

    def find(self, name: str) -> "RayJob":
        """Returns the job with this name, which runs or has ended within the last hour.

        Raises:
            NoSuchJobError: If the cluster has no such job, or there is no cluster.
        """
        ray = connect(None)
        try:
            return RayJob(name, ray.get_actor(name, namespace=_NAMESPACE))
        except ValueError:
            raise NoSuchJobError(f"the Ray cluster has no job {name}") from None


class RayJob(Handle):
    """A job on a Ray cluster; `supervisor` is its actor."""

    def __init__(self, name: str, supervisor):
        super().__init__(name)
        self._supervisor = supervisor

    def refusal(self) -> str:
        """Returns why the job has no room, or "" once its tasks have nodes."""
        return self._ask("wait_for_room")

    def status(self) -> Status:
        """Returns the state of the job."""
        return self._ask("status")

    def follow(self, show: Callable[[str], None]) -> int:
        """Shows the output of all tasks until the job is over, and returns its exit code."""
        start, code = 0, None
        while code is None:
            lines, start, code = self._ask("read", start)
            for line in lines:
                show(line)
        return code

    def stop(self):
        """Ends all tasks, which save a checkpoint before, and removes the job."""
        self._ask("stop")
        self.remove()

    def cost(self) -> Cost:
        """Returns the machine hours of the job."""
        return self._ask("cost")

    def result(self) -> tuple:
        """Returns the name and exit code of the task that failed, and what the chief returned."""
        return self._ask("result")

    def remove(self):
        """Removes the actor of the job, and with it all of its tasks."""
        import ray

        ray.kill(self._supervisor)

    def _ask(self, method, *arguments):
        import ray

        try:
            return ray.get(getattr(self._supervisor, method).remote(*arguments))
        except ray.exceptions.RayActorError as error:
            raise NoSuchJobError(f"the job {self.name} has been removed") from error


def connect(address: str | None):
    """Returns Ray's library, after this process has connected to the cluster.

    Raises:
        NoSuchJobError: If there is no cluster at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise RuntimeError(f"--engine=ray needs Ray: pip install 'kdist[ray]' ({error})") from error
    if not ray.is_initialized():
        address = address or os.environ.get("RAY_ADDRESS") or "auto"
        try:
            _check_answers(address)
            ray.init(
                address, namespace=_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
            )
        except OSError as error:
            raise NoSuchJobError(
                f"no Ray cluster answers ({address}); start one with ray start, or name its "
                f"address in RAY_ADDRESS ({error})"
            ) from error
    return ray


def _check_answers(address: str):
    """Raises an OSError if no program listens at an address of Ray's.

    Ray itself would try for a quarter of an hour, also with the address that a killed cluster left
    on this machine.
    """
    from ray._private.services import canonicalize_bootstrap_address

    if "://" not in address:
        address = canonicalize_bootstrap_address(address) or ""
    address = address.removeprefix("ray://")
    if address.rpartition(":")[2].isdecimal():
        socket.create_connection(parse_address(address), _CONNECTION_SECONDS).close()


def strategy(job: Job) -> str:
    """Returns Ray's strategy for placing the tasks of a job."""
    return job.options.get("strategy", _STRATEGIES[0])


def bundle(job: Job) -> dict[str, float]:
    """Returns the resources of one task."""
    gpus = {"GPU": job.machine.num_devices} if job.machine.num_devices else {}
    return {"CPU": float(job.options.get("cpus", 1)), **gpus}


def room_seconds(job: Job) -> float:
    """Returns the time to wait for free nodes."""
    return float(job.options.get("room_seconds", _ROOM_SECONDS))
