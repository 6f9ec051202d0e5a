"""Variants that take turns: all of their processes are there, and one at a time may run.

On a machine that others use too, a minute is not like the next. Where a difference of one percent
is looked for, variants have to be compared within seconds: each trains a few steps, is stopped
(SIGSTOP, with all of its children), and the next one goes on.
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
    """A variant's process, which waits for its turn."""

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
        self._line()  # it has trained once
        self._signal(signal.SIGSTOP)

    def turn(self) -> dict:
        """Has it train, and gives its answer."""
        self._signal(signal.SIGCONT)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = json.loads(self._line())
        self._signal(signal.SIGSTOP)
        return answer

    def end(self):
        """Ends it and its children."""
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
    """A row for each variant, with a time for each turn, and the versions of the libraries.

    Raises:
        RuntimeError: a variant's process failed.
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
