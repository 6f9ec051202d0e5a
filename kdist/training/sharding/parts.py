"""Tensors in parts of equal size, and variables whose copies on the replicas are such parts."""

import abc
import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from kdist.compat.tensorflow import first_replica, refuse_checkpoints
from kdist.layout import Layout
from kdist.training.divided_variable import DividedVariable
from kdist.training.replica.reduction import gathered_on_workers
from kdist.training.scopes import num_local_replicas, variable_like
from kdist.training.sharding import sizes
from kdist.training.sharding.sizes import PartSizes


class TensorDivision(abc.ABC):
    """Division of a tensor among replicas, each of which has a part.

    Attributes:
        shape: shape of the tensor.
    """

    shape: tuple[int, ...]

    @abc.abstractmethod
    def part(self, value, number: int) -> tf.Tensor:
        """Returns part `number` of a tensor."""

    @abc.abstractmethod
    def merge(self, parts: Sequence) -> tf.Tensor:
        """Returns the tensor that has these parts."""

    @abc.abstractmethod
    def merge_over_workers(self, strategy: tf.distribute.Strategy, parts: Sequence) -> np.ndarray:
        """Returns the tensor, given this worker's parts. All workers must call it together."""


@dataclasses.dataclass(frozen=True)
class EqualParts(PartSizes, TensorDivision):
    """Division of a tensor into parts of equal size, of which the last ones are padded with zeros.

    Args:
        shape: shape of the tensor.
        count: number of parts.
    """

    def part(self, value, number):
        size, rows = self.part_shape[0], self._shape_of_rows[0]
        first, last = min(number * size, rows), min((number + 1) * size, rows)
        return _padded(tf.reshape(value, self._shape_of_rows)[first:last], size)

    def stacked(self, value) -> tf.Tensor:
        """Returns all parts of a tensor as one tensor of shape (count, …)."""
        size, *others = self.part_shape
        rows = _padded(tf.reshape(value, self._shape_of_rows), self.count * size)
        return tf.reshape(rows, (self.count, size, *others))

    def merge(self, parts):
        rows = tf.concat(parts, 0)
        if rows.shape[0] != self._shape_of_rows[0]:
            rows = rows[: self._shape_of_rows[0]]
        return rows if self.is_by_rows else tf.reshape(rows, self.shape)

    def merge_over_workers(self, strategy, parts):
        return self.merge(gathered_on_workers(strategy, parts)).numpy()

    def slices_of(self, gradient: tf.IndexedSlices, number: int) -> tf.IndexedSlices:
        """Returns the rows of a sparse gradient that belong to part `number`."""
        size, *others = self.part_shape
        first = tf.cast(number * size, gradient.indices.dtype)
        indices = gradient.indices - first
        is_own = tf.logical_and(indices >= 0, indices < size)
        return tf.IndexedSlices(
            tf.boolean_mask(gradient.values, is_own),
            tf.boolean_mask(indices, is_own),
            tf.constant([size, *others], indices.dtype),
        )


def _padded(rows, number):
    """Returns a tensor with rows of zeros at its end, so that it has `number` rows."""
    missing = number - rows.shape[0]
    return tf.pad(rows, [[0, missing], *[[0, 0]] * (rows.shape.rank - 1)]) if missing else rows


@dataclasses.dataclass(frozen=True)
class _Copy:
    """One replica's copy of a variable, as a piece of a `DividedVariable`."""

    value: tf.Variable
    path: str

    @property
    def dtype(self):
        return self.value.dtype.name

    def numpy(self):
        """Returns the value of the copy."""
        return self.value.numpy()

    def assign(self, value):
        """Assigns the copy."""
        self.value.assign(value)


