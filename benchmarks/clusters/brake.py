"""Slows a process by stopping it most of the time.

with slowed(task, when=lambda: "warm" in log.read_text()) as brake:
    code = job.run()
print(brake.share)      # fraction of the time that it ran, about 0.25
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

from kdist.launch.task import Task

SLOWDOWN = 4
# Well below the duration of a step, so that every step is slowed.
RUNNING_SECONDS = 0.005
PERIOD_SECONDS = RUNNING_SECONDS * SLOWDOWN

_SECONDS_BETWEEN_LOOKS = 0.02


class Brake:
    """Thread that stops and continues a task with SIGSTOP and SIGCONT.

    Args:
        task: the task to slow, with all its processes; it need not have started.
        when: returns whether to begin.
    """

    def __init__(self, task: Task, when: Callable[[], bool]):
        self._task, self._when = task, when
        self._over = threading.Event()
        self._running = self._total = 0.0
        self._thread = threading.Thread(target=self._work, daemon=True)

    @property
    def share(self) -> float:
        """Returns the fraction of the braked time in which the task ran; 1 if there was none."""
        return self._running / self._total if self._total else 1.0

    def start(self):
        """Starts waiting for `when`."""
        self._thread.start()

    def release(self):
        """Lets the task run freely from now on."""
        self._over.set()
        self._thread.join()

    def _work(self):
        while not self._when():
            if self._over.wait(_SECONDS_BETWEEN_LOOKS):
                return
        began = released = time.perf_counter()
        period = 0
        # Follows the clock, so that a pause that was too long is compensated by the next one.
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
    """Returns a context in which the task is slowed as soon as `when` returns True."""
    brake = Brake(task, when)
    brake.start()
    try:
        yield brake
    finally:
        brake.release()


def _now():
    return time.perf_counter()
