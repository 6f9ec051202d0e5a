"""Division of a batch's rows among replicas, and of each replica's rows among micro-steps.

Part *p* of *P* parts of *n* rows holds rows n·p // P up to n·(p + 1) // P. Every row is in exactly
one part, and sizes differ by at most one row. With fewer rows than parts, some parts are empty.
Many layers cannot compute on an empty batch: a convolution fails, and a BatchNorm returns NaN. An
empty part therefore receives one row that belongs to another part. Its `rows` is still 0, and its
results count nowhere (`kdist.training.replica.step`).
"""

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdist.training.scopes import computes_on_gpus

Number = Any  # an int where the batch's size is known before the step runs, else an int32 scalar


class WorkerSlice(NamedTuple):
    """Slice of a global batch that one worker reads: the rows of its own replicas.

    Attributes:
        worker: index of the worker, from 0.
        workers: number of workers.
        batch_rows: number of rows of the global batch.
    """

    worker: int
    workers: int
    batch_rows: int

    @property
    def first_row(self):
        """Index of the slice's first row in the global batch."""
        return self.batch_rows * self.worker // self.workers


@dataclasses.dataclass(frozen=True)
class RowShare:
    """One replica's share of a batch in one micro-step.

    Attributes:
        rows: number of rows that count; 0 if the row it holds belongs to another replica.
        micro_rows: number of rows of all replicas in this micro-step.
        batch_rows: number of rows of all replicas in all micro-steps of the step.
        may_be_empty: `rows` may be 0.
        is_repeated: every replica holds all rows, and those of the first one count.
        tensors: the tensors that hold the rows, dense, ragged, or sparse.
    """

    rows: Number
    micro_rows: Number
    batch_rows: Number
    may_be_empty: bool
    is_repeated: bool = False
    tensors: tuple = dataclasses.field(default=(), compare=False)

    @property
    def batch_fraction(self):
        """Fraction of the step's rows, a float64 number or scalar tensor."""
        return fraction(self.rows, self.batch_rows)

    @property
    def micro_step_fraction(self):
        """Fraction of the micro-step's rows, a float64 number or scalar tensor."""
        return fraction(self.rows, self.micro_rows)

    def is_same_on_all(self, replicas: int) -> bool:
        """Returns True if all replicas are known to have the same number of rows."""
        return isinstance(self.micro_rows, int) and self.micro_rows == self.rows * replicas

    def own_rows(self, tensor):
        """Returns `tensor` without the row that an empty replica borrows from another."""
        if not self.may_be_empty:
            return tensor
        has_rows = tf.cast(self.rows > 0, tf.int32)
        return tensor[: tf.shape(tensor)[0] * has_rows]


