"""A replica's rows as micro-batches, and the scaling of their losses.

A replica's loss does not depend on the number of micro-batches:

- A mean over rows is the sum of the micro-batches' means, each scaled by its fraction of the rows.
  Micro-batches need not be equal.
- A mean over a mask or over sample weights is a sum divided by the mask or the weights of *all*
  rows. These divisors are known before the first forward pass: they come from an inference pass
  over all rows, of which TensorFlow computes only what the masks depend on. In most models that is
  a comparison of the inputs, and loops that read variables, such as those of RNNs.
- With fewer rows than micro-batches, some are empty. They process a row of another micro-batch
  (`kdist.training.replica.row_shares`) with weight zero, and what layers and metrics write
  for them is undone.

A stage that recomputes repeats a forward pass with the same inputs, seeds and statistics. The
checks refuse models for which the second pass could differ or write again.
"""

import contextlib
import warnings
from typing import cast

import keras
import tensorflow as tf

from kdist.layout import Layout
from kdist.training.recompute import check_written, repetition
from kdist.training.replica import step as steps
from kdist.training.replica.colocation import colocate_with_inputs
from kdist.training.replica.dependence import fallbacks
from kdist.training.replica.row_shares import BatchDivision, RowShare, number_of_rows

_REMEDY = "remove recompute from the layout"


class MicroBatches:
    """The micro-batches of one replica's step: their data (`parts`) and `MicroBatchStep`s
    (`steps`).

    The replica's data are (x, y, sample_weight), each of shape (B, …) in any structure. Of M,
    micro-batch m has rows B·m // M to B·(m + 1) // M. `loss_place` returns the context in which a
    loss is computed.
    """

    def __init__(self, model, data, number: int, loss_place):
        self._model, self._data, self._loss_place = model, data, loss_place
        self._step = cast(steps.ReplicaStep, steps.current())
        self._divisors: list | None = None
        division = BatchDivision((number_of_rows(data),), (0,), number)
        taken = [division.take(data, 0, micro_batch) for micro_batch in range(number)]
        self.parts = [part for part, _ in taken]
        for part in self.parts:
            self._step.dependence.note_parts(part, data)
        self._step.note_micro_batches([share.rows for _, share in taken])
        weights = {id(weight) for weight in model.weights}
        self.steps = [
            MicroBatchStep(self._step, share, self._divisor, weights) for _, share in taken
        ]

    def concatenate(self, tensors):
        """Returns the micro-batches' tensors as one (B, …), without rows of empty micro-batches."""
        own = [
            tensor[: micro.micro_share.rows] if micro.micro_share.may_be_empty else tensor
            for tensor, micro in zip(tensors, self.steps, strict=True)
        ]
        self._step.dependence.note_parts(own, tensors)
        return self._step.dependence.note_in_order(tf.concat(own, 0))

    def _divisor(self, number):
        """Returns (divisor of all of the replica's rows, correction) of the loss `number`."""
        if self._divisors is None:
            x, y, sample_weight = self._data
            dry_run = _DryRun(self._step)
            with tf.name_scope("divisors"), steps.activate(dry_run):
                y_pred = self._model(x, training=False)
                with self._loss_place():
                    self._model._compute_loss(x, y, y_pred, sample_weight, training=True)
            self._divisors = dry_run.divisors
        return self._divisors[number]


class _StepProxy:
    """A step that delegates what it does not define to another step."""

    def __init__(self, step):
        self._step = step

    def __getattr__(self, name):
        return getattr(self._step, name)

    def scaled_by_rows_of_batch(self, values):
        """Returns values of rows unchanged: `as_mean` corrects those of a pipeline."""
        return values


class _DryRun(_StepProxy):
    """Records the divisor of each loss of the whole rows, and computes nothing else.

    `divisors` holds (scalar, correction of a loss that is a sum divided by it) of each loss.
    """

    is_dry_run = True

    def __init__(self, step):
        super().__init__(step)
        self.divisors: list[tuple] = []

    def correct_mean(self, loss, divisor, rows):
        """Records a divisor. `ReplicaStep.correct_mean` is proportional to the loss."""
        correction = self._step.correct_mean(tf.ones([], loss.dtype), divisor, rows)
        self.divisors.append((tf.cast(divisor, loss.dtype), correction))
        return loss

    def as_mean(self, value, is_loss=True):
        """Returns the value unchanged, as it has no divisor."""
        return value


