"""The tasks of a job begin and end together.

    job = Job(tasks, mark, Screen())
    with stopped_by_signals(job):
        code = job.run()

One thread does it all: it waits for output, shows it, looks which tasks have ended, and decides.
"""

import contextlib
import dataclasses
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kdist.launch.orphans import Watchdog, processes_of, signal_processes
from kdist.launch.output import Screen
from kdist.launch.supervision import Supervision, state
from kdist.launch.task import Task

TIMED_OUT = 124  # as timeout(1) exits

_POLL_SECONDS = 0.1
# What only serves has nothing to finish when the others have.
_SERVING_SECONDS = 3.0
# After SIGKILL; a process that hangs in the kernel is left to it.
_KILL_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long a job waits for what.

    Attributes:
        end_seconds: between the signal that asks a task to end and the one that kills it.
        wait_seconds: for the others to end by themselves, when the deciding task has.
        timeout_seconds: for all of it; None is without end.
        hang_seconds: for a step of kdist's `fit`, and for a task's sign of life; 0 is for ever.
    """

    end_seconds: float = 5.0
    wait_seconds: float = 30.0
    timeout_seconds: float | None = None
    hang_seconds: float = 60.0


class Job:
    """Runs tasks until the deciding one has ended well, one has failed, or somebody stops them.

    The deciding task is the chief, or worker 0 where there is none.

    Args:
        tasks: not started yet.
        mark: in the environment of the tasks, by which their children are found (`orphans`).
        screen: shows what they write.
        limits: how long it waits for what.
        may_replace: asked by name whether a task that failed is started again while the others go
            on; only workers of parameter servers can be.

    Attributes:
        failed: the task that ended the job; None if none has.
        stopped_by: the signal that did.
        timed_out: whether it ran out of time.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        mark: str,
        screen: Screen,
        limits: Limits | None = None,
        may_replace: Callable[[str], bool] = lambda name: False,
    ):
        self.tasks, self._mark, self._screen = list(tasks), mark, screen
        self._limits = limits or Limits()
        self._may_replace = may_replace
        self.failed: Task | None = None
        self.stopped_by: int | None = None
        self.timed_out = False
        self._supervision = Supervision(self.tasks, self._limits.hang_seconds)
        self._started: list[Task] = []
        self._not_replaced: Task | None = None
        self._readable = selectors.DefaultSelector()
        self._is_ending = self._kill_now = False
        self._began = time.monotonic()
        self._decided: float | None = None

    @property
    def deciding(self) -> Task:
        """The task whose end is the job's."""
        return next(task for task in self.tasks if task.cluster.is_chief)

    def run(self) -> int:
        """Starts the tasks and returns when none of them, nor of their children, is left.

        Returns:
            0; the exit code of the task that failed, 128 + n if a signal n ended it; 124 after the
            timeout; or 128 + n for the signal n that `stop` was told.
        """
        self._began = time.monotonic()
        with Watchdog(self._mark) as watchdog:
            try:
                for task in self.tasks:
                    if self.stopped_by is None:
                        self._start(task, watchdog)
                        self._started.append(task)
                while not self._is_over():
                    self._tend(_POLL_SECONDS)
                    for line in self._supervision.news():
                        self._screen.say(line)
                    self._replace(watchdog)
                self._is_ending = True
                self._say_why()
                self._end()
            finally:
                self._kill()
        return self._exit_code()

    def stop(self, number: int):
        """Ends the job as this signal asks; said again, or while it ends, it kills at once.

        It may be called from a signal handler.
        """
        self._kill_now = self._is_ending or self.stopped_by is not None
        if not self._is_ending and self.stopped_by is None:
            self.stopped_by = number

    # While it runs.

    def _start(self, task, watchdog):
        task.start()
        watchdog.guard(task.pid)
        self._readable.register(task.output, selectors.EVENT_READ, task)

    def _replace(self, watchdog):
        """Starts workers again that served and are gone, if that is allowed."""
        hung, why = self._supervision.hung() or (None, "")
        for task in filter(self._is_replaceable, self._started):
            if task is hung:
                task.hung = why
                task.signal(signal.SIGKILL)
            if not task.returncode:
                continue
            self._screen.say(how_it_failed(task))
            if not self._may_replace(task.name):
                self._not_replaced = task
            else:
                self._close(task)
                self._start(task, watchdog)

    def _tend(self, seconds):
        """Shows what comes within `seconds`, and looks who has ended."""
        for key, _ in self._readable.select(seconds):
            self._show(key.data)
        for task in self._started:
            task.has_ended()
            task.listen()

    def _show(self, task):
        lines, more = task.read()
        for line in lines:
            self._screen.show(task.name, line)
        if not more:
            self._readable.unregister(task.output)
            task.close_output()

    def _is_over(self):
        running = [task for task in self._started if not task.has_ended()]
        self.failed = self._first_failed() or self._first_hung()
        limit = self._limits.timeout_seconds
        self.timed_out = bool(running) and limit is not None and self._age() > limit
        return (
            self.stopped_by is not None
            or self.failed is not None
            or self.timed_out
            or not running
            or self._has_waited_enough(running)
        )

    def _first_failed(self):
        """Of several that failed since it was looked last, one that was killed is the cause."""
        failed = [task for task in self._started if task.returncode and not self._may_fail(task)]
        return min(failed, key=lambda task: task.returncode > 0, default=None)

    def _first_hung(self):
        found = self._supervision.hung()
        if found is None or self.stopped_by is not None or self._is_replaceable(found[0]):
            return None
        task, task.hung = found
        return task

    def _may_fail(self, task):
        """What only serves loses its coordinator when that has ended well, and may say so."""
        ended_well = task.only_serves and self.deciding.returncode == 0
        return ended_well or self._is_replaceable(task)

    def _is_replaceable(self, task):
        """Whether others can go on without the task, until one in its place comes."""
        serves_a_coordinator = task.only_serves and task.cluster.role == "worker"
        return (
            serves_a_coordinator
            and task.beat is not None  # before, the tasks are meeting
            and self._not_replaced is not task
            and self.stopped_by is None
            and self.deciding.returncode is None
        )

    def _has_waited_enough(self, running):
        if self.deciding.returncode != 0:
            return False
        self._decided = self._decided or time.monotonic()
        limit = self._limits.wait_seconds
        if all(task.only_serves for task in running):
            limit = min(limit, _SERVING_SECONDS)
        return time.monotonic() - self._decided > limit

    def _age(self):
        return time.monotonic() - self._began

    # How it ends.

    def _end(self):
        """Asks all that still runs to end, and gives it time to."""
        asked = signal.SIGINT if self.stopped_by == signal.SIGINT else signal.SIGTERM
        for task in self._started:
            task.signal(signal.SIGABRT if task.hung else asked)  # Python shows where it was
        # Twice would be to those that have it by their group as Ctrl-C twice.
        groups = [task.pid for task in self._started if not task.has_ended()]
        signal_processes(self._mark, asked, but_groups=groups)
        deadline = time.monotonic() + self._limits.end_seconds
        while not self._kill_now and time.monotonic() < deadline and self._something_runs():
            self._tend(_POLL_SECONDS)

    def _something_runs(self):
        running = [task for task in self._started if not task.has_ended()]
        return bool(running) or bool(processes_of(self._mark))

    def _kill(self):
        """Kills what is left, and takes what it has written."""
        self._is_ending = True
        deadline = time.monotonic() + _KILL_SECONDS
        while self._something_runs() and time.monotonic() < deadline:
            for task in self._started:
                task.signal(signal.SIGKILL)
            signal_processes(self._mark, signal.SIGKILL)
            self._tend(_POLL_SECONDS / 10)
        for task in self._started:
            self._close(task)
        self._readable.close()

    def _close(self, task):
        """Shows what the task had to say yet, and hears no more of it."""
        if self._hears(task):
            self._show(task)
        if self._hears(task):  # a child of its own may still write
            self._readable.unregister(task.output)
        task.close()

    def _hears(self, task):
        return any(key.data is task for key in self._readable.get_map().values())

    def _exit_code(self):
        if self.failed:
            return self.failed.exit_code or 1  # of one that hung, whatever it then did
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        return TIMED_OUT if self.timed_out else 0

    # What it says.

    def _say_why(self):
        running = [task for task in self._started if not task.has_ended()]
        names = ", ".join(task.name for task in running)
        if self.failed:
            ending = f"; ending {', '.join(map(state, running))}" if names else ""
            self._screen.say(how_it_failed(self.failed) + ending)
        elif self.stopped_by is not None:
            self._screen.say(
                f"{_signal_name(self.stopped_by)}: ending {names}; they have "
                f"{self._limits.end_seconds:g} s, and a second signal kills them at once"
            )
        elif self.timed_out:
            seconds = self._limits.timeout_seconds
            self._screen.say(f"the job ran longer than {seconds:g} s; ending {names}")
        elif late := [t.name for t in self._started if not t.has_ended() and not t.only_serves]:
            self._screen.say(
                f"{', '.join(late)} still ran {self._limits.wait_seconds:g} s after "
                f"{self.deciding.name} had ended; ending them (more time: --wait_seconds)"
            )


@contextlib.contextmanager
def stopped_by_signals(job: Job) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the job meanwhile, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: job.stop(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was installed by other than Python, which cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def how_it_failed(task: Task) -> str:
    """Such as "worker 1 failed with exit code 3 after 12.0 s"."""
    if task.hung:
        return f"{task.name} hung: it {task.hung} (more time: hang_seconds)"
    how = f"failed with exit code {task.exit_code}"
    if task.returncode is not None and task.returncode < 0:
        how = f"was ended by {_signal_name(-task.returncode)} (exit code {task.exit_code})"
    return f"{task.name} {how} after {task.seconds:.1f} s"


def last_words(task: Task) -> str:
    """How it failed, and the last lines that it wrote."""
    if not task.last_lines:
        return f"{how_it_failed(task)}; it wrote nothing"
    lines = "".join(f"\n    {line}" for line in task.last_lines)
    return f"{how_it_failed(task)}; the end of {task.log}:{lines}"


def _signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