@dataclasses.dataclass(frozen=True)
class BatchDivision:
    """Division of a batch among replicas and micro-steps.

    Attributes:
        sizes: number of rows of each replica.
        starts: index of each replica's first row in the tensors that it receives.
        micro_steps: number of parts into which each replica's rows are divided.
        is_fixed: the tensors have no rows; every replica receives all of them.
        is_repeated: every replica receives all rows, and those of the first one count.
        for_gpus: the rows are copied into page-locked memory.
    """

    sizes: tuple[Number, ...]
    starts: tuple[Number, ...]
    micro_steps: int
    is_fixed: bool = False
    is_repeated: bool = False
    for_gpus: bool = False

    @classmethod
    def of(
        cls,
        data,
        strategy: tf.distribute.Strategy,
        micro_steps: int = 1,
        worker_slice: WorkerSlice | None = None,
        is_repeated: bool = False,
    ) -> "BatchDivision":
        """Returns the division of a batch, which may already be divided among replicas.

        Args:
            data: tensors of shape (B, …), dense, ragged, or sparse, in any structure, or
                `tf.distribute.DistributedValues` of such. Every replica receives all scalars.
            strategy: the strategy.
            micro_steps: number of parts into which each replica's rows are divided. Defaults to 1.
            worker_slice: the slice of a batch that `data` is; None if it is whole. The starts of
                other workers' replicas are then meaningless.
            is_repeated: whether every replica receives all rows. Defaults to False.

        Raises:
            DifferentRowsError: the tensors have different numbers of rows, and are divided.
        """
        replicas = strategy.num_replicas_in_sync
        if is_distributed(data):
            sizes = [_common_rows(part) for part in strategy.experimental_local_results(data)]
            return cls(tuple(sizes), (0,) * replicas, micro_steps)
        is_undivided = is_repeated or (replicas * micro_steps == 1 and worker_slice is None)
        rows = number_of_rows(data) if is_undivided else _common_rows(data)
        if rows is None:
            return cls((micro_steps,) * replicas, (0,) * replicas, micro_steps, is_fixed=True)
        if is_repeated:
            on_first = (rows, *[0] * (replicas - 1))
            return cls(on_first, (0,) * replicas, micro_steps, is_repeated=True)
        first = 0
        if worker_slice:
            rows, first = worker_slice.batch_rows, worker_slice.first_row
        sizes = [_size(rows, replica, replicas) for replica in range(replicas)]
        starts = [rows * replica // replicas - first for replica in range(replicas)]
        for_gpus = computes_on_gpus(strategy) and not tf.executing_eagerly()
        return cls(tuple(sizes), tuple(starts), micro_steps, for_gpus=for_gpus)

    def take(self, data, replica: int, micro_step: Number, hides_rows: bool = False):
        """Returns (rows of `data`, their `RowShare`) of a replica in a micro-step.

        Args:
            data: a batch.
            replica: index of the replica.
            micro_step: index of the micro-step.
            hides_rows: whether the tensors have an unknown number of rows. Defaults to False.
        """
        mine = self.sizes[replica]
        size = _size(mine, micro_step, self.micro_steps)
        micro_rows = sum(_size(rows, micro_step, self.micro_steps) for rows in self.sizes)
        smallest = min(self.sizes) if _all_known(self.sizes) else 0
        share = RowShare(size, micro_rows, sum(self.sizes), smallest < self.micro_steps)
        if self.is_fixed:
            return data, share
        if self.is_repeated:
            repeated = {"is_repeated": True, "may_be_empty": True, "tensors": leaves_of(data)}
            return data, dataclasses.replace(share, **repeated)
        if len(self.sizes) * self.micro_steps == 1:  # all rows, also of other tensors
            taken = with_unknown_rows(data) if hides_rows else data
            return taken, dataclasses.replace(share, tensors=leaves_of(taken))
        first, shown = self.starts[replica] + mine * micro_step // self.micro_steps, size
        if share.may_be_empty:
            rows = number_of_rows(data)
            first, shown = (
                tf.maximum(tf.minimum(first, tf.subtract(rows, 1)), 0),
                tf.maximum(size, 1),
            )
        with tf.device("CPU:0"):  # where the batch is; only a share is copied
            taken = keras.tree.map_structure(lambda leaf: _rows_of(leaf, first, shown), data)
            if self.for_gpus:
                taken = in_page_locked_memory(taken)
        if hides_rows or (isinstance(size, int) and size == 1):
            taken = with_unknown_rows(taken)  # else a constant per row and one for all look alike
        return taken, dataclasses.replace(share, tensors=leaves_of(taken))


def in_page_locked_memory(data):
    """Returns a batch of the host whose dense tensors a GPU can read without waiting for the host.

    It is called on the host's device inside a function. TensorFlow allocates the result of an
    operation in page-locked memory if a GPU is to have it, but not the batches of `tf.data`. From
    those it copies in small pieces, which begin when the GPU has ended the step before, and no
    other work is sent to the GPU meanwhile: 11 ms for 77 MB on an H200, which takes 1.5 ms.
    """

    def copied(leaf):
        if not isinstance(leaf, tf.Tensor):
            return leaf
        kind = leaf.dtype
        is_number = kind.is_floating or kind.is_integer or kind.is_bool
        return tf.raw_ops.Snapshot(input=leaf) if is_number else leaf

    return keras.tree.map_structure(copied, data)


def tensors_of(data):
    """Returns all tensors in a structure, those that ragged and sparse ones consist of as well."""
    return tuple(filter(tf.is_tensor, tf.nest.flatten(data, expand_composites=True)))


def leaves_of(data):
    """Returns all tensors in a structure, dense, ragged, or sparse."""
    return tuple(filter(tf.is_tensor, tf.nest.flatten(data)))


def number_of_rows(data) -> Number | None:
    """Returns the rows of a batch's first tensor: an int if known; None without rows."""
    leaf = next(filter(_has_rows, keras.tree.flatten(data)), None)
    return None if leaf is None else _rows(leaf)


def _rows(leaf):
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if leaf.shape[0] is not None:
        return int(leaf.shape[0])
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf, out_type=tf.int32)[0]