class MicroBatchStep(_StepProxy):
    """The replica's step while a micro-batch passes through a stage.

    Losses are scaled by the fraction of the replica's rows in `micro_share`. A synchronized
    BatchNormalization weights replicas by their rows of the step, not of the micro-batch. `divisor`
    is a function of the number of a loss that returns (divisor of all of the replica's rows,
    correction). `weights` are the ids of the model's. `added_losses` are those that layers added
    for this micro-batch.
    """

    can_recompute = False  # a layout has an option of its own

    def __init__(self, step, share: RowShare, divisor, weights: set[int]):
        super().__init__(step)
        self.micro_share = share
        self.added_losses: list = []
        self._divisor, self._weights = divisor, weights
        self._means = 0
        self._before: dict | None = None

    def scaled(self, loss):
        """Returns the micro-batch's part of the replica's loss.

        A scalar is scaled by the fraction of rows. Values per row are unchanged, or zero if the
        micro-batch is empty.
        """
        if loss.shape.rank:
            counted = loss * tf.cast(self.micro_share.rows > 0, loss.dtype)
            # The factor looks as if it depended on the batch.
            self.dependence.note_parts(counted, loss)
            return counted
        return self.note_mean(loss * tf.cast(self.micro_share.batch_fraction, loss.dtype))

    def batch_fraction(self, dtype):
        """Returns the micro-batch's fraction of the rows of the batch."""
        return self._step.batch_fraction(dtype) * tf.cast(self.micro_share.batch_fraction, dtype)

    def as_mean(self, value, is_loss=True):
        """Returns the sum of a tensor, of which sums over rows make the `scaled` parts add up.

        Raises:
            KnownRowsError: a constant, by which a sum is divided, may be the number of rows.
        """
        self.dependence.check_rows_are_unknown()
        total = tf.convert_to_tensor(value)
        total = tf.reduce_sum(total) if total.shape.rank else total
        return self.note_mean(steps.with_correct_sums(self, total, is_loss))

    def note_mean(self, value):
        """Records that a value is a mean over rows; warns if these were combined before."""
        if self.dependence.of(value).mixes_rows:
            fallbacks.fall_back(
                self._step,
                f"the loss {value.name!r} combines rows of the batch with each other. Use a "
                "layout with micro_batches=1, or accept the loss of each micro-batch's rows by "
                'compile(loss_reduction="mean")',
                "Each micro-batch has its own rows only, so that the result is not that of one "
                "device",
            )
        return self._step.note_mean(value)

    def correct_sum(self, loss):
        """Returns a sum over rows such that the `scaled` parts add up to the replica's loss."""
        return self._undo_scaling(self._step.correct_sum(loss))

    def correct_mean(self, loss, divisor, rows):
        """Returns a mean by another divisor than rows, such that the `scaled` parts add up."""
        of_all, correction = self._divisor(self._means)
        self._means += 1
        part = tf.math.divide_no_nan(loss * tf.cast(divisor, loss.dtype), of_all)
        return self._undo_scaling(part * correction)

    def _undo_scaling(self, loss):
        fraction = tf.cast(self.micro_share.batch_fraction, loss.dtype)
        return self._step.note_mean(tf.math.divide_no_nan(loss, fraction))

    @contextlib.contextmanager
    def running(self, is_repeated: bool = False):
        """Makes the hooks use this step; undoes what is written if the micro-batch is empty.

        Yields a list that is filled with (variable, its value before) for what was written, which
        is needed if the forward pass `is_repeated`. Raises ValueError if that would write trained
        weights.
        """
        undoes = self.micro_share.may_be_empty
        before: dict[int, tuple] = {}
        state: list[tuple] = []
        self._before = before if undoes or is_repeated else None
        with steps.activate(self):
            yield state
            state += [(variable, value) for variable, _, value in before.values()]
            if undoes:
                with colocate_with_inputs():
                    for _, copy, value in before.values():
                        copy.assign(tf.where(self.micro_share.rows > 0, copy, value))
        self._before = None
        if is_repeated:
            check_written(state, _REMEDY)

    @contextlib.contextmanager
    def running_again(self, state):
        """Makes the hooks use this step for a second forward pass, which writes nothing.

        Seeds and all other written variables have the values of `state`, which `running` yielded,
        so that random numbers are the same. Raises ValueError if an operation could return
        something else, or writes again.
        """
        self._means = 0
        with steps.activate(self), repetition(state, _REMEDY):
            yield

    def note_written(self, variable: keras.Variable, value):
        """Records that a layer or a metric is about to write `value` to `variable`."""
        self._step.note_written(variable, value)
        if id(variable) in self._weights and not self.is_normalizing:
            warnings.warn(
                f"a layer writes {variable.path!r} once in each of {self.micro_batches} "
                "micro-batches. If it counts steps, such as for annealing, divide it by their "
                "number, or use a layout with micro_batches=1",
                stacklevel=2,
            )
        if self._before is not None and id(variable) not in self._before:
            copy = self._step.local(variable._value)
            with colocate_with_inputs():
                self._before[id(variable)] = variable, copy, tf.identity(copy)


def check_micro_batches(model: keras.Model, layout: Layout):
    """Raises ValueError if a layer needs the whole batch; warns if the inputs have a fixed one.

    Layers that are synchronized over replicas need it because micro-batches may differ in size.
    """
    if layout.micro_batches == 1:
        return
    for tensor in model.inputs:
        if tensor.shape[0] is not None:
            warnings.warn(
                f"the input {tensor.name!r} has a fixed batch of {tensor.shape[0]} rows, and each "
                "of its micro-batches has fewer. If the model fails, leave batch_size out of "
                "keras.Input and use keras.ops.shape(x)[0], or use a layout with micro_batches=1",
                stacklevel=3,
            )
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"{layer.name!r} is stateful: it keeps a state for each row of a batch, and a "
                "micro-batch has other rows. Use stateful=False, or a layout with micro_batches=1"
            )
        if layout.data > 1 and getattr(layer, "synchronized", False):
            raise ValueError(
                f"{layer.name!r} is synchronized over replicas, whose micro-batches may differ in "
                "size. Remove synchronized, or micro_batches"
            )
