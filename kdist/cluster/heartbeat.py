"""Heartbeat of this process: what it does and for how long, sent to its launcher once per second.

    with heartbeat.step(function, 312, steps=16) as note_steps:
        ...                                     # the call of the step function
        note_steps(16)                          # fewer if the data ended

A step that takes ten times as long as usual is logged while it lasts, and an operation outside of
steps for which a worker waits for the others for more than a minute. The launcher gives each task
a pipe, and a `Beat` is one line in it. From the beats of all tasks the launcher finds the one that
hangs, as opposed to those that wait for it. Without a launcher, the first task of the job does
(`kdist.job`). A `LivenessProbe` finds out whether a task still listens at its address.
"""

import atexit
import collections
import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import socket
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

_logger = logging.getLogger(__name__)

# Environment variable of a task: the pipe to the launcher, in the format of `pipe_name`.
PIPE_VARIABLE = "KDIST_HEARTBEAT"

_BEAT_INTERVAL_SECONDS = 1.0
# A step is logged as slow after this multiple of the usual time, and at least this time.
_MIN_SLOWDOWN = 10
_MIN_SLOW_SECONDS = 5.0
_SLOW_COLLECTIVE_SECONDS = 60.0  # an operation outside of steps, of all workers
_NUM_REMEMBERED_STEPS = 31
_MIN_STEPS_FOR_USUAL = 3
_PROBE_INTERVAL_SECONDS = 0.5
_CONNECT_TIMEOUT_SECONDS = 10.0
# Consecutive failed probes after which the task is considered gone.
_MAX_FAILED_PROBES = 4


@dataclasses.dataclass(frozen=True)
class Beat:
    """Activity of a task."""

    doing: str = "starting"  # such as "in step 313" or "between steps"
    seconds: float = 0.0  # of the activity so far
    in_step: bool = False  # during a call of a step function, where it may wait for other tasks
    # That call is among the first of its function, or the first of an epoch. It may take long: the
    # function is traced, or a dataset is read from its beginning.
    is_first: bool = False
    usual_seconds: float | None = None  # median duration of such a call, if known
    longest_seconds: float = 0.0  # longest recent duration of such a call, if known
    is_last: bool = False  # the process is exiting and sends no more beats

    @classmethod
    def from_line(cls, line: bytes) -> "Beat | None":
        """Parses a line of the pipe; None if it is malformed."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None


class _Step(NamedTuple):
    """A running call that may wait for other tasks; of a step function unless `name` is set."""

    name: str | None
    number: int = 0
    steps: int = 1
    is_first: bool = True
    durations: Sequence[float] = ()


class Heartbeat:
    """Records the activity of this process and sends it from a thread.

    A step may take only a millisecond, so all computation happens in the thread.
    """

    def __init__(self):
        self._activity: tuple[str | _Step, float] = "starting", time.monotonic()  # (what, since)
        self._durations = weakref.WeakKeyDictionary()
        self._reported = 0.0  # start time of the last step logged as slow
        self._traced = 0.0  # start time of the last step that TensorFlow traced
        self._thread = None
        self._pipe = None
        self._receivers: list[Callable[[Beat], None]] = []

    def add_receiver(self, receive: Callable[[Beat], None]):
        """Passes each beat to a function as well, in the thread."""
        self._receivers.append(receive)

    def start(self):
        """Starts the thread, unless it is running."""
        if self._thread is not None:
            return
        self._pipe = _pipe_from_environment()
        if self._pipe is not None:
            _enable_stack_dump()
        atexit.register(self._send_last)
        self._thread = threading.Thread(target=self._run, name="kdist-heartbeat", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def step(
        self, function, number: int, steps: int = 1, begins: bool = False
    ) -> Iterator[Callable[[int], None]]:
        """Context of a call of a step function, whose usual durations are tracked.

        The call runs up to `steps` steps, of which the first has the index `number`, from 0; it
        `begins` an epoch if it is the first in it. The value of the context is a function that
        receives the number of steps that have run.
        """
        durations = self._durations.get(function)
        if durations is None:
            durations = self._durations[function] = collections.deque(maxlen=_NUM_REMEMBERED_STEPS)
        began = time.monotonic()
        self._activity = _Step(None, number, steps, begins, durations), began
        ran = 0

        def note_steps(number):
            nonlocal ran
            ran = number

        try:
            yield note_steps
        finally:
            ended = time.monotonic()
            if ran:
                durations.append((ended - began) / ran)
            self._activity = f"between steps, after step {number + ran}", ended

    @contextlib.contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Context of an operation outside of steps that waits for all workers and may take long."""
        before, self._activity = self._activity, (_Step(name), time.monotonic())
        try:
            yield
        finally:
            self._activity = before[0], time.monotonic()

    def note_tracing(self):
        """Records that TensorFlow traces the running step, which may take long."""
        self._traced = self._activity[1]

    def set_activity(self, activity: str):
        """Records an activity that is not a step."""
        self._activity = activity, time.monotonic()

    def _run(self):
        while True:
            activity, since = self._activity
            beat = _beat(activity, time.monotonic() - since)
            if since != self._reported:
                self._log_if_slow(beat, since)
                self._log_if_alone(activity, beat, since)
            self._send(beat)
            time.sleep(_BEAT_INTERVAL_SECONDS)

    def _log_if_slow(self, beat, since):
        if beat.usual_seconds is None:
            return
        if beat.seconds > max(_MIN_SLOWDOWN * beat.usual_seconds, _MIN_SLOW_SECONDS):
            self._reported = since
            tracing = ", as TensorFlow traces it for a batch of another size or kind"
            _logger.warning(
                "%s for %.0f s so far%s; it usually takes %.2g s",
                beat.doing,
                beat.seconds,
                tracing if self._traced == since else "",
                beat.usual_seconds,
            )

    def _log_if_alone(self, activity, beat, since):
        is_collective = isinstance(activity, _Step) and activity.name is not None
        if is_collective and beat.seconds > _SLOW_COLLECTIVE_SECONDS:
            self._reported = since
            _logger.warning(
                "%s for %.0f s so far. All workers take part in it, and have to call it at the "
                "same place of their programs",
                beat.doing,
                beat.seconds,
            )

    def _send_last(self):
        self._send(Beat("ending", is_last=True))
        self._pipe = None

    def _send(self, beat):
        for receive in self._receivers:
            receive(beat)
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, json.dumps(dataclasses.asdict(beat)).encode() + b"\n")
        except BlockingIOError:  # the launcher is stopped, and later beats replace this one
            pass
        except OSError:
            self._pipe = None


