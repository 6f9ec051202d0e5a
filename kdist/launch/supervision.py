"""Supervision of a job: finds the task that hangs, and restarts a job that ended early.

    supervision = Supervision(tasks, limit_seconds=60)
    for line in supervision.news(): ...
    if found := supervision.hung():
        task, reason = found

The task is found from the heartbeats of all tasks. If one of several workers hangs, all others wait
for it. The culprit is a silent task, if there is one (a stopped process, a lost machine). Otherwise
it is a task that is outside of a step while others wait in one. Only then it is a task that waits
in a step.
"""

import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from kdist.cluster import Cluster
from kdist.cluster.heartbeat import Beat
from kdist.exit_codes import Restart, restart_after
from kdist.run_directory import newest_step

# Environment variable of the limit, for tasks that no launcher of this machine supervises.
LIMIT_VARIABLE = "KDIST_HANG_SECONDS"
DEFAULT_LIMIT_SECONDS = 60.0

# A step may take this multiple of the longest step so far, regardless of the limit.
_LIMIT_PER_LONGEST = 5
# Factor on the limit for the first steps of a function, which trace it.
_LIMIT_FACTOR_FIRST = 10
# Heartbeats come every second. A task that is silent for longer is reported, and is the culprit if
# others wait.
_MAX_SILENT_SECONDS = 5.0
# Pause before a restart, which doubles with each.
_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS = 1.0, 60.0


class SupervisedTask:
    """A task of a job, as its heartbeats show it.

    Attributes:
        cluster: The job, as seen by the task.
        beat: Last heartbeat; `None` before the first one.
        beat_at: Its time, from `time.monotonic`.
        returncode: `None` until the task has ended.
    """

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.beat: Beat | None = None
        self.beat_at = 0.0
        self.returncode: int | None = None

    @property
    def name(self) -> str:
        """The task's name, such as "worker 1"."""
        return self.cluster.name

    @property
    def only_serves(self) -> bool:
        """True if the task waits for a coordinator's requests and need not end by itself."""
        return "ps" in self.cluster.tasks and self.cluster.role in ("ps", "worker")

    @property
    def trains(self) -> bool:
        """True if the task runs steps that others wait for."""
        return self.cluster.role in ("chief", "worker") and not self.only_serves

    def note_beat(self, beat: Beat):
        """Records a heartbeat that has just arrived."""
        self.beat, self.beat_at = beat, time.monotonic()


TaskType = TypeVar("TaskType", bound=SupervisedTask)


class Supervision(Generic[TaskType]):
    """Watches the heartbeats of a job's tasks.

    `limit_seconds` is the limit of a step (ten times that for the first step of an epoch, and at
    least five times the longest step) and of silence; 0 for no limit.
    """

    def __init__(self, tasks: Sequence[TaskType], limit_seconds: float):
        self._tasks, self._limit = tasks, limit_seconds
        self._silent: set[str] = set()

    def news(self) -> list[str]:
        """Returns messages about tasks that have just become silent, or active again."""
        lines = []
        for task in self._beating():
            silence = time.monotonic() - task.beat_at
            if silence > _MAX_SILENT_SECONDS and task.name not in self._silent:
                self._silent.add(task.name)
                lines.append(
                    f"{task.name} has sent no heartbeat for {silence:.0f} s; its process may be "
                    f"stopped, or its machine overloaded. Before, it was {_activity(task)}"
                )
            elif silence < _MAX_SILENT_SECONDS and task.name in self._silent:
                self._silent.remove(task.name)
                lines.append(f"{task.name} is back: {_activity(task)}")
        return lines

    def hung(self) -> tuple[TaskType, str] | None:
        """Returns the task that hangs and the reason, or None."""
        beating = self._beating()
        if not (self._limit and beating):
            return None
        now = time.monotonic()
        silent = max(beating, key=lambda task: now - task.beat_at)
        if now - silent.beat_at > self._limit:
            return silent, _silence(silent, now)
        waiting = [task for task in beating if self._exceeds_limit(task, now)]
        if trainers := [task for task in waiting if not _is_evaluator(task)]:
            return self._culprit(trainers, now)
        return (waiting[0], f"was {_activity(waiting[0])}") if waiting else None

    def _culprit(self, waiting, now):
        """Returns the task that others wait for, never an evaluator."""
        others = f", and {', '.join(task.name for task in waiting)} waited for it"
        candidates = [task for task in self._beating() if not _is_evaluator(task)]
        silent = max(candidates, key=lambda task: now - task.beat_at)
        if now - silent.beat_at > _MAX_SILENT_SECONDS:
            return silent, _silence(silent, now)
        for task in self._tasks:
            if task.trains and task.beat is None and task.returncode is None:
                return task, f"had not begun to train{others}"
        training = [task for task in candidates if task.trains] or waiting
        task = min(training, key=lambda t: (t.beat.in_step, t.beat.is_first, -_seconds(t, now)))
        if not task.beat.in_step:
            return task, f"was {_activity(task)}{others}"
        usual = task.beat.usual_seconds
        return task, f"was {_activity(task)}" + (f", usually {usual:.2g} s" if usual else "")

    def _beating(self):
        running = (task for task in self._tasks if task.returncode is None)
        return [task for task in running if task.beat and not task.beat.is_last]

    def _exceeds_limit(self, task, now):
        if not task.beat.in_step:
            return False
        limit = self._limit * (_LIMIT_FACTOR_FIRST if task.beat.is_first else 1)
        return _seconds(task, now) > max(limit, _LIMIT_PER_LONGEST * task.beat.longest_seconds)


