"""Trainings in processes of their own, which are measured in turns.

    with Trial(trial_command(["--model=lenet"]), limit=8e9) as trial:
        trial.facts["replicas"]
        trial.turn(1.0).step_seconds

A trial that takes too much memory, or crashes, raises `TrialError` and ends nothing else.
"""

import dataclasses
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

import psutil
from absl import flags

from kdist import program
from kdist.commands import train  # defines the flags of the training
from kdist.commands.training_run.trial import ANSWER
from kdist.launch import child_python
from kdist.launch.watchdog import signal_group, tied_command
from kdist.serving.core.resources import default_memory_bytes
from kdist.tuning.speed import MeasurementError

FLAGS = flags.FLAGS
_POLL_SECONDS = 0.05
# Time limit of the first steps, with their compilation, and of a turn.
_MAX_WAIT_SECONDS = 600.0
# Trials that are kept, and memory that a new one may need, as a multiple of the first one's.
_MAX_TRIALS, _MARGIN = 8, 1.5
_MEMORY_ERRORS = re.compile(
    "ResourceExhaustedError|OOM when allocating|[Oo]ut of memory|Cannot allocate|MemoryError"
    "|CUDA_ERROR_OUT_OF_MEMORY"
)


class TrialError(MeasurementError):
    """A trial ended before it answered.

    Attributes:
        lacked: "memory" or "time" if it needed too much of it, otherwise "".
        peak_bytes: memory of the process before it ended.
    """

    def __init__(self, reason, lacked, peak_bytes):
        super().__init__(reason)
        self.lacked, self.peak_bytes = lacked, peak_bytes


@dataclasses.dataclass(frozen=True)
class Turn:
    """Measurement of some steps."""

    seconds: float
    steps: int
    memory_bytes: float  # of one GPU, or of the process on CPUs

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return self.seconds / self.steps


