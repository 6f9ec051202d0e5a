"""Runs programs in processes of their own, because `kdist.patch_keras()` cannot be undone."""

import contextlib
import os
import pathlib
import pickle
import time

import numpy as np

from kdist.cluster import Cluster
from kdist.launch.local_engine import loopback_addresses, reserve_ports
from tests import forked
from tests.programs.modes import MODES, write

CODE = "import sys; from tests.programs.modes import serve; serve(*sys.argv[1:3], sys.argv[3:])"
RIGHT = "right"


@contextlib.contextmanager
def job(mode, results, names):
    """Starts the processes of a mode; yields them, and kills them in the end."""
    tasks = MODES[mode].tasks
    with contextlib.ExitStack() as stack:
        clusters = [None]
        if tasks:
            ports = stack.enter_context(reserve_ports(sum(tasks.values())))
            addresses = loopback_addresses(tasks, ports)
            clusters = [
                Cluster(addresses, role, n)
                for role in addresses
                for n in range(len(addresses[role]))
            ]
        processes = []
        for cluster in clusters:
            environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
            if cluster:
                cluster.publish(environment)
            log = pathlib.Path(results).with_name(f"{mode}-{cluster.name if cluster else 0}.log")
            arguments = [mode, results, *names]
            start = (forked._run_code, CODE, arguments, environment, log, log)
            processes.append(stack.enter_context(forked._process(*start)))
        yield processes


def read(path):
    """Returns (result, seconds) of a program, or None if it has not ended."""
    return pickle.loads(path.read_bytes()) if path.exists() else None


def run_all(mode, names, directory, limit_seconds=240.0):
    """Runs programs one after the other in one job, which is started again after a hang.

    Args:
        mode: a key of `MODES`.
        names: names of programs.
        directory: keeps results and logs; programs with a result there are not run again.
        limit_seconds: time limit of one program.

    Returns:
        {name: (what `outcome` returned or the text of an error, seconds)}.
    """
    results = pathlib.Path(directory, mode)
    results.mkdir(parents=True, exist_ok=True)
    while left := [name for name in names if not (results / name).exists()]:
        problem = _run_job(mode, results, left, limit_seconds)
        if problem:
            culprit = next(name for name in left if not (results / name).exists())
            write(results / culprit, (problem, limit_seconds))
    return {name: read(results / name) for name in names}


def _run_job(mode, results, names, limit_seconds):
    """Runs one job; returns what ended it before all programs had run, or an empty text."""
    with job(mode, results, names) as processes:
        missing, since = len(names), time.monotonic()
        while missing:
            time.sleep(0.1)
            codes = [process.exitcode for process in processes]
            now = sum(not (results / name).exists() for name in names)
            if now < missing:
                missing, since = now, time.monotonic()
            elif MODES[mode].tasks and codes[0] == 0:
                return ""  # a program failed, and the others need a new job
            elif any(codes) or None not in codes:
                return f"Crash: exit codes {codes}"
            elif time.monotonic() - since > limit_seconds + 60 * (missing == len(names)):
                return f"Hang: no result after {limit_seconds:g} s"
    return ""


class Runner:
    """Process that runs programs in one mode, as their names are sent to it.

    Args:
        mode: a key of `MODES`.
        directory: keeps results, by mode and name.
    """

    def __init__(self, mode, directory):
        self._mode, self._results = mode, pathlib.Path(directory, mode)
        self._results.mkdir(parents=True, exist_ok=True)
        self._stack = contextlib.ExitStack()
        self._names = self._process = None

    def start(self, name):
        """Sends a program to the process, unless its result is known."""
        if (self._results / name).exists():
            return
        if self._names is None:
            pipe = self._results.with_name(f"{self._mode}-{os.getpid()}-{time.monotonic_ns()}")
            os.mkfifo(pipe)
            processes = self._stack.enter_context(job(self._mode, self._results, [f"@{pipe}"]))
            self._process = processes[0]
            # Opened for both, because a writer alone waits for the reader.
            both_ways = os.open(pipe, os.O_RDWR)
            self._names = self._stack.enter_context(os.fdopen(both_ways, "w"))
        self._names.write(f"{name}\n")
        self._names.flush()

    def result(self, name, limit_seconds=240.0):
        """Waits for a program; returns what `outcome` returned, or the text of an error."""
        end = time.monotonic() + limit_seconds
        while (found := read(self._results / name)) is None:
            if time.monotonic() > end or self._process.exitcode is not None:
                problem = f"Hang or crash: exit code {self._process.exitcode}"
                self.close()
                return problem
            time.sleep(0.02)
        return found[0]

    def close(self):
        """Kills the process; the next program starts another."""
        self._stack.close()
        self._names = self._process = None


def verdict(found, expected, atol):
    """Compares the results of a program with those of one device.

    Returns:
        "right", "wrong by …", or the text of an error.
    """
    if isinstance(found, str):
        return found
    if found.keys() != expected.keys():
        return f"wrong: results {sorted(found.keys() ^ expected.keys())}"
    worst, where = 0.0, ""
    for name, value in expected.items():
        if found[name].shape != value.shape:
            return f"wrong: {name} has shape {found[name].shape} instead of {value.shape}"
        difference = np.abs(found[name].astype(float) - value.astype(float))
        difference = np.nan_to_num(difference / np.maximum(1.0, np.abs(value)), nan=np.inf)
        largest = float(np.max(difference, initial=0.0))
        if largest > worst:
            worst, where = largest, name
    return RIGHT if worst <= atol else f"wrong by {worst:.2g} ({where})"


def kind(text):
    """Returns the first word of a verdict: right, wrong, or the class of an error."""
    return text.split(" ")[0].rstrip(":")


def finite(found):
    """Returns True if a program ended and all its results are finite."""
    return not isinstance(found, str) and all(np.isfinite(v).all() for v in found.values())