def limit_seconds(environment: Mapping[str, str]) -> float:
    """Returns the limit of KDIST_HANG_SECONDS, 60 by default; 0 for none.

    Raises:
        ValueError: If the variable is not a number of at least 0.
    """
    text = environment.get(LIMIT_VARIABLE) or str(DEFAULT_LIMIT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{LIMIT_VARIABLE}={text}; give a number of seconds, or 0 for no limit")
    return seconds


def task_state(task: SupervisedTask) -> str:
    """Returns a task's name and activity, such as "worker 1 (in step 313 for 5 s)"."""
    return f"{task.name} ({_activity(task)})" if task.beat else task.name


def _is_evaluator(task):
    return task.cluster.role == "evaluator"


def _silence(task, now):
    silence = now - task.beat_at
    return f"sent no heartbeat for {silence:.0f} s; before, it was {task.beat.doing}"


def _seconds(task, now):
    return task.beat.seconds + now - task.beat_at


def _activity(task):
    return f"{task.beat.doing} for {_seconds(task, time.monotonic()):.0f} s"


class RestartPolicy:
    """Limits the number of consecutive restarts without a new checkpoint.

    Whether a restart counts depends on the exit code (`kdist.exit_codes`). The directory holds the
    job's checkpoints, such as `step-0000000150`. Messages to the user are passed to `announce`.
    """

    def __init__(self, max_restarts: int, directory: pathlib.Path, announce: Callable[[str], None]):
        self._max_restarts, self._directory, self._announce = max_restarts, directory, announce
        self._restarts = 0
        self._newest = newest_step(self._directory)

    def wait_before_restart(self, code: int) -> bool:
        """Returns whether to restart the job, after a pause that doubles with each restart.

        `code` is the exit code of the task that ended the job, -n if signal n ended it.
        """
        restart = restart_after(code)
        if restart is Restart.NEVER and self._max_restarts:
            self._announce(f"not started again after exit code {code}")
        if restart is Restart.NEVER or not self._may_restart(restart):
            return False
        seconds = min(_FIRST_WAIT_SECONDS * 2 ** max(self._restarts - 1, 0), _MAX_WAIT_SECONDS)
        step = newest_step(self._directory)
        start = "its beginning" if step is None else f"the checkpoint of step {step}"
        status = self._status() if restart is Restart.COUNTED else "not counted, as it has saved"
        self._announce(f"starting again from {start} in {seconds:g} s; {status}")
        time.sleep(seconds)
        return True

    def may_replace(self, name: str) -> bool:
        """Returns whether to restart one task while the others continue."""
        if not self._count_restart():
            return False
        self._announce(f"starting {name} again; {self._status()}")
        return True

    def _may_restart(self, restart):
        return self._count_restart() if restart is Restart.COUNTED else self._max_restarts > 0

    def _count_restart(self):
        newest = newest_step(self._directory)
        if newest != self._newest:
            self._newest, self._restarts = newest, 0
        if self._restarts < self._max_restarts:
            self._restarts += 1
            return True
        if self._max_restarts:
            self._announce(
                f"not started again: {self._max_restarts} restarts in a row produced no new "
                "checkpoint (more: --max_restarts)"
            )
        return False

    def _status(self):
        return f"restart {self._restarts} of {self._max_restarts} since the last new checkpoint"
