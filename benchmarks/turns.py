"""Processes of several variants that run in turns.

On a shared machine, speed changes from minute to minute. To find a difference of one percent,
variants have to be compared within seconds. Each variant trains a few steps and is then stopped
(SIGSTOP, with all of its children), while the next one continues.
"""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping

import psutil

from benchmarks.measuring import ROOT, Variant
from benchmarks.rivals.workload import Workload
from benchmarks.tables import Row


class Runner:
    """Process of one variant, which waits for its turn."""

    def __init__(self, variant: Variant, workload: Workload):
        given = json.dumps(dataclasses.asdict(variant.of(workload)))
        self._name = variant.name
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.rivals.{variant.module}", given],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._line()  # the first training is finished
        self._signal(signal.SIGSTOP)

    def turn(self) -> dict:
        """Lets the process train, and returns its answer."""
        self._signal(signal.SIGCONT)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = json.loads(self._line())
        self._signal(signal.SIGSTOP)
        return answer

    def end(self):
        """Ends the process and its children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in reversed(self._family()):
                process.kill()
        self._process.wait()

    def _line(self):
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended with code {self._process.wait()}")
        return line

    def _family(self):
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def _signal(self, number):
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def measure(
    variants: Mapping[str, Variant],
    workload: Workload,
    turns: int,
    on_turn: Callable[[int], None] = lambda number: None,
) -> tuple[list[Row], dict[str, str]]:
    """Returns a row per variant with one time per turn, and the versions of the libraries.

    Raises:
        RuntimeError: the process of a variant failed.
    """
    workload = dataclasses.replace(workload, turns=turns)
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as ends:
        runners = {}
        for name, variant in variants.items():
            runners[name] = Runner(variant, workload)
            ends.callback(runners[name].end)
        for number in range(turns):
            on_turn(number)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                answer = runners[name].turn()
                times[name].append(answer["ms_per_step"])
    rows = [
        Row(variant.rival, variant.name, variant.of(workload).steps_per_call, times[name])
        for name, variant in variants.items()
    ]
    return rows, answer["versions"]
