"""Which task of a job hangs, told by their heartbeats.

    supervision = Supervision(tasks, limit_seconds=60)
    for line in supervision.news(): ...
    if found := supervision.hung():
        task, why = found

In a job of several workers all wait for the one that hangs. So what counts is who has fallen silent
(a stopped process, a machine that is gone), then who makes no step while others wait in one, and
only then who waits in a step.
"""

import time
from collections.abc import Sequence

from kdist.launch.task import Task

# A step may take so many times the longest so far, however long that is.
_TIMES_THE_LONGEST = 5
# The first steps of a kind trace their function; they have so many times the limit.
_TIMES_FOR_FIRST = 10
# Beats come every second; who has told nothing for so long is reported, and is the one that others
# wait for.
_SILENT_SECONDS = 5.0


class Supervision:
    """Looks for a task that hangs.

    Args:
        tasks: those of the job.
        limit_seconds: for a step (ten times that for the first of an epoch, and five times the
            longest in any case), and for silence; 0 is for ever.
    """

    def __init__(self, tasks: Sequence[Task], limit_seconds: float):
        self._tasks, self._limit = tasks, limit_seconds
        self._silent: set[str] = set()

    def news(self) -> list[str]:
        """What there is to say of tasks that have fallen silent, or speak again."""
        lines = []
        for task in self._beating():
            silence = time.monotonic() - task.beat_at
            if silence > _SILENT_SECONDS and task.name not in self._silent:
                self._silent.add(task.name)
                lines.append(
                    f"{task.name} gives no sign of life since {silence:.0f} s; is it stopped, or "
                    f"its machine too busy? Before, it was {_doing(task)}"
                )
            elif silence < _SILENT_SECONDS and task.name in self._silent:
                self._silent.remove(task.name)
                lines.append(f"{task.name} is back: {_doing(task)}")
        return lines

    def hung(self) -> tuple[Task, str] | None:
        """The task that hangs, if one does, and how that is known."""
        beating = self._beating()
        if not (self._limit and beating):
            return None
        now = time.monotonic()
        silent = max(beating, key=lambda task: now - task.beat_at)
        if now - silent.beat_at > self._limit:
            return silent, _silence(silent, now)
        waiting = [task for task in beating if self._waits_too_long(task, now)]
        if trainers := [task for task in waiting if not _is_evaluator(task)]:
            return self._culprit(trainers, now)
        return (waiting[0], f"was {_doing(waiting[0])}") if waiting else None

    def _culprit(self, waiting, now):
        """Who is waited for: an evaluator is by nobody."""
        others = f", and {', '.join(task.name for task in waiting)} waited for it"
        concerned = [task for task in self._beating() if not _is_evaluator(task)]
        silent = max(concerned, key=lambda task: now - task.beat_at)
        if now - silent.beat_at > _SILENT_SECONDS:
            return silent, _silence(silent, now)
        for task in self._tasks:
            if task.trains and task.beat is None and task.returncode is None:
                return task, f"had not begun to train{others}"
        training = [task for task in concerned if task.trains] or waiting
        task = min(training, key=lambda t: (t.beat.in_step, t.beat.is_first, -_seconds(t, now)))
        if not task.beat.in_step:
            return task, f"was {_doing(task)}{others}"
        usual = task.beat.usual_seconds
        return task, f"was {_doing(task)}" + (f", usually {usual:.2g} s" if usual else "")

    def _beating(self):
        return [
            task
            for task in self._tasks
            if task.beat and not task.beat.is_last and task.returncode is None
        ]

    def _waits_too_long(self, task, now):
        if not task.beat.in_step:
            return False
        limit = self._limit * (_TIMES_FOR_FIRST if task.beat.is_first else 1)
        return _seconds(task, now) > max(limit, _TIMES_THE_LONGEST * task.beat.longest_seconds)


def state(task: Task) -> str:
    """The task and what it does, such as "worker 1 (in step 313 for 5 s)"."""
    return f"{task.name} ({_doing(task)})" if task.beat else task.name


def _is_evaluator(task):
    return task.cluster.role == "evaluator"


def _silence(task, now):
    silence = now - task.beat_at
    return f"gave no sign of life for {silence:.0f} s; before, it was {task.beat.doing}"


def _seconds(task, now):
    return task.beat.seconds + now - task.beat_at


def _doing(task):
    return f"{task.beat.doing} for {_seconds(task, time.monotonic()):.0f} s"
