"""Slows a process by stopping it most of the time, whatever it does.

with slowed(task, when=lambda: "warm" in log.read_text()) as brake:
    code = job.run()
print(brake.share)      # of the time that it ran, about 0.25
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

from kdist.launch.task import Task

SLOWDOWN = 4
# Well below what a step takes, so that each step has its share of the stops.
RUNNING_SECONDS = 0.005
PERIOD_SECONDS = RUNNING_SECONDS * SLOWDOWN

_SECONDS_BETWEEN_LOOKS = 0.02


class Brake:
    """A thread that stops a task and lets it go on, by SIGSTOP and SIGCONT.

    Args:
        task: that is slowed, with all its processes; it need not have started.
        when: from when on.
    """

    def __init__(self, task: Task, when: Callable[[], bool]):
        self._task, self._when = task, when
        self._over = threading.Event()
        self._running = self._total = 0.0
        self._thread = threading.Thread(target=self._work, daemon=True)

    @property
    def share(self) -> float:
        """Of the time under the brake, that in which the task could run; 1 if there was none."""
        return self._running / self._total if self._total else 1.0

    def start(self):
        """Begins to wait for `when`."""
        self._thread.start()

    def release(self):
        """Lets the task run as it likes from now on."""
        self._over.set()
        self._thread.join()

    def _work(self):
        while not self._when():
            if self._over.wait(_SECONDS_BETWEEN_LOOKS):
                return
        began = released = time.perf_counter()
        period = 0
        # By the clock, not by pauses: what one of them takes too long, the next one makes up for.
        while not self._over.is_set():
            time.sleep(max(0.0, began + period * PERIOD_SECONDS + RUNNING_SECONDS - _now()))
            self._task.signal(signal.SIGSTOP)
            self._running += _now() - released
            period = max(period, int((_now() - began) / PERIOD_SECONDS)) + 1
            time.sleep(max(0.0, began + period * PERIOD_SECONDS - _now()))
            self._task.signal(signal.SIGCONT)
            released = _now()
            self._total = released - began


@contextlib.contextmanager
def slowed(task: Task, when: Callable[[], bool]) -> Iterator[Brake]:
    """A context in which the task is slowed as soon as `when` says so."""
    brake = Brake(task, when)
    brake.start()
    try:
        yield brake
    finally:
        brake.release()


def _now():
    return time.perf_counter()