class Trial:
    """Process that trains when it has a turn, and waits in between.

    Args:
        command: command line of the process, such as `trial_command`.
        limit: memory in bytes above which it is ended; infinite for GPUs, whose memory ends it.
        max_wait_seconds: time for the first steps, and for a turn. Defaults to ten minutes.

    Attributes:
        facts: number of replicas and training examples; whether batches are gathered from memory.
        memory_bytes: memory of one GPU, or of the process on CPUs, in the last turn.

    Raises:
        TrialError: The process ended before its first steps were done.
    """

    def __init__(
        self, command: list[str], limit: float, max_wait_seconds: float = _MAX_WAIT_SECONDS
    ):
        self._limit, self._peak, self._buffer = limit, 0, b""
        self._max_wait_seconds = max_wait_seconds
        self.memory_bytes = 0.0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the trial)
        self._process = subprocess.Popen(
            tied_command(command),  # it may hang when the search is killed
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # a process group, which ends as a whole
        )
        self._input = self._process.stdin.fileno()  # type: ignore[union-attr]
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def turn(self, seconds: float) -> Turn:
        """Trains for about some seconds, at least three steps.

        Raises:
            TrialError: The process ended, or took too much memory.
        """
        try:
            os.write(self._input, f"{seconds}\n".encode())
        except OSError:
            self._fail_as_it_ended()
        found = self._answer()
        self.memory_bytes = found["gpu_bytes"] or self._peak
        return Turn(found["seconds"], found["steps"], self.memory_bytes)

    def close(self):
        """Ends the process, and those that it has started."""
        signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            try:
                file.close()
            except OSError:  # bytes that the process did not read
                continue

    def _answer(self):
        """Returns the next answer. Ends the process before it takes the memory of the machine.

        The kernel might otherwise end another process.
        """
        deadline = time.monotonic() + self._max_wait_seconds
        output = self._process.stdout.fileno()
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if line.startswith(ANSWER.encode()):
                    return json.loads(line.removeprefix(ANSWER.encode()))
                continue
            self._check_memory()
            if time.monotonic() > deadline:
                seconds = f"{self._max_wait_seconds:g} seconds"
                self._fail(f"{seconds} were not enough for a few steps", "time")
            if select.select([output], [], [], _POLL_SECONDS)[0]:
                received = os.read(output, 1 << 16)
                if not received:
                    self._fail_as_it_ended()
                self._buffer += received
            elif self._process.poll() is not None:  # a process that it started has the output open
                self._fail_as_it_ended()

    def _check_memory(self):
        try:
            self._peak = max(self._peak, psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:  # it has just ended
            return
        if self._peak > self._limit:
            self._fail("more memory than allowed", "memory")

    def _fail_as_it_ended(self):
        code = self._process.wait()
        self._errors.seek(0)
        error = self._errors.read().decode(errors="replace")
        if is_out_of_memory(code, error):
            self._fail("out of memory", "memory")
        lines = error.strip().splitlines()
        reason = lines[-1].removeprefix("trial.py: ") if lines else f"it ended with code {code}"
        self._fail(f"killed by signal {-code}" if code < 0 else reason)

    def _fail(self, reason, lacked=""):
        raise TrialError(reason, lacked, self._peak)


class TrialPool:
    """Trials that are kept, so that a setting starts once and is measured many times.

    The first trial stays to the end. Others are ended when memory is short, the one without a turn
    for longest first, and start again when they are measured again.

    Args:
        limit: memory in bytes that all of them may use: of one GPU, or of the processes on CPUs.
        on_gpus: whether the memory is that of GPUs.

    Attributes:
        max_wait_seconds: time for the first steps of trials that start, and for their turns.
    """

    def __init__(self, limit: float, on_gpus: bool):
        self._limit, self._on_gpus = limit, on_gpus
        self.max_wait_seconds = _MAX_WAIT_SECONDS
        self._trials: dict[tuple[str, ...], Trial] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        while self._trials:
            self._trials.popitem()[1].close()

    def turn(self, arguments: tuple[str, ...], seconds: float) -> tuple[Turn, dict]:
        """Returns a measurement of a training, and the facts of its trial.

        Args:
            arguments: flags of `kdist train`.
            seconds: duration of the measurement.

        Raises:
            TrialError: The training failed. It does not affect the others.
        """
        trial = self._trials.get(arguments) or self._started(arguments)
        try:
            turn = trial.turn(seconds)
        except TrialError:
            self._trials.pop(arguments).close()
            raise
        is_first = next(iter(self._trials)) == arguments
        if not is_first:  # moves it to the end
            self._trials[arguments] = self._trials.pop(arguments)
        return turn, trial.facts

    def _started(self, arguments):
        while self._expects_more_than_the_limit() and self._end_oldest():
            pass
        while True:
            used = sum(trial.memory_bytes for trial in self._trials.values())
            limit = math.inf if self._on_gpus else self._limit - used
            try:
                command = trial_command(list(arguments))
                self._trials[arguments] = Trial(command, limit, self.max_wait_seconds)
                return self._trials[arguments]
            except TrialError as error:
                if error.lacked != "memory" or not self._end_oldest():
                    raise

    def _expects_more_than_the_limit(self):
        sizes = [trial.memory_bytes for trial in self._trials.values()]
        if not sizes:
            return False
        return len(sizes) >= _MAX_TRIALS or sum(sizes) + _MARGIN * sizes[0] > self._limit

    def _end_oldest(self):
        """Ends the trial without a turn for longest, but not the first; returns if there is one."""
        if len(self._trials) < 2:
            return False
        oldest = list(self._trials)[1]
        self._trials.pop(oldest).close()
        return True


def trial_command(arguments: list[str]) -> list[str]:
    """Returns the command line of a trial with some flags of `kdist train`."""
    return [
        sys.executable,
        *child_python.options(),
        "-m",
        "kdist.commands.training_run.trial",
        *arguments,
    ]


def is_out_of_memory(code: int, error: str) -> bool:
    """Returns whether a process ended for lack of memory, given its exit code and its messages."""
    return code == -9 or _MEMORY_ERRORS.search(error) is not None


def given_flags(*except_for: str) -> list[str]:
    """Returns the flags of `kdist train` on the command line, as arguments."""
    return [
        flag.serialize()
        for name, flag in program.own_flags(train.__name__).items()
        if flag.present and name not in except_for
    ]


def memory_limits() -> tuple[float, float]:
    """Returns (bytes that a training may use, bytes above which its process is ended).

    The first is the memory of one GPU if there are GPUs. Then the second is infinite.
    """
    gpu_bytes = _gpu_bytes()
    limit = 1e9 * FLAGS.memory_gb if FLAGS.memory_gb else gpu_bytes or _free_bytes()
    print(f"at most {limit / 1e9:.1f} GB {'per GPU' if gpu_bytes else 'in all'}", flush=True)
    return limit, math.inf if gpu_bytes else limit


def _gpu_bytes():
    """Returns the memory of the smallest GPU; None without GPUs."""
    from kdist.telemetry.devices.nvml import NvmlSampler

    sampler = NvmlSampler()
    totals = [record.get("memory_total_bytes") for record in sampler.sample()]
    sampler.close()
    return min((total for total in totals if total), default=None)


def _free_bytes():
    return min(default_memory_bytes(), 0.9 * psutil.virtual_memory().available)
