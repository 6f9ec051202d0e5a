"""A trial: one training run on the tasks of a job, by one rival.

answer = run(trial, seed=0, timeout_seconds=600)

Tasks end as those of `scripts/launch.py` do: all when one fails, when the program is interrupted,
or when it is killed.
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
from kdist.launch.job import Job, Limits, how_it_failed, stopped_by_signals
from kdist.launch.orphans import MARKS
from kdist.launch.output import Screen
from kdist.launch.ports import reserved
from kdist.launch.task import Task

# For all tasks of all rivals. The number of operations at once stays TensorFlow's: with one,
# training by parameter servers stands still for good.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "PYTHONPATH": str(ROOT),  # so that kdist is that of this checkout, whatever is installed
    "PYTHONUNBUFFERED": "1",
}
_UNSET = ("TF_CONFIG", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS", "KDIST_CORES")

_PORT = 2222  # on a host of one's own, no other is taken


@dataclasses.dataclass(frozen=True)
class Trial:
    """One way to train.

    Attributes:
        module: the script in `benchmarks.rivals`.
        workload: what it is given.
        tasks: role -> how many; a worker alone is told of no job.
        slowed: the task that is slowed fourfold, such as "worker 1"; None for none.
    """

    module: str
    workload: ClusterWorkload
    tasks: Mapping[str, int]
    slowed: str | None = None


def run(trial: Trial, seed: int, timeout_seconds: float, hosts: Sequence[Host] = ()) -> dict:
    """What the deciding task answers; of a slowed trial, "share" of the time it ran as well.

    Args:
        trial: what is run.
        seed: of its weights and data; a repetition's number, say.
        timeout_seconds: after which it is given up.
        hosts: a task runs on each; without any, all run here, on loopback.

    Raises:
        RuntimeError: a task failed, or it took too long.
        KeyboardInterrupt: it was interrupted; all tasks have ended.
    """
    trial = dataclasses.replace(trial, workload=dataclasses.replace(trial.workload, seed=seed))
    directories = tempfile.TemporaryDirectory(prefix="kdist-bench-")
    with directories as directory, _addresses(trial, hosts) as addresses:
        mark = uuid.uuid4().hex
        tasks = _tasks(trial, addresses, hosts, mark, pathlib.Path(directory))
        job = Job(tasks, mark, _silent(), Limits(timeout_seconds=timeout_seconds))
        with stopped_by_signals(job), _slowed(trial, job) as found:
            job.run()
        _raise_if_it_failed(trial, job, timeout_seconds)
        return {**_answer(job.deciding), **({"share": found.share} if found else {})}


@contextlib.contextmanager
def _addresses(trial, hosts):
    """The addresses of the tasks, while ports are held."""
    if hosts:
        yield [f"{host.address}:{_PORT}" for host in hosts]
        return
    with reserved(sum(trial.tasks.values())) as ports:
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
    marks = ",".join(filter(None, [kept.get(MARKS), mark]))
    environment = {**kept, **ENVIRONMENT, MARKS: marks}
    if not cluster.is_alone:
        cluster.publish(environment)
    return environment


def _silent():
    """What tasks say is kept for the error, if there is one."""
    return Screen(io.StringIO(), io.StringIO())


@contextlib.contextmanager
def _slowed(trial, job):
    if trial.slowed is None:
        yield None
        return
    task = next(task for task in job.tasks if task.name == trial.slowed)
    with brake.slowed(task, when=lambda: WARM in _lines(job.deciding)) as found:
        yield found


def _raise_if_it_failed(trial, job, timeout_seconds):
    what = f"{trial.module} by {trial.workload.strategy}"
    if job.failed:
        lines = "\n    ".join(job.failed.last_lines)
        raise RuntimeError(f"{what}: {how_it_failed(job.failed)}\n    {lines}")
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
    """The line of JSON; TensorFlow may say something after it."""
    return json.loads([line for line in _lines(task) if line.startswith("{")][-1])


def _lines(task):
    return task.log.read_text(errors="replace").splitlines() if task.log.exists() else []
