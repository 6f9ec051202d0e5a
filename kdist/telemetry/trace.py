"""What a short profile of training says: who was busy for how long, and with which operations.

    with tf.profiler.experimental.Profile(directory):
        ...                                # some steps
    work = read_trace(directory, steps=10)
    work.busy_seconds, work.reduce_seconds, work.operations[:10]

On GPUs the times are those of kernels; without GPUs, those of operations on the host, told apart
by the name scope of their replica. NCCL's kernels and TensorFlow's collectives wait for the other
replicas: that counts as reducing.
"""

import collections
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

from tensorflow.tsl.profiler.protobuf import xplane_pb2

from kdist.training.reduction import SCOPE

# They hold other operations, or hand tensors on: their time is that of others.
_NO_WORK = re.compile(
    r"^(_?(Host)?(Send|Recv)|While|If|StatelessIf|StatelessWhile|(Stateful)?PartitionedCall"
    r"|Switch|Merge|Enter|Exit|NextIteration|LoopCond|_Arg|_Retval|Timestamp|NoOp|Const"
    r"|.*Iterator.*|.*Optional.*|.*Dataset.*)$"
)
# What a loop over steps puts before the names of what it does.
_LOOP = re.compile(r"\bwhile(/body/_\d+)?/")
_COLLECTIVE = re.compile(r"Collective|Nccl|nccl")
_REPLICA = re.compile(r"replica_(\d+)/")
# Those of TensorFlow's own code have two colons.
_OPERATION = re.compile(r"^(?P<name>[^:]+):(?P<type>\w+)$")
_PICOSECONDS = 1e12


@dataclasses.dataclass(frozen=True)
class Operation:
    """What one operation of the model took.

    Attributes:
        name: in the graph, or a kernel's on a GPU.
        type: such as `Conv2D`, or `kernel`.
        device: such as `GPU:0`; `replica 1` where replicas share the host's cores.
        seconds_per_step: all its calls in a step together.
        share: of the time of all operations.
        calls: how often it ran in the whole profile.
    """

    name: str
    type: str
    device: str
    seconds_per_step: float
    share: float
    calls: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What the devices did in a profile.

    Attributes:
        busy_seconds: a step, in which each replica or GPU computed; its own reductions left out.
        compute_seconds: a step, in which any of them computed.
        reduce_seconds: a step, in which nobody computed and gradients were added up.
        operations: those that took the most time first.
        devices: the names of those that `busy_seconds` are of.
    """

    busy_seconds: Sequence[float]
    compute_seconds: float
    reduce_seconds: float
    operations: Sequence[Operation]
    devices: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class _Event:
    """An operation's run: from `begin` to `end`, in picoseconds of the trace's clock."""

    name: str
    type: str
    device: str
    is_reduction: bool
    begin: int
    end: int


def read_trace(
    directory: str | os.PathLike, steps: int, placed: Mapping[str, str] | None = None
) -> Work | None:
    """Reads what `tf.profiler` has written under `directory`; None if there is nothing in it.

    Args:
        directory: that the profiler was given; of several profiles, the newest is read.
        steps: how many steps were made meanwhile.
        placed: of a split model, the device of each of its operations; others are left out then.
    """
    files = pathlib.Path(directory).glob("plugins/profile/*/*.xplane.pb")
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return None
    space = xplane_pb2.XSpace()
    space.ParseFromString(newest.read_bytes())
    return work_of(space, steps, placed)


def work_of(
    space: xplane_pb2.XSpace, steps: int, placed: Mapping[str, str] | None = None
) -> Work | None:
    """The same of a profile in memory."""
    gpus = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    hosts = [plane for plane in space.planes if plane.name == "/host:CPU"]
    events = [e for plane in gpus for e in _kernels(plane)] or [
        e for plane in hosts for e in _operations(plane, placed)
    ]
    if not events or steps < 1:
        return None
    computing = collections.defaultdict(list)
    for event in events:
        if not event.is_reduction:
            computing[event.device].append((event.begin, event.end))
    reducing = [(event.begin, event.end) for event in events if event.is_reduction]
    anybody = [interval for intervals in computing.values() for interval in intervals]
    compute = _covered(anybody)
    a_step = _PICOSECONDS * steps
    devices = sorted(computing)
    return Work(
        [_covered(computing[device]) / a_step for device in devices],
        compute / a_step,
        (_covered(anybody + reducing) - compute) / a_step,
        _longest(events, steps),
        devices,
    )


def _kernels(plane):
    """What ran on a GPU's streams."""
    device = plane.name.removeprefix("/device:")
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            name = plane.event_metadata[event.metadata_id].name
            yield _event(line, event, name, "kernel", device, bool(_COLLECTIVE.search(name)))


def _operations(plane, placed):
    """What ran on the host's cores, of the model's graph."""
    for line in plane.lines:
        for event in line.events:
            found = _OPERATION.match(plane.event_metadata[event.metadata_id].name)
            if not found or _NO_WORK.match(found["type"]):
                continue
            name, kind = _LOOP.sub("", found["name"]), found["type"]
            if placed is None:
                replica = _REPLICA.search(name)
                device = f"replica {replica[1] if replica else 0}"
            elif found["name"] not in placed:
                continue
            else:
                device = placed[found["name"]]
            reduces = bool(_COLLECTIVE.search(kind)) or f"{SCOPE}/" in name
            yield _event(line, event, name, kind, device, reduces)


def _event(line, event, name, kind, device, is_reduction):
    begin = line.timestamp_ns * 1000 + event.offset_ps
    return _Event(name, kind, device, is_reduction, begin, begin + event.duration_ps)


def _covered(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union of intervals."""
    total, until = 0, -1
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def _longest(events, steps):
    times = collections.Counter()
    calls = collections.Counter()
    for event in events:
        key = event.name, event.type, event.device
        times[key] += event.end - event.begin
        calls[key] += 1
    total = sum(times.values()) or 1
    return [
        Operation(*key, time / _PICOSECONDS / steps, time / total, calls[key])
        for key, time in times.most_common()
    ]
