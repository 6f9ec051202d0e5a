"""A job on this machine: its tasks' addresses, GPUs, threads and files.

with job({"worker": 2}, ["train.py", "--epochs=1"], pathlib.Path("runs/first/logs")) as it:
    code = it.run()
"""

import contextlib
import difflib
import os
import pathlib
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from kdist.cluster import ROLES, Cluster
from kdist.launch.job import Job, Limits
from kdist.launch.orphans import MARKS
from kdist.launch.output import Screen
from kdist.launch.ports import addresses, reserved
from kdist.launch.shares import VISIBLE, find_gpus, share_gpus, share_threads
from kdist.launch.task import Task


@contextlib.contextmanager
def job(
    counts: Mapping[str, int],
    arguments: Sequence[str],
    log_dir: pathlib.Path,
    *,
    limits: Limits | None = None,
    screen: Screen | None = None,
    several_on_one_gpu: bool = False,
    environment: Mapping[str, str] | None = None,
    may_replace: Callable[[str], bool] = lambda name: False,
) -> Iterator[Job]:
    """A job that is ready to run; its ports are held until the context ends.

    Args:
        counts: role -> how many tasks. With parameter servers there is a chief as well.
        arguments: of each task: a Python script or another program, and what it is told.
        log_dir: gets a file for each task, such as worker-1.log; one that is there grows.
        limits: how long the job waits for what.
        screen: shows what tasks write; by default on standard output.
        several_on_one_gpu: whether more tasks than GPUs share them.
        environment: of the tasks, before they get their places; by default this process's.
        may_replace: as `Job` asks it.

    Raises:
        ValueError: more tasks than GPUs.
        FileNotFoundError: there is no such program.
        OSError: the directory cannot be written, or there are no ports.
    """
    environment = os.environ if environment is None else environment
    command = _command(arguments, environment)
    counts = {**counts, "chief": 1} if counts.get("ps") else counts
    with reserved(sum(counts.values())) as ports:
        everyone = Cluster(*_places(counts, ports)).all_tasks()
        gpus = find_gpus(environment)
        visible = share_gpus(everyone, gpus, several_on_one_gpu)
        threads = share_threads(everyone, environment)
        mark = uuid.uuid4().hex
        _make(log_dir)
        tasks = []
        for cluster in everyone:
            own = {**environment, **threads}
            if cluster.name in visible:
                own[VISIBLE] = visible[cluster.name]
            own[MARKS] = ",".join(filter(None, [environment.get(MARKS), mark]))
            own.setdefault("PYTHONUNBUFFERED", "1")  # of a Python that a shell script starts
            cluster.publish(own)
            log = log_dir / f"{cluster.name.replace(' ', '-')}.log"
            tasks.append(Task(cluster, command, own, log))
        yield Job(tasks, mark, screen or Screen(), limits, may_replace)


def _places(counts, ports):
    """The addresses by role, and a place among them."""
    tasks = addresses({role: counts.get(role, 0) for role in ROLES}, ports)
    return tasks, next(role for role in ROLES if tasks[role]), 0


def _make(directory):
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot make the directory {directory} for the tasks' output ({error.strerror}); take "
            "another run directory (--run_dir)"
        ) from error


def _command(arguments, environment):
    """What to execute: a script by this Python, with its output unbuffered."""
    program, *rest = arguments
    if program.endswith(".py"):
        if not pathlib.Path(program).is_file():
            raise FileNotFoundError(_no_script(program))
        return [sys.executable, "-u", program, *rest]
    found = shutil.which(program, path=environment.get("PATH"))
    if found is None:
        raise FileNotFoundError(
            f"there is no program {program!r} that can be executed; name a Python script (.py), a "
            "program on the PATH, or its path"
        )
    return [found, *rest]


def _no_script(program):
    path = pathlib.Path(program)
    there = [str(other) for other in path.parent.glob("*.py")]
    close = difflib.get_close_matches(str(path), there, n=1)
    hint = f"did you mean {close[0]}?" if close else "name one that exists"
    return f"there is no script {program} in {pathlib.Path.cwd()}; {hint}"
