"""Processes that are forked from one that has imported TensorFlow, Keras, and kdist.

Importing them takes seconds of CPU in each process, more than most tests compute. The functions
here replace those of `kdist.testing`, and `subprocess.run` of a program:

    result = python("print(40 + 2)")
    results = python_tasks(code, {"worker": 2})
    process = run_program("scripts/train.py", "--help")     # .returncode, .stdout, .stderr
    with launched("--workers=2", "--", "train.py", output=path) as process: ...

Imports are those of the process that is forked, so tests of what is imported, of variables that
TensorFlow reads while it is imported (`TF_ENABLE_ONEDNN_OPTS`), and of another Keras backend need
new processes.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types

import pytest

from kdist.cluster import Cluster
from kdist.launch.local_engine import loopback_addresses, reserve_ports
from kdist.testing import read_results, wait_for_exit

_ROOT = pathlib.Path(__file__).parents[1]
_PR_SET_PDEATHSIG = 1  # Linux, linux/prctl.h
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.forked_imports"])


def python(code, arguments=(), environment=None, timeout_seconds=300.0):
    """Runs `code`; returns the JSON value in its last line of output."""
    process = _finish(_run_code, code, arguments, environment, timeout_seconds)
    assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    return json.loads(process.stdout.strip().splitlines()[-1])


def run_program(path, *arguments, environment=None, timeout_seconds=300.0):
    """Runs a Python program; returns a `subprocess.CompletedProcess` with its text."""
    return _finish(_run_path, path, arguments, environment, timeout_seconds)


def python_tasks(code, tasks, arguments=(), timeout_seconds=300.0):
    """Runs `code` in one process for each task of a job on loopback.

    Returns the JSON value in the last line of each task, in the order of `tasks`.
    """
    deadline = time.monotonic() + timeout_seconds
    with (
        reserve_ports(sum(tasks.values())) as ports,
        tempfile.TemporaryDirectory() as directory,
        contextlib.ExitStack() as stack,
    ):
        job = loopback_addresses(tasks, ports)
        processes = []
        for cluster in (Cluster(job, role, n) for role in job for n in range(len(job[role]))):
            environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
            cluster.publish(environment)
            output = pathlib.Path(directory, cluster.name)
            start = (_run_code, code, arguments, environment, output, output)
            processes.append((stack.enter_context(_process(*start)), output))
        wait_for_exit(lambda: [process.exitcode for process, _ in processes], deadline)
        return read_results([(output, process.exitcode) for process, output in processes])


def running(code, arguments=(), *, output):
    """Returns a context manager with a process that runs `code`, and is killed at its end.

    The output goes to a file.
    """
    return _process(_run_code, code, arguments, {**os.environ}, output, output)


def launched(*arguments, output):
    """Returns a context manager with a process of `kdist launch` whose tasks are forked from it.

    The output goes to a file. The process and its tasks are killed at the end of the context.
    """
    return _process(_run_launcher, None, arguments, {**os.environ}, output, output)


def _finish(function, what, arguments, environment, timeout_seconds):
    environment = {**os.environ, **(environment or {})}
    with tempfile.TemporaryDirectory() as directory:
        files = [pathlib.Path(directory, name) for name in ("stdout", "stderr")]
        with _process(function, what, arguments, environment, *files) as process:
            process.join(timeout_seconds)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(str(what)[:200], timeout_seconds)
            code = process.exitcode
        return subprocess.CompletedProcess(what, code, *(file.read_text() for file in files))


@contextlib.contextmanager
def _process(function, what, arguments, environment, output, errors):
    """Starts a process, and kills it at the end of the context."""
    arguments = [str(argument) for argument in arguments]
    _ensure_server()
    process = _context.Process(
        target=_start, args=(function, what, arguments, environment, output, errors)
    )
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@functools.cache
def _ensure_server():
    """Starts the process that is forked. It finds this package in any working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(_ROOT), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()


# In the new process.


def _start(function, what, arguments, environment, output, errors):
    os.environ.clear()
    os.environ.update(environment)
    for file, descriptor in ((output, 1), (errors, 2)):
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(number, descriptor)
        os.close(number)
    try:
        function(what, arguments)
    finally:
        # As the interpreter ends; processes of `multiprocessing` leave out the second.
        threading._shutdown()
        atexit._run_exitfuncs()


def _run_code(code, arguments):
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


def _run_path(path, arguments):
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(pathlib.Path(path).parent))
    runpy.run_path(str(path), run_name="__main__")


def _run_launcher(_, arguments):
    from kdist.commands import launch
    from kdist.launch import task

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT")}
    task.subprocess = types.SimpleNamespace(Popen=_ForkedTask, **names)
    sys.argv = ["launch", *arguments]
    launch.run()


class _ForkedTask:
    """Replaces `subprocess.Popen` of a launcher's task, which is a Python program."""

    def __init__(self, command, env, **_):
        arguments = command[command.index("-u") + 1 :]  # after the interpreter and its options
        reader, writer = os.pipe()
        self.pid, self.returncode = os.fork(), None
        if not self.pid:
            os._exit(_run_task(arguments, env, writer))
        os.close(writer)
        self.stdout = open(reader, "rb", buffering=0)  # noqa: SIM115 (the launcher closes it)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _run_task(arguments, environment, output):
    """Returns the exit code of a task, which dies with its launcher."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    try:
        _run_path(arguments[0], arguments[1:])
        return 0
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
