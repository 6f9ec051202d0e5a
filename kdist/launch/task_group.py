"""Starts and ends the tasks of a job together.

    tasks = TaskGroup(tasks, mark, Screen())
    with stop_on_signals(tasks):
        code = tasks.run()

A single thread reads and shows output, detects tasks that have ended, and decides.
"""

import contextlib
import dataclasses
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kdist.cluster import notices
from kdist.exit_codes import PEER_HANGS, SAVED, TIMED_OUT
from kdist.launch.supervision import DEFAULT_LIMIT_SECONDS, Supervision, task_state
from kdist.launch.task import Screen, Task
from kdist.launch.watchdog import Watchdog, processes_of, signal_processes

_POLL_SECONDS = 0.1
# A task that only serves has nothing to finish after the chief has ended.
_SERVER_WAIT_SECONDS = 3.0
# Limit after SIGKILL, for a process that hangs in the kernel.
_MAX_KILL_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Time limits of a job, in seconds."""

    end_seconds: float = 5.0  # between the signal that asks a task to end and the one that kills it
    wait_seconds: float = 30.0  # for the other tasks to end by themselves after the chief has
    timeout_seconds: float | None = None  # of the whole job; None for no limit
    # of a step of kdist's `fit`, and of a task's silence; 0 for no limit
    hang_seconds: float = DEFAULT_LIMIT_SECONDS


class TaskGroup:
    """Runs tasks until the chief has succeeded, a task has failed, or the user stops them.

    The chief is the task with that role, or worker 0 without one. Afterwards `failed` is the task
    whose failure ended the job, `stopped_by` the signal that ended it, `timed_out` tells whether it
    exceeded its time limit, and `is_restarting` whether `restart` ended it.

    Args:
        tasks: Tasks that have not started.
        mark: Mark in the tasks' environment, by which their children are found (`watchdog`).
        screen: Shows the tasks' output.
        timeouts: Time limits; by default those of `Timeouts`.
        may_replace: Called with the name of a task that failed; returns whether to restart it while
            the others continue. Only workers of parameter servers can be replaced.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        mark: str,
        screen: Screen,
        timeouts: Timeouts | None = None,
        may_replace: Callable[[str], bool] = lambda name: False,
    ):
        self.tasks, self._mark, self._screen = list(tasks), mark, screen
        self._timeouts = timeouts or Timeouts()
        self._may_replace = may_replace
        self.failed: Task | None = None
        self.stopped_by: int | None = None
        self.timed_out = self.is_restarting = False
        self._supervision = Supervision(self.tasks, self._timeouts.hang_seconds)
        self._started: list[Task] = []
        self._not_replaced: Task | None = None
        self._readable = selectors.DefaultSelector()
        self._is_ending = self._kill_now = self._is_preempted = False
        self._began = time.monotonic()
        self._chief_ended: float | None = None

    @property
    def chief(self) -> Task:
        """The task whose success ends the job."""
        return next(task for task in self.tasks if task.cluster.is_chief)

    def run(self) -> int:
        """Starts the tasks; returns an exit code when none of them, nor of their children, is left.

        It is 0; the exit code of the task that failed, 128 + n if signal n ended it; 124 after the
        timeout; 128 + n if `stop` was called with signal n; or 143 if `restart` was called
        (`kdist.exit_codes`).
        """
        self._began = time.monotonic()
        with Watchdog(self._mark) as watchdog:
            try:
                for task in self.tasks:
                    if self.stopped_by is None:
                        self._start(task, watchdog)
                        self._started.append(task)
                while not self._is_over():
                    self._poll(_POLL_SECONDS)
                    for line in self._supervision.news():
                        self._screen.announce(line)
                    self._replace_failed(watchdog)
                self._is_ending = True
                self._announce_end()
                self._end()
            finally:
                self._kill()
        has_another_reason = self.failed or self.timed_out or self.stopped_by is not None
        self.is_restarting &= not has_another_reason and self.chief.returncode != 0
        return self._exit_code()

    def stop(self, number: int, is_preempted: bool = False):
        """Ends the job because of a signal; a second call kills the tasks at once.

        On a machine that is preempted, the tasks get the time to save that its cloud gives. Its
        shutdown also sends SIGTERM to all processes, which does not count as a second call.

        It may be called from a signal handler.
        """
        self._is_preempted |= is_preempted
        if self._is_preempted and number == signal.SIGTERM == self.stopped_by:
            return
        is_first = self.stopped_by is None and (not self._is_ending or self.is_restarting)
        self._kill_now = not is_first
        if is_first:
            self.stopped_by, self.is_restarting = number, False

    def restart(self):
        """Ends the job for a restart; the tasks get the time to save. Any thread may call it."""
        if not self._is_ending and self.stopped_by is None:
            self.is_restarting = True

    # While the job runs.

    def _start(self, task, watchdog):
        task.start()
        if task.pid is not None:
            watchdog.guard(task.pid)
        self._readable.register(task.output, selectors.EVENT_READ, task)

    def _replace_failed(self, watchdog):
        """Restarts serving workers that have failed or hang, if that is allowed."""
        hung, reason = self._supervision.hung() or (None, "")
        for task in filter(self._is_replaceable, self._started):
            if task is hung:
                task.hung = reason
                task.signal(signal.SIGKILL)
            if not task.returncode:
                continue
            self._screen.announce(describe_failure(task))
            if not self._may_replace(task.name):
                self._not_replaced = task
            else:
                self._close(task)
                self._start(task, watchdog)

    def _poll(self, seconds):
        """Shows output that comes within `seconds`, and updates the state of all tasks."""
        for key, _ in self._readable.select(seconds):
            self._show(key.data)
        for task in self._started:
            task.has_ended()
            task.read_heartbeat()

    def _show(self, task):
        lines, more = task.read()
        for line in lines:
            self._screen.show(task.name, line)
        if not more:
            self._readable.unregister(task.output)
            task.close_output()

    def _is_over(self):
        running = self._running()
        self.failed = self._first_failed() or self._first_hung()
        limit = self._timeouts.timeout_seconds
        seconds = time.monotonic() - self._began
        self.timed_out = bool(running) and limit is not None and seconds > limit
        return (
            self.stopped_by is not None
            or self.is_restarting
            or self.failed is not None
            or self.timed_out
            or not running
            or self._has_waited_enough(running)
        )

    def _running(self):
        return [task for task in self._started if not task.has_ended()]

    def _first_failed(self):
        """Returns the task that failed; among several, the one that is the likely cause.

        It is one that was killed, and last one that waited for another.
        """
        failed = [task for task in self._started if task.returncode and not self._may_fail(task)]
        return min(
            failed,
            key=lambda task: (task.returncode > 0, task.returncode == PEER_HANGS),
            default=None,
        )

    def _first_hung(self):
        found = self._supervision.hung()
        if found is None or self.stopped_by is not None or self._is_replaceable(found[0]):
            return None
        task, task.hung = found
        return task

    def _may_fail(self, task):
        """A serving task may fail after its coordinator has succeeded and disconnected."""
        chief_succeeded = task.only_serves and self.chief.returncode == 0
        return chief_succeeded or self._is_replaceable(task)

    def _is_replaceable(self, task):
        """Returns whether the other tasks can continue until a failed task has been restarted."""
        serves_a_coordinator = task.only_serves and task.cluster.role == "worker"
        return (
            serves_a_coordinator
            and task.beat is not None  # the handshake is over
            and self._not_replaced is not task
            and self.stopped_by is None
            and self.chief.returncode is None
        )

    def _has_waited_enough(self, running):
        if self.chief.returncode != 0:
            return False
        self._chief_ended = self._chief_ended or time.monotonic()
        limit = self._timeouts.wait_seconds
        if all(task.only_serves for task in running):
            limit = min(limit, _SERVER_WAIT_SECONDS)
        return time.monotonic() - self._chief_ended > limit

    # The end of the job.

    def _end(self):
        """Asks all running processes to end, and gives them time."""
        number = signal.SIGINT if self.stopped_by == signal.SIGINT else signal.SIGTERM
        for task in self._started:
            task.signal(signal.SIGABRT if task.hung else number)  # on SIGABRT, Python dumps stacks
        # Signaled groups are left out: a second signal would act like a second Ctrl-C.
        groups = [task.pid for task in self._running() if task.pid is not None]
        signal_processes(self._mark, number, except_groups=groups)
        deadline = time.monotonic() + self._seconds_to_end()
        while not self._kill_now and time.monotonic() < deadline and self._any_process_runs():
            self._poll(_POLL_SECONDS)

    def _seconds_to_end(self):
        """Returns the time until tasks are killed; longer while they save a checkpoint."""
        has_saved = self.failed is not None and self.failed.returncode == SAVED
        # All workers save at the same step.
        saves = self._is_preempted or self.is_restarting or has_saved
        return max(self._timeouts.end_seconds, notices.GRACE_SECONDS if saves else 0.0)

    def _any_process_runs(self):
        return bool(self._running()) or bool(processes_of(self._mark))

    def _kill(self):
        """Kills the remaining processes and reads their last output."""
        self._is_ending = True
        deadline = time.monotonic() + _MAX_KILL_SECONDS
        while self._any_process_runs() and time.monotonic() < deadline:
            for task in self._started:
                task.signal(signal.SIGKILL)
            signal_processes(self._mark, signal.SIGKILL)
            self._poll(_POLL_SECONDS / 10)
        for task in self._started:
            self._close(task)
        self._readable.close()

    def _close(self, task):
        """Shows the task's remaining output and closes its pipes."""
        if self._is_read(task):
            self._show(task)
        if self._is_read(task):  # a child of the task may still write
            self._readable.unregister(task.output)
        task.close()

    def _is_read(self, task):
        return any(key.data is task for key in self._readable.get_map().values())

    def _exit_code(self):
        if self.failed:
            return self.failed.exit_code or 1  # a hung task may have exited with 0
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.is_restarting:
            return SAVED
        return TIMED_OUT if self.timed_out else 0

    def _announce_end(self):
        running = self._running()
        names = ", ".join(task.name for task in running)
        if self.failed:
            ending = f"; ending {', '.join(map(task_state, running))}" if names else ""
            self._screen.announce(describe_failure(self.failed) + ending)
        elif self.stopped_by is not None:
            self._screen.announce(
                f"{signal_name(self.stopped_by)}: ending {names} within "
                f"{self._seconds_to_end():g} s; a second signal kills them at once"
            )
        elif self.is_restarting:
            self._screen.announce(f"ending {names} within {self._seconds_to_end():g} s")
        elif self.timed_out:
            self._screen.announce(f"the time limit of the job is over; ending {names}")
        elif late := [task.name for task in running if not task.only_serves]:
            self._screen.announce(
                f"{', '.join(late)} still ran {self._timeouts.wait_seconds:g} s after "
                f"{self.chief.name} had ended; ending them (more time: --wait_seconds)"
            )