def _beat(activity, seconds):
    if not isinstance(activity, _Step):
        return Beat(activity, seconds)
    doing = activity.name or f"in step {activity.number + 1}"
    durations = list(activity.durations)
    if len(durations) < _MIN_STEPS_FOR_USUAL:
        return Beat(doing, seconds, in_step=True, is_first=True)
    steps = activity.steps
    usual, longest = statistics.median(durations), max(durations[1:])  # the first one is traced
    return Beat(doing, seconds, True, activity.is_first, usual * steps, longest * steps)


def _enable_stack_dump():
    """Makes Python print its stack when the launcher ends a hanging task with a signal."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            faulthandler.enable(sys.__stderr__)


def has_launcher() -> bool:
    """Returns whether a launcher reads the heartbeats of this process."""
    return _pipe_from_environment() is not None


def pipe_name(descriptor: int) -> str:
    """Returns a name of a pipe that is invalid where the descriptor is another file."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def _pipe_from_environment():
    """Returns the launcher's pipe, or None; children of this process do not inherit it."""
    name = os.environ.get(PIPE_VARIABLE, "")
    try:
        pipe = int(name.partition(":")[0])
        if pipe_name(pipe) != name:  # the variable was inherited, but not the pipe
            return None
        os.set_inheritable(pipe, False)
        os.set_blocking(pipe, False)
    except (ValueError, OSError):
        return None
    return pipe


_process_heartbeat = Heartbeat()
start, step = _process_heartbeat.start, _process_heartbeat.step
collective, set_activity = _process_heartbeat.collective, _process_heartbeat.set_activity
add_receiver, note_tracing = _process_heartbeat.add_receiver, _process_heartbeat.note_tracing


class LivenessProbe:
    """Checks from time to time whether a task at `"host:port"` accepts connections.

    A task that has never answered does not count as gone.
    """

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._has_answered, self._failed_probes, self._probed_at = False, 0, float("-inf")

    def is_gone(self) -> bool:
        """Returns whether the task has stopped answering; probes at most every 0.5 s."""
        if time.monotonic() - self._probed_at >= _PROBE_INTERVAL_SECONDS:
            self._probe()
        return self._has_answered and self._failed_probes >= _MAX_FAILED_PROBES

    def wait_until_gone(self):
        """Blocks until the task has stopped answering."""
        while not self.is_gone():
            time.sleep(_PROBE_INTERVAL_SECONDS)

    def _probe(self):
        try:
            socket.create_connection(self._address, _CONNECT_TIMEOUT_SECONDS).close()
            self._has_answered, self._failed_probes = True, 0
        except OSError:
            self._failed_probes += 1
        self._probed_at = time.monotonic()
