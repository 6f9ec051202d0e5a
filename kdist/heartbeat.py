"""What this process does, told once a second to whoever started it.

    with heartbeat.step(function, 312, steps=16):
        ...                                     # the step function's call

A step that takes ten times as long as usual is reported while it lasts. The launcher, which gives
each task a pipe (`Beat` is a line of it), hears of every task what it does and for how long, and
so can tell the task that hangs from those that wait for it.
"""

import atexit
import collections
import contextlib
import dataclasses
import faulthandler
import json
import os
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# In a task's environment: the pipe to the launcher, as `pipe_name` names it.
PIPE = "KDIST_HEARTBEAT"

_SECONDS_BETWEEN_BEATS = 1.0
# A step is reported that takes so many times the usual, and so many seconds at least.
_TIMES_THE_USUAL = 10
_SHORTEST_REPORTED = 5.0
_STEPS_REMEMBERED = 31
_STEPS_UNTIL_USUAL = 3


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a task does.

    Attributes:
        doing: in words, such as "in step 313" or "between steps".
        seconds: for how long it has.
        in_step: it is in a call of a step function, where it may wait for other tasks.
        is_first: that call is one of the first of its kind, or the first of an epoch, which may
            take long: the function is traced, a data set is read from its beginning.
        usual_seconds: of such a call, the median; None where not known.
        longest_seconds: of such calls, lately; 0 where not known.
        is_last: the process ends; no more of them come.
    """

    doing: str = "starting"
    seconds: float = 0.0
    in_step: bool = False
    is_first: bool = False
    usual_seconds: float | None = None
    longest_seconds: float = 0.0
    is_last: bool = False

    @classmethod
    def of_line(cls, line: bytes) -> "Beat | None":
        """The beat that a line of the pipe is; None if it is none."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None


class _Call(NamedTuple):
    """A call that is under way and may wait for others: of a step function, or what it says."""

    what: str | None
    number: int = 0
    steps: int = 1
    begins: bool = True
    durations: Sequence[float] = ()


class Heartbeat:
    """Keeps what this process does, and a thread that tells it.

    A step may take a millisecond: what the thread can work out, the step leaves to it.
    """

    def __init__(self):
        self._now: tuple[str | _Call, float] = "starting", time.monotonic()  # since when
        self._durations = weakref.WeakKeyDictionary()
        self._reported = 0.0  # the beginning of the step that was reported last
        self._thread = None
        self._pipe = None

    def start(self):
        """Starts the thread, if it does not run yet."""
        if self._thread is not None:
            return
        self._pipe = _pipe_of_environment()
        if self._pipe is not None:
            _show_where_it_hangs()
            atexit.register(self._tell_the_last)
        self._thread = threading.Thread(target=self._run, name="kdist-heartbeat", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def step(self, function, number: int, steps: int = 1, begins: bool = False) -> Iterator[None]:
        """A context for a call of a step function.

        Args:
            function: which one; what is usual is known of each by itself.
            number: of the call's first step, from 0.
            steps: how many it makes.
            begins: it is the first one of an epoch.
        """
        durations = self._durations.get(function)
        if durations is None:
            durations = self._durations[function] = collections.deque(maxlen=_STEPS_REMEMBERED)
        began = time.monotonic()
        self._now = _Call(None, number, steps, begins, durations), began
        try:
            yield
        finally:
            ended = time.monotonic()
            durations.append((ended - began) / steps)
            self._now = f"between steps, after step {number + steps}", ended

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """A context for what all workers do together outside of steps, and may take long."""
        before, self._now = self._now, (_Call(what), time.monotonic())
        try:
            yield
        finally:
            self._now = before[0], time.monotonic()

    def does(self, what: str):
        """This process does something that is no step."""
        self._now = what, time.monotonic()

    def _run(self):
        while True:
            what, since = self._now
            beat = _beat(what, time.monotonic() - since)
            if since != self._reported:
                self._report(beat, since)
            self._tell(beat)
            time.sleep(_SECONDS_BETWEEN_BEATS)

    def _report(self, beat, since):
        if beat.usual_seconds is None:
            return
        if beat.seconds > max(_TIMES_THE_USUAL * beat.usual_seconds, _SHORTEST_REPORTED):
            self._reported = since
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                print(
                    f"kdist: {beat.doing} for {beat.seconds:.0f} s by now; the usual is "
                    f"{beat.usual_seconds:.2g} s",
                    file=sys.stderr,
                    flush=True,
                )

    def _tell_the_last(self):
        self._tell(Beat("ending", is_last=True))
        self._pipe = None

    def _tell(self, beat):
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, json.dumps(dataclasses.asdict(beat)).encode() + b"\n")
        except BlockingIOError:  # the launcher is stopped: what it missed it need not know
            pass
        except OSError:
            self._pipe = None


def _beat(what, seconds):
    if not isinstance(what, _Call):
        return Beat(what, seconds)
    doing = what.what or f"in step {what.number + 1}"
    durations = list(what.durations)
    if len(durations) < _STEPS_UNTIL_USUAL:
        return Beat(doing, seconds, in_step=True, is_first=True)
    usual, longest = statistics.median(durations), max(durations[1:])  # the first is traced
    return Beat(doing, seconds, True, what.begins, usual * what.steps, longest * what.steps)


def _show_where_it_hangs():
    """The launcher ends what hangs by a signal; Python then writes where it was."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            faulthandler.enable(sys.__stderr__)


def pipe_name(descriptor: int) -> str:
    """Names a pipe such that a process to which the descriptor is another file can tell."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def _pipe_of_environment():
    """The launcher's pipe, if there is one; children of this process do not inherit it."""
    name = os.environ.get(PIPE, "")
    try:
        pipe = int(name.partition(":")[0])
        if pipe_name(pipe) != name:  # the variable was inherited, and the pipe was not
            return None
        os.set_inheritable(pipe, False)
        os.set_blocking(pipe, False)
    except (ValueError, OSError):
        return None
    return pipe


_of_this_process = Heartbeat()
start, step = _of_this_process.start, _of_this_process.step
meeting, does = _of_this_process.meeting, _of_this_process.does