@contextlib.contextmanager
def stop_on_signals(tasks: TaskGroup) -> Iterator[None]:
    """Yields while Ctrl-C, SIGTERM, SIGHUP, and a preemption notice of a cloud end the job.

    It has no effect in other threads than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = None

    def stop(number, _):
        tasks.stop(number, is_preempted=watch is not None and watch.has_notice)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        watch = notices.watch()
        yield
    finally:
        if watch is not None:
            watch.close()
        for number, handler in before.items():
            # None: the handler was not installed by Python, which cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def describe_failure(task: Task) -> str:
    """Returns a description such as "worker 1 failed with exit code 3 after 12.0 s"."""
    if task.hung:
        return f"{task.name} hung: it {task.hung} (more time: hang_seconds)"
    how = f"failed with exit code {task.exit_code}"
    if task.returncode is not None and task.returncode < 0:
        how = f"was ended by {signal_name(-task.returncode)} (exit code {task.exit_code})"
    return f"{task.name} {how} after {task.seconds:.1f} s"


def failure_report(task: Task) -> str:
    """Returns a description of the failure and the task's last lines of output."""
    if not task.last_lines:
        return f"{describe_failure(task)}; it wrote no output"
    lines = "".join(f"\n    {line}" for line in task.last_lines)
    return f"{describe_failure(task)}; the end of {task.log}:{lines}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
