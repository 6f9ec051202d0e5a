"""How the rows of a batch are shared out: by replica, and each replica's rows by micro-step.

Part *p* of *P* parts of *n* rows is rows n·p // P up to n·(p + 1) // P: every row is in exactly
one part, and no two parts differ by more than one row. With fewer rows than parts some are left
empty. As many layers cannot compute on nothing (a convolution fails, a BatchNorm gives NaN), an
empty part is shown one row that belongs to another; its `rows` is 0 all the same, and nothing that
comes of it is counted (`kdist.training.step`).
"""

import dataclasses
from typing import Any, NamedTuple

import keras
import tensorflow as tf

Number = Any  # an int where the batch's size is known before the step runs, else an int32 scalar


class Part(NamedTuple):
    """What a batch is that one worker has read for itself: its replicas' rows, and no others.

    Attributes:
        worker: its number, from 0.
        workers: how many there are.
        batch_rows: rows of the whole batch. It is divided evenly, so that a worker's part has the
            rows of its replicas.
    """

    worker: int
    workers: int
    batch_rows: int

    @property
    def first_row(self):
        """Where it begins in the whole batch."""
        return self.batch_rows * self.worker // self.workers


@dataclasses.dataclass(frozen=True)
class Share:
    """What one replica takes of a batch in one micro-step.

    Attributes:
        rows: how many rows count; 0 where the one that is shown belongs to another replica.
        micro_rows: rows of all replicas in this micro-step.
        batch_rows: rows of all replicas in all micro-steps of the step.
        may_be_empty: `rows` may be 0.
    """

    rows: Number
    micro_rows: Number
    batch_rows: Number
    may_be_empty: bool

    @property
    def of_batch(self):
        """The fraction of the step's rows that it has, a float or a float32 scalar."""
        return fraction(self.rows, self.batch_rows)

    @property
    def of_micro_step(self):
        """The fraction of the micro-step's rows that it has, a float or a float32 scalar."""
        return fraction(self.rows, self.micro_rows)


@dataclasses.dataclass(frozen=True)
class BatchDivision:
    """How a batch is divided among replicas and micro-steps.

    Attributes:
        sizes: each replica's number of rows.
        starts: where each replica's rows begin in the tensors that it is given.
        micro_steps: into how many parts each replica's rows are divided.
        is_fixed: each replica is given tensors without rows: everybody takes all of them.
    """

    sizes: tuple[Number, ...]
    starts: tuple[Number, ...]
    micro_steps: int
    is_fixed: bool = False

    @classmethod
    def of(
        cls,
        data,
        strategy: tf.distribute.Strategy,
        micro_steps: int = 1,
        part: Part | None = None,
    ) -> "BatchDivision":
        """The division of `data`: a whole batch, or one that is divided among replicas already.

        Args:
            data: tensors of shape (B, …), dense, ragged or sparse, in any structure, or
                `tf.distribute.DistributedValues` of such; scalars are handed on to everybody.
            strategy: says how many replicas there are.
            micro_steps: into how many parts each replica's rows are divided.
            part: of which batch `data` is a part; None if they are whole. The starts of replicas
                of other workers then mean nothing.
        """
        replicas = strategy.num_replicas_in_sync
        if any(isinstance(x, tf.distribute.DistributedValues) for x in keras.tree.flatten(data)):
            sizes = [number_of_rows(part) for part in strategy.experimental_local_results(data)]
            return cls(tuple(sizes), (0,) * replicas, micro_steps)
        rows = number_of_rows(data)
        if rows is None:
            return cls((micro_steps,) * replicas, (0,) * replicas, micro_steps, is_fixed=True)
        rows, first = (part.batch_rows, part.first_row) if part else (rows, 0)
        sizes = [_size(rows, replica, replicas) for replica in range(replicas)]
        starts = [rows * replica // replicas - first for replica in range(replicas)]
        return cls(tuple(sizes), tuple(starts), micro_steps)

    def take(self, data, replica: int, micro_step: Number):
        """(rows of `data`, their `Share`) for one replica in one micro-step, counted from 0."""
        mine = self.sizes[replica]
        size = _size(mine, micro_step, self.micro_steps)
        micro_rows = sum(_size(rows, micro_step, self.micro_steps) for rows in self.sizes)
        smallest = min(self.sizes) if _all_known(self.sizes) else 0
        share = Share(size, micro_rows, sum(self.sizes), smallest < self.micro_steps)
        if self.is_fixed:
            return data, share
        first, shown = self.starts[replica] + mine * micro_step // self.micro_steps, size
        if share.may_be_empty:
            rows = number_of_rows(data)
            first, shown = (
                tf.maximum(tf.minimum(first, tf.subtract(rows, 1)), 0),
                tf.maximum(size, 1),
            )
        with tf.device("CPU:0"):  # where the input pipeline leaves a batch; only a share travels
            taken = keras.tree.map_structure(lambda leaf: _rows_of(leaf, first, shown), data)
        return taken, share


def number_of_rows(data) -> Number | None:
    """Rows of a batch, read off its first tensor: an int where it is known; None without any."""
    leaf = next(filter(_has_rows, keras.tree.flatten(data)), None)
    if leaf is None:
        return None
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if leaf.shape[0] is not None:
        return int(leaf.shape[0])
    return tf.shape(leaf, out_type=tf.int32)[0]


def _has_rows(leaf):
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        return True
    return hasattr(leaf, "shape") and len(leaf.shape) > 0


def _all_known(numbers):
    return all(isinstance(number, int) for number in numbers)


def _size(rows, part, parts):
    if isinstance(rows, int) and rows % parts == 0:
        return rows // parts  # also where `part` is not known beforehand
    return rows * (part + 1) // parts - rows * part // parts


def _rows_of(leaf, first, number):
    """`leaf[first:first + number]`; the number of rows stays known where `first` is not."""
    if not _has_rows(leaf):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        rows = _sparse_rows(leaf, tf.cast(first, tf.int64), tf.cast(number, tf.int64))
    else:
        rows = leaf[first : first + number]
    if not isinstance(leaf, tf.RaggedTensor) and hasattr(rows, "set_shape"):
        rows.set_shape([number if isinstance(number, int) else None, *leaf.shape[1:]])
    return rows


def _sparse_rows(leaf, first, number):
    rest = leaf.dense_shape[1:]
    start = tf.concat([[first], tf.zeros_like(rest)], 0)
    return tf.sparse.slice(leaf, start, tf.concat([[number], rest], 0))


def fraction(part: Number, whole: Number):
    """part / whole, a float or a float32 scalar; 0 if `whole` is."""
    if isinstance(part, int) and isinstance(whole, int):
        return part / whole if whole else 0.0
    return tf.math.divide_no_nan(tf.cast(part, tf.float32), tf.cast(whole, tf.float32))
