"""Profiles the TensorFlow operations of a piece of training."""

import collections
import pathlib
import re
import tempfile

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2


def during(run) -> list[tuple[str, int, float]]:
    """Calls `run` under TensorFlow's profiler.

    Returns:
        (type of operation, calls, milliseconds), the longest first. Operations run in parallel on
        several cores, so the milliseconds may add up to more than the elapsed time.
    """
    with tempfile.TemporaryDirectory() as directory:
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=3, python_tracer_level=0
        )
        tf.profiler.experimental.start(directory, options)
        try:
            run()
        finally:
            tf.profiler.experimental.stop()
        (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
        return _summed(xplane_pb2.XSpace.FromString(path.read_bytes()))


def _summed(space):
    calls, picoseconds = collections.Counter(), collections.Counter()
    for plane in space.planes:
        names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                kind = _operation(names[event.metadata_id])
                if kind:
                    calls[kind] += 1
                    picoseconds[kind] += event.duration_ps
    return [(kind, calls[kind], total / 1e9) for kind, total in picoseconds.most_common()]


def _operation(name):
    """Returns the type in an event named "name:Type"; None if the event is not an operation."""
    match = re.fullmatch(r"[^:\s]+:([A-Za-z_]\w*)", name)
    return match and match[1]
