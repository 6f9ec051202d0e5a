"""How fast a pipeline is by itself, without a model that takes its batches.

found = measure(train, seconds=5)
found.examples_per_second      # the most that any training from it can reach
"""

import dataclasses
import time
from collections.abc import Iterable

import tensorflow as tf

# In the first part buffers fill up, and threads find their number.
_WARM_UP_SHARE = 0.3


@dataclasses.dataclass(frozen=True)
class Throughput:
    """What a pipeline gave.

    Attributes:
        examples_per_second: after the first batches.
        batches: how many that was measured on.
        first_batch_seconds: until the first one came: files opened, buffers filled.
        batch_bytes: of one batch, all its tensors.
    """

    examples_per_second: float
    batches: int
    first_batch_seconds: float
    batch_bytes: int


def measure(dataset: Iterable, seconds: float = 5.0) -> Throughput:
    """Reads batches for so long and does nothing with them.

    Args:
        dataset: a pipeline of `kdist.data`, or a batched `tf.data.Dataset`; of a finite one, no
            more than it has is read.
        seconds: how long. Defaults to 5.

    Raises:
        ValueError: there are not even two batches.
    """
    began = time.perf_counter()
    batches = iter(dataset)
    first = next(batches, None)
    first_batch_seconds = time.perf_counter() - began
    moments, rows = [time.perf_counter()], [0]
    for batch in batches:
        moments.append(time.perf_counter())
        rows.append(_rows(batch))
        if moments[-1] - moments[0] >= seconds:
            break
    if first is None or len(moments) < 2:
        raise ValueError(
            "a pipeline with less than two batches cannot be measured; make them smaller"
        )
    begin = min(int(len(moments) * _WARM_UP_SHARE), len(moments) - 2)
    took = moments[-1] - moments[begin]
    return Throughput(
        sum(rows[begin + 1 :]) / max(took, 1e-9),
        len(moments) - 1 - begin,
        first_batch_seconds,
        sum(part.numpy().nbytes for part in _parts(first)),
    )


def _parts(batch):
    return tf.nest.flatten(batch, expand_composites=True)


def _rows(batch):
    return int(tf.nest.flatten(batch)[0].shape[0])
