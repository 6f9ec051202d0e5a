"""A function in each task of a job, from a notebook or a program.

def train(epochs):
    import kdist
    strategy = kdist.create_strategy("multi_worker")
    …
    return model.evaluate(test, return_dict=True)

result = kdist.launch.local(train, workers=2, arguments=(3,))
"""

import os
import pathlib
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from kdist.launch import here
from kdist.launch.job import Job, Limits, how_it_failed, stopped_by_signals
from kdist.launch.output import Screen


class TaskFailed(RuntimeError):
    """A task of `local` failed; the message names it and has its exception and its last lines.

    Attributes:
        task: its name, such as "worker 1".
        exit_code: as a shell says it: 128 + n if a signal n ended it.
    """

    def __init__(self, message: str, task: str, exit_code: int):
        super().__init__(message)
        self.task, self.exit_code = task, exit_code


def local(
    function: Callable,
    workers: int = 2,
    ps: int = 0,
    arguments: Sequence = (),
    *,
    chief: bool = False,
    evaluator: bool = False,
    share_gpus: bool = False,
    timeout_seconds: float | None = None,
    wait_seconds: float = 30.0,
    hang_seconds: float = 60.0,
    log_dir: str | os.PathLike | None = None,
    quiet: bool = False,
) -> Any:
    """Runs `function(*arguments)` in each task of a job on this machine, and shows what they print.

    The function is pickled by value if it is defined in a notebook or in the program itself, with
    what it uses of their variables. Each task is a new process, in which TensorFlow has not
    started.

    Args:
        function: finds its place in the job by `kdist.Cluster.resolve()`, as `create_strategy`
            does.
        workers: how many.
        ps: parameter servers; if there are any, a chief is added, which coordinates.
        arguments: of the function, the same in all tasks.
        chief: a chief beside the workers, which trains as they do.
        evaluator: whether there is one.
        share_gpus: whether more workers than GPUs share them.
        timeout_seconds: for the whole job; None is without end.
        wait_seconds: for the others, when the deciding task has ended.
        hang_seconds: for a step of `fit` (ten times that for an epoch's first one, and five
            times the longest in any case), and for a task's sign of life; 0 is for ever.
        log_dir: gets a file of each task's output; by default they are not kept.
        quiet: what the tasks print is not shown; what the launcher has to say is.

    Returns:
        What the function returned in the deciding task: the chief, or worker 0 without one.

    Raises:
        TaskFailed: the function raised in a task, or its process ended, or hung.
        TimeoutError: the job ran longer than `timeout_seconds`.
        KeyboardInterrupt: it was interrupted; the tasks have ended.
        ValueError: no worker, or more of them than GPUs.
    """
    if workers < 1:
        raise ValueError(f"workers={workers}; a job needs one at least")
    counts = {"chief": int(chief), "worker": workers, "ps": ps, "evaluator": int(evaluator)}
    with tempfile.TemporaryDirectory(prefix="kdist-") as directory:
        scratch = pathlib.Path(directory)
        call = scratch / "call"
        call.write_bytes(cloudpickle.dumps((function, tuple(arguments))))
        program = [sys.executable, "-u", "-m", "kdist.launch.call", str(call), directory]
        job_here = here.job(
            counts,
            program,
            pathlib.Path(log_dir) if log_dir else scratch / "logs",
            limits=Limits(
                wait_seconds=wait_seconds,
                timeout_seconds=timeout_seconds,
                hang_seconds=hang_seconds,
            ),
            screen=Screen(shows_tasks=not quiet),
            several_on_one_gpu=share_gpus,
            environment=_environment(),
        )
        with job_here as job, stopped_by_signals(job):
            job.run()
        _raise_if_it_failed(job, scratch)
        return _returned(scratch, job.deciding)[1]


def _environment():
    """This process's, with which a new one imports what this one can."""
    places = [place or os.getcwd() for place in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def _raise_if_it_failed(job: Job, scratch):
    if job.failed:
        returned, text = _returned(scratch, job.failed)
        lines = "\n    ".join(job.failed.last_lines)
        raise TaskFailed(
            f"{how_it_failed(job.failed)}{'' if returned else f': {text}'}\n    {lines}",
            job.failed.name,
            job.failed.exit_code,
        )
    if job.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if job.stopped_by is not None:
        signal.raise_signal(job.stopped_by)  # what this process does about it, it does now
        raise SystemExit(128 + job.stopped_by)
    if job.timed_out:
        raise TimeoutError(_out_of_time(job))


def _out_of_time(job):
    ends = [
        f"{task.name}: {task.last_lines[-1] if task.last_lines else '(nothing)'}"
        for task in job.tasks
        if task.returncode != 0
    ]
    return (
        "the job did not end within timeout_seconds; the last lines of the tasks that still ran:"
        + "".join(f"\n    {end}" for end in ends)
    )


def _returned(scratch, task):
    """The pair that `call` has written; one without a text if the process ended before."""
    try:
        return pickle.loads((scratch / task.name).read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return True, None