class DifferentRowsError(ValueError):
    """The tensors of a batch have different numbers of rows, which cannot be divided alike."""


_DIFFERENT_ROWS = (
    "The tensors of a batch have different numbers of rows, such as labeled and unlabeled "
    "examples, or the nodes and the edges of graphs. What belongs together is not known, so that "
    'the batch is not divided: compile(..., gather_batch="step") lets every replica compute all of '
    "it. To divide it, give each tensor one row per example: (rows, parts of an example, …)"
)


def is_distributed(data) -> bool:
    """Returns True if a batch is already divided among replicas."""
    return any(isinstance(x, tf.distribute.DistributedValues) for x in keras.tree.flatten(data))


def _common_rows(data) -> Number | None:
    """Returns the rows of all tensors of a batch, or None without rows.

    Raises an error if their numbers differ: a DifferentRowsError, or, if a number is not known
    before the step runs, an InvalidArgumentError of the step.
    """
    leaves = list(filter(_has_rows, keras.tree.flatten(data)))
    rows = [_rows(leaf) for leaf in leaves]
    if len({number for number in rows if isinstance(number, int)}) > 1:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise DifferentRowsError(f"{_DIFFERENT_ROWS}. Shapes: {shapes}")
    if len(rows) > 1 and not _all_known(rows):
        is_equal = tf.reduce_all(tf.equal(tf.stack(rows[1:]), rows[0]))
        # tf.debugging.assert_equal would add a conditional to every step.
        tf.raw_ops.Assert(condition=is_equal, data=[_DIFFERENT_ROWS, tf.stack(rows)])
    return rows[0] if rows else None


def with_unknown_rows(data):
    """Returns the same tensors, of which it is unknown until the step runs how many rows they have.

    TensorFlow computes what follows from a known number of rows while it traces. Positions of words
    of each row then look like a constant, which `kdist.training.replica.dependence` cannot tell
    from positions that do not depend on the batch.
    """

    def unknown(leaf):
        is_dense = isinstance(leaf, tf.Tensor) and leaf.shape.rank
        if not is_dense or leaf.shape[0] is None:
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return keras.tree.map_structure(unknown, data)


def _has_rows(leaf):
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        return True
    return hasattr(leaf, "shape") and len(leaf.shape) > 0


def _all_known(numbers):
    return all(isinstance(number, int) for number in numbers)


def _size(rows, part, parts):
    if isinstance(rows, int) and rows % parts == 0:
        return rows // parts  # also if `part` is a tensor
    return rows * (part + 1) // parts - rows * part // parts


def _rows_of(leaf, first, number):
    """Returns `leaf[first:first + number]`; the number of dense or sparse rows stays static."""
    if not _has_rows(leaf):
        return leaf
    if isinstance(leaf, tf.RaggedTensor):
        rows = leaf[first : first + number]
        # Sums of rows would be sums of a fixed number of segments, such as of classes.
        splits = with_unknown_rows(rows.row_splits)
        return tf.RaggedTensor.from_row_splits(rows.values, splits, validate=False)
    if isinstance(leaf, tf.SparseTensor):
        rows = _sparse_rows(leaf, tf.cast(first, tf.int64), tf.cast(number, tf.int64))
    else:
        rows = leaf[first : first + number]
    if hasattr(rows, "set_shape"):
        rows.set_shape([number if isinstance(number, int) else None, *leaf.shape[1:]])
    return rows


def _sparse_rows(leaf, first, number):
    rest = leaf.dense_shape[1:]
    start = tf.concat([[first], tf.zeros_like(rest)], 0)
    return tf.sparse.slice(leaf, start, tf.concat([[number], rest], 0))


def fraction(part: Number, whole: Number):
    """Returns part / whole, a float64 number or scalar tensor; 0 if `whole` is 0."""
    if isinstance(part, int) and isinstance(whole, int):
        # TensorFlow rounds a float of Python to float32 before it casts it to another type.
        return np.float64(part / whole if whole else 0.0)
    return tf.math.divide_no_nan(tf.cast(part, tf.float64), tf.cast(whole, tf.float64))
