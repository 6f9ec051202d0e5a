"""Short profiles of training: which device was busy for how long, and with which operations.

    with tf.profiler.experimental.Profile(directory):
        ...                                # some steps
    profile = read_trace(directory, steps=10)
    profile.busy_seconds, profile.reduce_seconds, profile.operations[:10]

On GPUs the times are those of kernels. Without GPUs they are those of operations on the host; the
name scopes of replicas tell them apart. NCCL's kernels and TensorFlow's collectives include the
time that they wait for other replicas, so that this time counts as reduction.
"""

import collections
import dataclasses
import logging
import math
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

_logger = logging.getLogger(__name__)

# Operations that contain others or only pass tensors, so that their time is that of others.
_CONTAINERS = re.compile(
    r"^(_?(Host)?(Send|Recv)|While|If|StatelessIf|StatelessWhile|(Stateful)?PartitionedCall"
    r"|Switch|Merge|Enter|Exit|NextIteration|LoopCond|_Arg|_Retval|Timestamp|NoOp|Const"
    r"|.*Iterator.*|.*Optional.*|.*Dataset.*)$"
)
# Prefix of the operations within a loop over steps.
_LOOP = re.compile(r"\bwhile(/body/_\d+)?/")
_COLLECTIVE = re.compile(r"Collective|Nccl|nccl")
_REPLICA = re.compile(r"replica_(\d+)/")
# Events of TensorFlow's own code have two colons.
_OPERATION = re.compile(r"^(?P<name>[^:]+):(?P<type>\w+)$")
_PICOSECONDS = 1e12

# Profiles take at most this share of the training time, including the time to read them.
_MAX_SHARE = 0.004
# Relative slowdown of steps while they are profiled.
_SLOWDOWN = 0.5
_MIN_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class OperationTime:
    """Time of one operation of the model."""

    name: str  # in the graph, or of a kernel on a GPU
    type: str  # such as `Conv2D`, or `kernel`
    device: str  # such as `GPU:0`; `replica 1` where replicas share the cores of the host
    seconds_per_step: float  # sum of all calls in one step
    share: float  # fraction of the time of all operations
    calls: int  # in the whole profile


@dataclasses.dataclass(frozen=True)
class ProfileSummary:
    """Activity of the devices in a profile, in seconds per step."""

    busy_seconds: Sequence[float]  # of each replica or GPU, without reductions
    compute_seconds: float  # while any of them computes
    reduce_seconds: float  # while gradients are reduced and no device computes
    operations: Sequence[OperationTime]  # all operations, the slowest first
    devices: Sequence[str] = ()  # names of the devices of `busy_seconds`


@dataclasses.dataclass(frozen=True)
class _Event:
    """One execution of an operation; `begin` and `end` are picoseconds of the trace's clock."""

    name: str
    type: str
    device: str
    is_reduction: bool
    begin: int
    end: int


class SampledProfiles:
    """Profiles some steps whenever enough time has passed since the last profile.

        profiles = SampledProfiles()
        profiles.begin()                 # before a call of the step function
        profile = profiles.end(steps=4)  # after it: a ProfileSummary when a profile has ended

    The first profile waits for `first_after_seconds` of training, when everything is compiled. For
    a split model, `operation_devices` is the name of each operation -> its device.
    """

    operation_devices: Mapping[str, str] | None = None

    def __init__(self, first_after_seconds: float = 30.0):
        self._due = time.perf_counter() + first_after_seconds
        self._directory: str | None = None
        self._steps = 0

    def begin(self):
        """Starts a profile if one is due; call it between steps."""
        if self._directory is None and time.perf_counter() >= self._due:
            self._began = time.perf_counter()
            try:
                self._directory = tempfile.mkdtemp(prefix="kdist-profile-")
            except OSError as error:  # no space, or no directory for temporary files
                _logger.info("no steps are profiled: %s", error)
                self._due = math.inf
                return
            self._steps, self._seconds = 0, 0.0
            try:
                tf.profiler.experimental.start(self._directory)
            except tf.errors.AlreadyExistsError:  # the user's profile, which must stay complete
                self._discard()
            self._started = time.perf_counter()

    def end(self, steps: int) -> ProfileSummary | None:
        """Returns the running profile's summary if it may end now, after `steps` more steps."""
        if self._directory is None:
            return None
        self._steps += steps
        profiled_seconds = time.perf_counter() - self._started
        if profiled_seconds < _MIN_SECONDS:
            return None
        return self._finish(profiled_seconds)

    def stop(self):
        """Ends a running profile without reading it."""
        if self._directory is not None:
            tf.profiler.experimental.stop(save=False)
            self._discard()

    def _finish(self, profiled_seconds):
        try:
            tf.profiler.experimental.stop()
            return read_trace(self._directory, self._steps, self.operation_devices)
        except (tf.errors.OpError, OSError):  # a full disk, or the user has ended it
            return None
        finally:
            now = time.perf_counter()
            cost = now - self._began - profiled_seconds + profiled_seconds * _SLOWDOWN
            self._due = now + cost / _MAX_SHARE
            self._discard()

    def _discard(self):
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None
        self._due = max(self._due, time.perf_counter() + 1.0)


