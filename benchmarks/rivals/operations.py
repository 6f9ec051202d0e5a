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
    return _summed(_traced(run).planes, _operation)


def kernels_during(run) -> list[tuple[str, int, float]]:
    """Calls `run` under TensorFlow's profiler.

    Returns:
        (GPU kernel, calls, milliseconds), the longest first; without a GPU, types of operations.
    """
    planes = _traced(run).planes
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    if not gpus:
        return _summed(planes, _operation)
    # Other lines of the plane show the same time again, by operation and by step.
    return _summed(gpus, str, lambda line: line.name.startswith("Stream"))


def _traced(run):
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
        return xplane_pb2.XSpace.FromString(path.read_bytes())


def _summed(planes, kind_of, is_counted=lambda line: True):
    calls, picoseconds = collections.Counter(), collections.Counter()
    for plane in planes:
        names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
        for line in filter(is_counted, plane.lines):
            for event in line.events:
                kind = kind_of(names[event.metadata_id])
                if kind:
                    calls[kind] += 1
                    picoseconds[kind] += event.duration_ps
    return [(kind, calls[kind], total / 1e9) for kind, total in picoseconds.most_common()]


def _operation(name):
    """Returns the type in an event named "name:Type"; None if the event is not an operation."""
    match = re.fullmatch(r"[^:\s]+:([A-Za-z_]\w*)", name)
    return match and match[1]