@dataclasses.dataclass(frozen=True)
class DividedCopies(DividedVariable):
    """A whole weight or slot, whose parts are the copies of a variable.

    Where the parts are divided over workers, each has those of its own replicas.
    """

    division: TensorDivision = EqualParts((), 1)
    strategy: tf.distribute.Strategy | None = None

    @classmethod
    def of(cls, variable: keras.Variable, division: TensorDivision) -> "DividedCopies":
        """Returns the whole variable, whose parts the copies of `variable` hold."""
        pieces = [_Copy(copy, variable.path) for copy in copies_of(variable)]
        strategy = variable._value.distribute_strategy
        return cls(pieces, division=division, strategy=strategy)  # type: ignore[arg-type]

    @property
    def is_divided_over_workers(self):
        return divides_over_workers(self.strategy)

    def concatenate(self, values):
        if self.is_divided_over_workers:
            return self.division.merge_over_workers(self.strategy, values)
        return self.division.merge(values).numpy()

    def parts(self, value):
        first = first_part(self.strategy)
        parts = [self.division.part(value, first + number) for number in range(len(self.pieces))]
        # A slice of a tensor keeps all of it.
        return [np.array(part) if tf.executing_eagerly() else part for part in parts]

    @property
    def shape(self):
        return self.division.shape


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """A weight, and the variable whose copy on each replica holds a part of it.

    Attributes:
        weight: the weight.
        variable: the variable of the parts.
        division: the division of the weight into parts.
        is_only_copy: whether no device holds the whole weight, which has to be gathered.
    """

    weight: keras.Variable
    variable: keras.Variable
    division: EqualParts
    is_only_copy: bool = False

    @classmethod
    def of(
        cls, weight: keras.Variable, strategy: tf.distribute.Strategy, is_only_copy: bool = False
    ) -> "Shard":
        """Returns the shard of a weight, whose parts are zero."""
        division = EqualParts(tuple(weight.shape), num_parts(strategy))
        return cls(weight, variable_like(weight, division.part_shape), division, is_only_copy)

    @property
    def copies(self) -> Sequence[tf.Variable]:
        """Part of each replica, in their order."""
        return copies_of(self.variable)

    @property
    def whole(self) -> DividedVariable:
        """The weight as files and checkpoints see it."""
        return DividedCopies.of(self.variable, self.division)

    @property
    def is_divided_over_workers(self) -> bool:
        """True if each of several workers has some of the parts."""
        return self.whole.is_divided_over_workers


def refuse_part_in_checkpoints(variable: keras.Variable, kind: str):
    """Lets TensorFlow's checkpoints raise a ValueError where they save a divided variable.

    Args:
        variable: the variable.
        kind: what it is in the message: "weight" or "slot".
    """
    refuse_checkpoints(
        variable,
        f"the {kind} {variable.path} is sharded, and tf.train.Checkpoint would store the part of "
        "one device. Use kdist.callbacks.Checkpoint, or model.save with a .keras file",
    )


def copies_of(variable: keras.Variable) -> Sequence[tf.Variable]:
    """Returns the copy of each replica of this process, in the variable's own type."""
    return variable._value.values


def sharded_state(strategy: tf.distribute.Strategy) -> str | None:
    """Returns what the replicas of a strategy divide among themselves, such as `"optimizer"`."""
    layout = getattr(strategy, "layout", None)
    is_alone = strategy.num_replicas_in_sync == 1
    return layout.shard if isinstance(layout, Layout) and not is_alone else None


def num_parts(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of replicas that divide state: those of the job, or of this process.

    A process with several devices holds all weights, as these are gathered again and again, and
    messages between processes are slow. Without divided state it is 1.
    """
    state, local = sharded_state(strategy), num_local_replicas(strategy)
    if state is None:
        return 1
    return local if state == "weights" and local > 1 else strategy.num_replicas_in_sync


def divides_over_workers(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if each of several workers has some of the parts."""
    return num_parts(strategy) > num_local_replicas(strategy)


def first_part(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of the part that the first replica of this process has."""
    return first_replica(strategy) if divides_over_workers(strategy) else 0


def is_large(shape: Sequence[int], dtype: str, strategy: tf.distribute.Strategy) -> bool:
    """Returns True if a strategy that divides state divides that of a weight of this size."""
    limit = strategy.layout.min_shard_bytes
    return sizes.is_large(shape, tf.as_dtype(dtype).size, num_parts(strategy), limit)