def read_trace(
    directory: str | os.PathLike, steps: int, operation_devices: Mapping[str, str] | None = None
) -> ProfileSummary | None:
    """Returns the summary of the newest profile that `tf.profiler` wrote; None if there is none.

    The profile has `steps` steps. For a split model, `operation_devices` is the name of each
    operation -> its device; other operations are then ignored.
    """
    files = pathlib.Path(directory).glob("plugins/profile/*/*.xplane.pb")
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return None
    space = xplane_pb2.XSpace()
    space.ParseFromString(newest.read_bytes())
    return summarize(space, steps, operation_devices)


def summarize(
    space: xplane_pb2.XSpace, steps: int, operation_devices: Mapping[str, str] | None = None
) -> ProfileSummary | None:
    """Returns the summary of a profile in memory; arguments as for `read_trace`."""
    gpus = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    hosts = [plane for plane in space.planes if plane.name == "/host:CPU"]
    events = [e for plane in gpus for e in _kernels(plane)] or [
        e for plane in hosts for e in _host_operations(plane, operation_devices)
    ]
    if not events or steps < 1:
        return None
    computing = collections.defaultdict(list)
    for event in events:
        if not event.is_reduction:
            computing[event.device].append((event.begin, event.end))
    reducing = [(event.begin, event.end) for event in events if event.is_reduction]
    any_device = [interval for intervals in computing.values() for interval in intervals]
    compute = _union_length(any_device)
    scale = _PICOSECONDS * steps
    devices = sorted(computing)
    return ProfileSummary(
        [_union_length(computing[device]) / scale for device in devices],
        compute / scale,
        (_union_length(any_device + reducing) - compute) / scale,
        _slowest_first(events, steps),
        devices,
    )


def _kernels(plane):
    """Yields the events of a GPU's streams."""
    device = plane.name.removeprefix("/device:")
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            name = plane.event_metadata[event.metadata_id].name
            yield _event(line, event, name, "kernel", device, bool(_COLLECTIVE.search(name)))


def _host_operations(plane, operation_devices):
    """Yields the events of the model's graph on the cores of the host."""
    from kdist.training.replica.reduction import SCOPE

    for line in plane.lines:
        for event in line.events:
            match = _OPERATION.match(plane.event_metadata[event.metadata_id].name)
            if not match or _CONTAINERS.match(match["type"]):
                continue
            name, kind = _LOOP.sub("", match["name"]), match["type"]
            if operation_devices is None:
                replica = _REPLICA.search(name)
                device = f"replica {replica[1] if replica else 0}"
            elif match["name"] not in operation_devices:
                continue
            else:
                device = operation_devices[match["name"]]
            reduces = bool(_COLLECTIVE.search(kind)) or f"{SCOPE}/" in name
            yield _event(line, event, name, kind, device, reduces)


def _event(line, event, name, kind, device, is_reduction):
    begin = line.timestamp_ns * 1000 + event.offset_ps
    return _Event(name, kind, device, is_reduction, begin, begin + event.duration_ps)


def _union_length(intervals: Iterable[tuple[int, int]]) -> int:
    """Returns the length of the union of intervals."""
    total, until = 0, -1
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def _slowest_first(events, steps):
    times = collections.Counter()
    calls = collections.Counter()
    for event in events:
        key = event.name, event.type, event.device
        times[key] += event.end - event.begin
        calls[key] += 1
    total = sum(times.values()) or 1
    return [
        OperationTime(*key, took / _PICOSECONDS / steps, took / total, calls[key])
        for key, took in times.most_common()
    ]
