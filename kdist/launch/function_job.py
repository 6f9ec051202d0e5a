"""Calls a function in each task of a job, from a notebook or a program.

    def train(epochs):
        import kdist
        strategy = kdist.create_strategy("multi_worker")
        ...
        return model.evaluate(test, return_dict=True)

    result = kdist.launch.local(train, workers=2, arguments=(3,))

Each task runs this module as a program, `python -m kdist.launch.function_job CALL DIRECTORY`. CALL
is a file with the pickled function and arguments. The task writes a file with its name to
DIRECTORY: the pickled pair (True, returned value) or (False, text of the exception).
"""

import os
import pathlib
import pickle
import secrets
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from kdist.cluster import Cluster
from kdist.exit_codes import INTERRUPTED, TIMED_OUT


class TaskFailed(RuntimeError):
    """Failure of a task of `kdist.launch.local`.

    Example:

        try:
            kdist.launch.local(train, workers=2)
        except kdist.launch.TaskFailed as failure:
            print(failure.task, failure.exit_code)

    Args:
        message: Name of the task, its exception, and its last lines of output.
        task: Name of the task, such as `"worker 1"`.
        exit_code: Exit code of the task; 128 + n if signal n ended it.
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
    """Calls a function in each task of a job on this machine, and shows the tasks' output.

    A function that is defined in a notebook or in the program itself is pickled by value, with the
    variables that it uses. Each task is a new process in which TensorFlow has not started.

    Example:

        def train():
            import kdist
            strategy = kdist.create_strategy("multi_worker")
            return strategy.num_replicas_in_sync

        replicas = kdist.launch.local(train, workers=2)

    Args:
        function: Function to call. It finds its place in the job with `kdist.Cluster.resolve()`, as
            `kdist.create_strategy` does.
        workers: Number of workers. Defaults to 2.
        ps: Number of parameter servers. If there are any, a chief is added, which coordinates.
            Defaults to 0.
        arguments: Positional arguments of the function, the same in all tasks. Defaults to none.
        chief: Whether to add a chief, which trains like a worker. Defaults to False.
        evaluator: Whether to add an evaluator. Defaults to False.
        share_gpus: Whether several workers may share one GPU. Defaults to False.
        timeout_seconds: Time limit of the job. Defaults to None, no limit.
        wait_seconds: Time that the other tasks have to end after the chief has. Defaults to 30.
        hang_seconds: Time without progress after which a task is considered hung: in a step of
            `fit` (ten times that for the first step of an epoch, and at least five times the
            longest step), and for a task's heartbeat. 0 means no limit. Defaults to 60.
        log_dir: Directory for one log file per task. Defaults to None, no log files.
        quiet: Whether to hide the tasks' output. The launcher's own messages are always shown.
            Defaults to False.

    Returns:
        The value that the function returned in the chief, or in worker 0 without one.

    Raises:
        TaskFailed: If the function raised in a task, or a task's process ended or hung.
        TimeoutError: If the job ran longer than `timeout_seconds`.
        KeyboardInterrupt: If the user interrupted the job; all tasks have ended.
        ValueError: If there is no worker, or more workers than GPUs without `share_gpus`.
    """
    from kdist.launch.local_engine import local_job
    from kdist.launch.task import Screen
    from kdist.launch.task_group import Timeouts, stop_on_signals

    if workers < 1:
        raise ValueError(f"workers={workers}; a job needs at least one")
    counts = {"chief": int(chief), "worker": workers, "ps": ps, "evaluator": int(evaluator)}
    with tempfile.TemporaryDirectory(prefix="kdist-") as directory:
        scratch = pathlib.Path(directory)
        call = scratch / "call"
        call.write_bytes(cloudpickle.dumps((function, tuple(arguments))))
        module = "kdist.launch.function_job"
        program = [sys.executable, "-u", "-P", "-m", module, str(call), directory]
        job = local_job(
            counts,
            program,
            pathlib.Path(log_dir) if log_dir else scratch / "logs",
            timeouts=Timeouts(
                wait_seconds=wait_seconds,
                timeout_seconds=timeout_seconds,
                hang_seconds=hang_seconds,
            ),
            screen=Screen(shows_tasks=not quiet),
            share_one_gpu=share_gpus,
            environment=with_module_paths(),
        )
        with job as tasks, stop_on_signals(tasks):
            tasks.run()
        _raise_failure(tasks, scratch)
        return _result(scratch, tasks.chief)[1]


def on(
    engine: str,
    function: Callable,
    workers: int = 2,
    ps: int = 0,
    arguments: Sequence = (),
    *,
    chief: bool = False,
    gpus: int = 0,
    name: str | None = None,
    max_restarts: int = 0,
    timeout_seconds: float | None = None,
    options: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> Any:
    """Calls a function in each task of a job on an engine, and shows the tasks' output.

    Example:

        replicas = kdist.launch.on("ray", train, workers=2, options={"address": "10.0.0.1:6379"})

    Args:
        engine: `"ray"`, a Ray cluster that runs already, or `"local"`, see `kdist.launch.local`.
        function: Function to call. It finds its place in the job with `kdist.Cluster.resolve()`.
        workers: Number of workers. Defaults to 2.
        ps: Number of parameter servers. If there are any, a chief is added, which coordinates.
            Defaults to 0.
        arguments: Positional arguments of the function, the same in all tasks. Defaults to none.
        chief: Whether to add a chief, which trains like a worker. Defaults to False.
        gpus: Number of GPUs per task. Defaults to 0.
        name: Name of the job. Defaults to the function's name with a random number.
        max_restarts: Number of failures after which the job starts again. Defaults to 0.
        timeout_seconds: Time limit of the job. Defaults to None, no limit.
        options: Options of the engine, such as `{"cpus": "4", "strategy": "SPREAD"}`.
        quiet: Whether to hide the tasks' output. Defaults to False.

    Returns:
        The value that the function returned in the chief, or in worker 0 without one.

    Raises:
        TaskFailed: If the function raised in a task, or a task's process ended or hung.
        TimeoutError: If the job ran longer than `timeout_seconds`.
        RuntimeError: If the cluster has no room for all tasks.
        ConnectionError: If there is no cluster at the address.
        ValueError: If the engine calls no functions, or an option is wrong.
    """
    if engine == "local":
        return local(
            function,
            workers,
            ps,
            arguments,
            chief=chief,
            timeout_seconds=timeout_seconds,
            quiet=quiet,
        )
    if engine != "ray":
        raise ValueError(f"{engine!r} calls no functions; use 'ray', 'local', or kdist launch")
    from kdist.launch.engines.base import Job, MachineType, job_name_of
    from kdist.launch.engines.ray import Ray

    letters = job_name_of(getattr(function, "__name__", ""))
    job = Job(
        name or f"call-{letters[:24]}-{secrets.token_hex(3)}".replace("--", "-"),
        (letters or "function",),
        workers,
        ps,
        chief,
        machine=MachineType(num_devices=gpus),
        max_restarts=max_restarts,
        time_limit_hours=None if timeout_seconds is None else timeout_seconds / 3600,
        options=options or {},
    )
    if problems := Ray().check(job):
        raise ValueError("; ".join(problems))
    handle = Ray().submit_call(job, cloudpickle.dumps((function, tuple(arguments))))
    try:
        code = handle.follow((lambda line: None) if quiet else print)
        failed, result = handle.result()
    finally:
        handle.remove()
    returned, value = (True, None) if result is None else pickle.loads(result)
    if failed:
        task, code = failed
        text = "" if returned else f": {value}"
        raise TaskFailed(f"{task} failed with exit code {code}{text}", task, code)
    if code == TIMED_OUT:
        raise TimeoutError("the job did not end within timeout_seconds")
    return value


def with_module_paths() -> dict[str, str]:
    """Returns this process's environment, in which a new process finds the same modules."""
    paths = [path or os.getcwd() for path in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _raise_failure(tasks, scratch):
    from kdist.launch.task_group import describe_failure

    if task := tasks.failed:
        returned, text = _result(scratch, task)
        lines = "\n    ".join(task.last_lines)
        raise TaskFailed(
            f"{describe_failure(task)}{'' if returned else f': {text}'}\n    {lines}",
            task.name,
            task.exit_code,
        )
    if tasks.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if tasks.stopped_by is not None:
        signal.raise_signal(tasks.stopped_by)  # runs the handlers of this process
        raise SystemExit(128 + tasks.stopped_by)
    if tasks.timed_out:
        lines = [
            f"{task.name}: {task.last_lines[-1] if task.last_lines else '(nothing)'}"
            for task in tasks.tasks
            if task.returncode != 0
        ]
        raise TimeoutError(
            "the job did not end within timeout_seconds; last lines of the tasks that still ran:"
            + "".join(f"\n    {line}" for line in lines)
        )


def _result(scratch, task):
    """Returns the pair that a task wrote; (True, None) if its process ended before."""
    try:
        return pickle.loads((scratch / task.name).read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return True, None


# In each task.


def main(call, directory):
    """Returns the exit code, after calling the pickled function and writing its result."""
    cluster = Cluster.resolve()
    try:
        function, arguments = pickle.loads(pathlib.Path(call).read_bytes())
        value = function(*arguments)
        # Only the chief's value is used; other tasks may return what cannot be pickled.
        returned, data = True, _dump(value if cluster.is_chief else None)
    except KeyboardInterrupt:
        return INTERRUPTED  # the launcher reports it
    except Exception as error:
        traceback.print_exc()
        returned, data = False, pickle.dumps((False, f"{type(error).__name__}: {error}"))
    path = pathlib.Path(directory) / cluster.name
    path.with_suffix(".new").write_bytes(data)
    os.replace(path.with_suffix(".new"), path)
    return 0 if returned else 1


def _dump(value):
    try:
        return cloudpickle.dumps((True, value))
    except Exception as error:
        raise TypeError(
            f"the returned value ({type(value).__name__}) cannot be sent back: {error}; return "
            "numbers, arrays, or the path of a file"
        ) from error


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
