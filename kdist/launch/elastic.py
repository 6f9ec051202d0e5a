"""Number of workers of a job that continues with fewer if some do not come back.

    places = Places(limits, screen.announce, "nvidia-smi -i $CUDA_VISIBLE_DEVICES", gpus)
    chosen = places.choose()                    # waits for places that have failed
    with places.watch(tasks):                   # restarts the job when a place works again
        code = tasks.run()

A place is where one worker can run: a share of the GPUs of this machine, or a node of a Ray
cluster. The tasks read the planned number of workers from their `Cluster`, and
`kdist.strategies.elastic_batch` keeps the global batch.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kdist.hardware import VISIBLE_DEVICES
from kdist.launch.task_group import TaskGroup
from kdist.launch.watchdog import signal_group

# Seconds between two checks of places, and the limit of one check.
_CHECK_INTERVAL_SECONDS, _MAX_CHECK_SECONDS = 3.0, 30.0
# Environment variable with the number of the place that a check is for, from 0.
_PLACE = "KDIST_PLACE"


@dataclasses.dataclass(frozen=True)
class WorkerLimits:
    """Limits of a job that may run with fewer workers than planned.

    Args:
        workers: Planned number of workers.
        min_workers: Smallest number of workers with which the job runs.
        wait_minutes: Time to wait for workers that are missing.

    Raises:
        ValueError: If `min_workers` is not from 1 to `workers`, or `wait_minutes` is negative.
    """

    workers: int
    min_workers: int
    wait_minutes: float

    def __post_init__(self):
        if not 1 <= self.min_workers <= self.workers:
            raise ValueError(
                f"--min_workers={self.min_workers}: use a number from 1 to --workers={self.workers}"
            )
        if self.wait_minutes < 0:
            raise ValueError(f"--wait_minutes={self.wait_minutes:g}: use a number from 0")

    @property
    def wait_seconds(self) -> float:
        """Seconds to wait for workers that are missing."""
        return 60 * self.wait_minutes

    def after_waiting(self, number: int) -> str:
        """Returns what happens to a job whose workers are only this number after the wait."""
        if number < self.min_workers:
            return f"the job ends, as it needs {self.min_workers} (--min_workers)"
        return f"the job continues with {self.share(number)}"

    def share(self, number: int) -> str:
        """Returns a number of workers in words, such as "3 of 4 workers"."""
        return f"{number} of {self.workers} workers"

    def attempts(
        self, last: int, wait_seconds: float, short_seconds: float
    ) -> list[tuple[int, float]]:
        """Returns the numbers of workers to find room for, in order, with the seconds to wait.

        The number of the last attempt has the full time; more and fewer workers are tried shortly.

        >>> WorkerLimits(4, 2, 10).attempts(3, 600, 5)
        [(4, 5), (3, 600), (2, 5)]
        """
        return [
            (number, wait_seconds if number == last else short_seconds)
            for number in range(self.workers, self.min_workers - 1, -1)
        ]


class Places:
    """Places for the workers of a job on this machine, each with a check of whether it works.

    Args:
        limits: The limits of the job.
        announce: Function of a message to the user.
        check: Shell command that exits with 0 if a place works. Its variables are KDIST_PLACE, and
            CUDA_VISIBLE_DEVICES if the place has GPUs. Defaults to `None`: all places work.
        gpus: GPUs of each place, as in CUDA_VISIBLE_DEVICES. Defaults to none.
    """

    def __init__(
        self,
        limits: WorkerLimits,
        announce: Callable[[str], None],
        check: str | None = None,
        gpus: Sequence[str] = (),
    ):
        self._limits, self._announce, self._check = limits, announce, check
        self._gpus = list(gpus) or [""] * limits.workers
        self._given_up: set[int] = set()  # places without which the job runs

    def variables(self, places: Iterable[int]) -> dict[str, str]:
        """Returns the environment variable with the GPUs of some places; empty without GPUs."""
        gpus = ",".join(self._gpus[place] for place in places)
        return {VISIBLE_DEVICES: gpus} if gpus.strip(",") else {}

    def choose(self, limit_seconds: float | None = None) -> list[int]:
        """Returns the places that work, or an empty list if they are too few.

        It waits for places that worked before, at most for the time of the limits, or for
        `limit_seconds`.
        """
        wait = self._limits.wait_seconds
        deadline = time.monotonic() + min(wait, wait if limit_seconds is None else limit_seconds)
        reported: Mapping[int, str] = {}
        while True:
            failed = self._failed(range(self._limits.workers))
            found = [place for place in range(self._limits.workers) if place not in failed]
            is_awaited = failed.keys() - self._given_up or len(found) < self._limits.min_workers
            seconds = deadline - time.monotonic()
            if not is_awaited or seconds <= 0:
                break
            if failed.keys() != reported.keys():
                self._announce(
                    f"waiting for {_listed(failed)} for up to {_duration(seconds)}; then "
                    f"{self._limits.after_waiting(len(found))}"
                )
                reported = failed
            time.sleep(min(_CHECK_INTERVAL_SECONDS, seconds))
        self._given_up = set(failed)
        if failed:
            outcome = self._limits.after_waiting(len(found))
            self._announce(f"{_listed(failed)} did not come back; {outcome}")
        return found if len(found) >= self._limits.min_workers else []

    @contextlib.contextmanager
    def watch(self, tasks: TaskGroup) -> Iterator[None]:
        """Yields while a thread restarts the job as soon as a place works that is not in use."""
        over = threading.Event()
        if self._given_up:
            threading.Thread(target=self._watch, args=[tasks, over], daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, tasks, over):
        while not over.wait(_CHECK_INTERVAL_SECONDS):
            back = self._given_up - self._failed(self._given_up).keys()
            if back and not over.is_set():
                number = self._limits.workers - len(self._given_up - back)
                self._announce(
                    f"back: {_listed(dict.fromkeys(back, ''))}; the tasks save a checkpoint, and "
                    f"the job restarts with {self._limits.share(number)}"
                )
                self._given_up -= back
                tasks.restart()
                return

    def _failed(self, places: Iterable[int]) -> dict[int, str]:
        """Returns those of some places that do not work, and why."""
        places = sorted(places)
        if self._check is None:
            return {}
        with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
            problems = zip(places, pool.map(self._problem, places), strict=True)
            return {place: problem for place, problem in problems if problem}

    def _problem(self, place):
        """Returns why a place does not work, or an empty text."""
        process = subprocess.Popen(
            ["sh", "-c", self._check],
            env={**os.environ, **self.variables([place]), _PLACE: str(place)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=_MAX_CHECK_SECONDS)
        except subprocess.TimeoutExpired:
            signal_group(process.pid, signal.SIGKILL)
            process.communicate()
            return f"its check took longer than {_MAX_CHECK_SECONDS:g} s"
        if process.returncode == 0:
            return ""
        lines = output.strip().splitlines()
        reason = f": {lines[-1]}" if lines else ""
        return f"its check exits with {process.returncode}{reason}"


def _listed(places):
    """Returns places and what is wrong with them, such as "place 2 (its check exits with 1)"."""
    return " and ".join(
        f"place {place}" + (f" ({problem})" if problem else "")
        for place, problem in sorted(places.items())
    )


def _duration(seconds):
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.0f} s"
