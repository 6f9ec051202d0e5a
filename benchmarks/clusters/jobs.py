"""A trial: one training run of one rival on the tasks of a job.

answer = run(trial, seed=0, timeout_seconds=600)

Tasks end as those of `scripts/launch.py` do: all of them if one fails, or if the program is
interrupted or killed.
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence

from benchmarks.clusters import brake
from benchmarks.clusters.network import Host
from benchmarks.measuring import ROOT
from benchmarks.rivals.cluster_workload import WARM, ClusterWorkload
from kdist.cluster import Cluster
from kdist.launch.local_engine import reserve_ports
from kdist.launch.task import Screen, Task
from kdist.launch.task_group import TaskGroup, Timeouts, describe_failure, stop_on_signals
from kdist.launch.watchdog import MARKS_VARIABLE

# For all tasks of all rivals. The number of parallel operations is TensorFlow's default: with
# one, training with parameter servers deadlocks.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "PYTHONPATH": str(ROOT),  # so that kdist is imported from this checkout
    "PYTHONUNBUFFERED": "1",
}
_UNSET = ("TF_CONFIG", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS", "KDIST_CORES")

_PORT = 2222  # every port of a separate host is free


@dataclasses.dataclass(frozen=True)
class Trial:
    """One way to train.

    Attributes:
        module: the script in `benchmarks.rivals`.
        workload: its workload.
        tasks: number of tasks by role; a single worker gets no TF_CONFIG.
        slowed: task that is slowed fourfold, such as "worker 1"; None for none.
    """

    module: str
    workload: ClusterWorkload
    tasks: Mapping[str, int]
    slowed: str | None = None


def run(trial: Trial, seed: int, timeout_seconds: float, hosts: Sequence[Host] = ()) -> dict:
    """Returns the answer of the deciding task, with the "share" of the time that a slowed task ran.

    Args:
        trial: the trial to run.
        seed: seed of its weights and data, such as the number of the repetition.
        timeout_seconds: time limit.
        hosts: hosts that run one task each; by default all tasks run here, on loopback.

    Raises:
        RuntimeError: a task failed, or the trial exceeded its time limit.
        KeyboardInterrupt: it was interrupted; all tasks have ended.
    """
    trial = dataclasses.replace(trial, workload=dataclasses.replace(trial.workload, seed=seed))
    directories = tempfile.TemporaryDirectory(prefix="kdist-bench-")
    with directories as directory, _addresses(trial, hosts) as addresses:
        mark = uuid.uuid4().hex
        tasks = _tasks(trial, addresses, hosts, mark, pathlib.Path(directory))
        job = TaskGroup(tasks, mark, _silent(), Timeouts(timeout_seconds=timeout_seconds))
        with stop_on_signals(job), _slowed(trial, job) as found:
            job.run()
        _raise_if_it_failed(trial, job, timeout_seconds)
        return {**_answer(job.chief), **({"share": found.share} if found else {})}


@contextlib.contextmanager
def _addresses(trial, hosts):
    """Yields the addresses of the tasks while their ports are reserved."""
    if hosts:
        yield [f"{host.address}:{_PORT}" for host in hosts]
        return
    with reserve_ports(sum(trial.tasks.values())) as ports:
        yield [f"127.0.0.1:{port}" for port in ports]


def _tasks(trial, addresses, hosts, mark, directory):
    left = iter(addresses)
    job = {role: [next(left) for _ in range(number)] for role, number in trial.tasks.items()}
    everyone = Cluster(job, next(iter(job)), 0).all_tasks()
    prefixes = [host.prefix for host in hosts] or [[]] * len(everyone)
    return [
        Task(
            cluster,
            [*prefix, *_command(trial)],
            _environment(cluster, mark),
            directory / cluster.name,
        )
        for cluster, prefix in zip(everyone, prefixes, strict=True)
    ]


def _command(trial):
    given = json.dumps(dataclasses.asdict(trial.workload))
    return [sys.executable, "-m", f"benchmarks.rivals.{trial.module}", given]


def _environment(cluster, mark):
    kept = {name: value for name, value in os.environ.items() if name not in _UNSET}
    marks = ",".join(filter(None, [kept.get(MARKS_VARIABLE), mark]))
    environment = {**kept, **ENVIRONMENT, MARKS_VARIABLE: marks}
    if not cluster.is_alone:
        cluster.publish(environment)
    return environment


def _silent():
    """Keeps the output of the tasks for an error message."""
    return Screen(io.StringIO(), io.StringIO())


@contextlib.contextmanager
def _slowed(trial, job):
    if trial.slowed is None:
        yield None
        return
    task = next(task for task in job.tasks if task.name == trial.slowed)
    with brake.slowed(task, when=lambda: WARM in _lines(job.chief)) as found:
        yield found


def _raise_if_it_failed(trial, job, timeout_seconds):
    what = f"{trial.module} by {trial.workload.strategy}"
    if job.failed:
        lines = "\n    ".join(job.failed.last_lines)
        raise RuntimeError(f"{what}: {describe_failure(job.failed)}\n    {lines}")
    if job.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if job.stopped_by is not None:
        raise SystemExit(128 + job.stopped_by)
    if job.timed_out:
        raise RuntimeError(
            f"{what} took more than {timeout_seconds:.0f} s; give a larger --timeout, or fewer "
            "--steps"
        )


def _answer(task):
    """Returns the line of JSON, which output of TensorFlow may follow."""
    return json.loads([line for line in _lines(task) if line.startswith("{")][-1])


def _lines(task):
    return task.log.read_text(errors="replace").splitlines() if task.log.exists() else []
