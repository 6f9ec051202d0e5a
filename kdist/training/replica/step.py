"""One replica's part of a step, and the points at which replicas interact.

kdist runs the model's `train_step` on each replica as though that replica were alone. Its losses
are means over its own rows, and no user code depends on the number of replicas. A `ReplicaStep`
makes the result that of the whole batch. The hooks in `kdist.training.replica.hooks` call it at the
few points where replicas interact:

- Each replica's loss is scaled by its fraction of the global batch before it is differentiated, so
  that gradients are simply added up:
  sum over replicas of (rows of r / rows) · mean over rows of r = mean over rows.
  Sums over rows are added up as they are. The step's graph tells which of both a loss is
  (`kdist.training.replica.dependence`).
- The optimizer receives the gradient of the global batch. It is reduced first, and then clipped,
  checked for infinity, averaged, and applied by Keras's own code, on each replica's own copy of the
  variables.
- State that layers write, such as the moving statistics of a BatchNorm, is averaged at the end of
  the step.
- Random numbers are drawn from seeds that depend on the replica.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import threading
import types
from collections.abc import Mapping
from typing import NamedTuple

import keras
import tensorflow as tf

from kdist.compat.tensorflow import is_recorded
from kdist.training.replica.batch_functions import (
    FunctionOfBatch,
    UnknownFunctionError,
    find_function,
)
from kdist.training.replica.colocation import colocate_with_inputs, outer_tensor
from kdist.training.replica.dependence import fallbacks
from kdist.training.replica.dependence.of_step import (
    StepDependence,
    is_eager,
    is_in_graph,
)
from kdist.training.replica.dependence.values import MEAN, ROWS, SUM, Dependence
from kdist.training.replica.gradients import (
    SplitSlices,
    scale_gradient,
    summed_tensors,
    values_of,
    with_shape_of,
    with_summed_tensors,
    zero_unless,
)
from kdist.training.replica.reduction import all_reduce_sum
from kdist.training.replica.row_shares import RowShare
from kdist.training.replica.shared_trace import NotSharedError

_logger = logging.getLogger(__name__)
_this_thread = threading.local()

# Large odd stride, so that per-replica seeds never collide.
_SEED_STRIDE = 0x9E3779B1
_STATE_OF_SEEDS = "seed_generator_state"  # name of the variable of a SeedGenerator


def current() -> "ReplicaStep | None":
    """Returns the step that runs in this thread, or None."""
    return getattr(_this_thread, "step", None)


@contextlib.contextmanager
def activate(step):
    """Returns a context manager in which hooks of this thread call `step`."""
    before, _this_thread.step = current(), step
    try:
        yield step
    finally:
        _this_thread.step = before


class ReplicaStep:
    """One replica's part of one micro-step.

    Args:
        share: its `RowShare`.
        replica: its index in the job, from 0.
        local_replica: its index on this worker, from 0.
        replicas: number of replicas in the job.
        has_copies: whether each replica has its own copy of every variable and updates it.
        accumulators: gradient sums of micro-steps, an `Accumulators`; None for a single one.
        is_last: whether this is the last micro-step, which applies the gradients.
        has_group: whether the replica has several devices. Operations on a gradient or a variable
            then run on its device. Defaults to False.

    Attributes:
        dependence: how the step's tensors depend on the batch, a `StepDependence`.
        is_dry_run: nothing of this step is kept, not even in metrics.
        is_whole_loss: the loss that is computed is that of the whole batch, on each replica.
        loss_reduction: "mean" or "sum", if the program declares what the scalar losses of its own
            `train_step` are over the rows; "auto" reads it from the graph.
        own_metrics: {id of a variable: metric} of metrics that are not Keras's own.
        micro_batches: the number of a pipeline's micro-batches.
        reduces_early: the gradients of tapes are those of the global batch. Otherwise gradients are
            reduced when an optimizer applies them, which is the same if a program does not change
            them before, or only linearly.
        needs_whole_gradients: the program changes gradients in another way, such as clipping.
        communicates: replicas interact in the step, and not only between steps.
        may_repeat: the step may raise `WholeBatchError`.
        shared_trace: the `SharedTrace` of the replicas' forward and backward passes, or None.
        is_assigning: a Keras variable is being assigned.
        is_normalizing: a BatchNormalization is being computed.
        can_recompute: whether activations can be computed again in the backward pass.
        has_warned: a warning of `fallbacks` was shown.
    """

    is_dry_run = False
    is_whole_loss = False
    loss_reduction = "auto"
    own_metrics: Mapping[int, keras.metrics.Metric] = types.MappingProxyType({})
    micro_batches = 1
    reduces_early = False
    needs_whole_gradients = False
    communicates = True
    may_repeat = False
    shared_trace = None
    is_assigning = False
    is_normalizing = False
    can_recompute = True

    def __init__(
        self,
        share: RowShare,
        replica: int,
        local_replica: int,
        replicas: int,
        has_copies: bool,
        accumulators,
        is_last: bool,
        has_group: bool = False,
    ):
        self.share = share
        self.dependence = StepDependence(share)
        self.replica = replica
        self.local_replica = local_replica
        self.replicas = replicas
        self.has_copies = has_copies
        self.applying = False
        self._accumulators = accumulators
        self.is_last = is_last
        self.added: dict[int, list] = {}  # losses by the id of the layer that added them
        self._colocation = colocate_with_inputs if has_group else contextlib.nullcontext
        self._called_by: set[int] = set()  # optimizers whose `scale_loss` was called
        self._scaled_by: set[int] = set()  # those of them for which it has scaled a loss
        self._differentiates_sum = self.has_warned = False
        self._graph = tf.compat.v1.get_default_graph()
        self._written: dict[int, keras.Variable] = {}
        self._before: dict[int, tuple | None] = {}  # values before changes that are not kept
        self._functions: dict[int, tuple] = {}
        # Variables that the last micro-step updates, and the number of operations before.
        self._waiting: dict[int, tuple[keras.Variable, int]] = {}

    def running(self):
        """Makes this step the one that hooks call."""
        return activate(self)

    @property
    def is_running(self) -> bool:
        """True if hooks of this thread call this step."""
        return current() is self

    # Functions that several replicas call.

    def in_function(self, share, replica):
        """Returns the step with which such a function is traced.

        Args:
            share: a `RowShare` of the function's arguments.
            replica: the index of the replica, an int32 scalar.
        """
        inner = copy.copy(self)
        inner.dependence = self.dependence.in_function(share, replica)
        inner.share, inner.replica = share, replica
        inner.added, inner._written, inner._functions = {}, {}, {}
        inner._called_by, inner._scaled_by = set(), set()
        inner._before = {}
        inner._graph = tf.compat.v1.get_default_graph()
        inner.shared_trace = None  # all replicas make the same calls, but one traces this function
        return inner

    def take_over(self, inner, found, outputs):
        """Records what a function did that this replica has called.

        Args:
            inner: the step with which it was traced.
            found: the result of `found` of its dependence.
            outputs: the outputs of the call.
        """
        self._called_by |= inner._called_by
        self._scaled_by |= inner._scaled_by
        self._written.update(inner._written)
        self.needs_whole_gradients |= inner.needs_whole_gradients
        self.dependence.take_over(found, outputs)

    def _call(self, part, function, *args):
        """Returns `function(*args)`, of a part of the step in which replicas do not meet.

        The function takes the step from `current()`.
        """
        if self.shared_trace is not None:
            with contextlib.suppress(NotSharedError):
                return self.shared_trace.call(self, part, function, *args)
        return function(*args)

    def _all_reduce_sum(self, tensors):
        call = None if self.shared_trace is None else self.shared_trace.map
        return all_reduce_sum(tensors, call) if tensors else []

    # Losses.

    def scale_loss(self, loss, optimizer):
        """Returns the loss to differentiate; the gradients of `optimizer` need no further scaling.

        A loss with one value per row (reduction "none") is not scaled: its gradient is that of the
        sum, which does not depend on the division of rows.
        """
        self._called_by.add(id(optimizer))
        loss = tf.convert_to_tensor(loss)
        if is_eager(loss) or self.loss_reduction != "auto":
            # Nothing would show that what the program computes of it has been scaled. Gradients
            # are scaled instead.
            return loss
        self._scaled_by.add(id(optimizer))
        self.check_loss(loss)
        if not loss.shape.rank or self.mixes_rows(loss):
            scaled = self.as_mean(loss) * tf.cast(self.weight, loss.dtype)
            return self.dependence.note(scaled, SUM)
        self._check_not_gathered("a loss with one value per row")
        is_mean = {degree for *_, degree in self._terms(loss)} == {0}
        weight = self.weight if is_mean else self.sum_weight
        return self.dependence.note(loss if weight is None else scale_gradient(loss, weight), ROWS)

    def has_scaled(self, optimizer) -> bool:
        """Returns True if the step has called the optimizer's `scale_loss`."""
        return id(optimizer) in self._called_by

    def as_mean(self, value, is_loss=True):
        """Returns a scalar whose mean over replicas, weighted by their rows, is the global value.

        Means and constants are returned as they are, and sums over rows are corrected.

        Args:
            value: a scalar, or a tensor that represents the sum of its elements.
            is_loss: whether to warn if the graph does not tell what `value` is. Defaults to True.
        """
        value = tf.convert_to_tensor(value)
        self.dependence.check_counts_no_rows(value)
        if value.shape.rank:
            (*_, degree) = self._terms(value)[0]
            total = tf.reduce_sum(value)
            if is_eager(value):
                return self.note_mean(self.correct_sum(total) if degree == 1 else total)
            value = total
        if (function := self._function_of_batch(value, is_loss)) is not None:
            return self.note_mean(function.replica_value() if is_loss else function.value)
        return with_correct_sums(self, value, is_loss)

    def log_parts(self, outputs, results):
        """Returns {name: this micro-step's part} of the logs that depend on the rows.

        The log of the batch is the sum of the parts over micro-steps, and their mean over replicas.

        Args:
            outputs: what the step returned.
            results: the ids of results of metrics, which are read after the step.
        """
        if not isinstance(outputs, dict):
            return {}
        return {
            name: self._log_part(value)
            for name, value in outputs.items()
            if id(value) not in results and self._is_divided_log(value)
        }

    def _is_divided_log(self, value):
        if not isinstance(value, tf.Tensor) or value.shape.rank != 0:
            return False
        if is_eager(value):
            return value.dtype.is_floating
        self.dependence.check_counts_no_rows(value)
        is_number = value.dtype.is_floating or value.dtype.is_integer
        return is_number and not self.dependence.of(value).is_fixed

    def _log_part(self, value):
        if value.dtype.is_integer:  # such as a number of correct predictions
            value = tf.cast(value, tf.float64)
        weight = tf.cast(self.share.batch_fraction, value.dtype) * self.replicas
        value = value if is_eager(value) else self.as_mean(value, is_loss=False)
        return tf.math.multiply_no_nan(value, weight)

    def tape_gradient(self, gradient, target, sources):
        """Returns `gradient(target, sources)` and records whether it is that of a mean or a sum.

        Only the gradient of a sum of both, or of another function of means and sums, is another:
        that of the loss of the global batch, as if it consisted of repetitions of this replica's
        rows.

        Args:
            gradient: the method of a tape: a function of the target, sources, and gradients of
                the target or None.
            target: the tensors to differentiate.
            sources: variables or tensors.
        """
        targets, flat = keras.tree.flatten(target), keras.tree.flatten(sources)
        if not all(isinstance(t, tf.Tensor) for t in targets):
            return gradient(target, sources, None)
        to_variables = any(map(self.dependence.is_weight, flat))
        if to_variables:
            self.check_loss(*targets)
            for one in targets:
                self.dependence.check_counts_no_rows(one)
        terms, is_function = [], False
        for one in targets:
            function = self._function_of_target(one) if to_variables else None
            is_function |= function is not None
            terms += function.terms if function else self._terms(one, to_variables, to_variables)
        degrees = {degree for *_, degree in terms}
        if to_variables and 1 in degrees and not self._scaled_by:
            self._check_not_gathered("a loss that is a sum")
        if to_variables and (is_function or degrees == {0, 1}):
            corrections = [
                tf.cast(f, t.dtype) * (self.correct_sum(tf.ones_like(t)) if d else tf.ones_like(t))
                for f, t, d in terms
            ]
            found = gradient([t for _, t, _ in terms], sources, corrections)
            degrees = {0}
        else:
            self._differentiates_sum = degrees == {1}
            found = gradient(target, sources, None)
            self._differentiates_sum = False
        degree = degrees.pop() if len(degrees) == 1 else None
        self.dependence.note_gradients(flat, found, degree, any(map(self.mixes_rows, targets)))
        if self._can_reduce_early():
            return self._reduced_early(found, flat)
        if to_variables and self.reduces_early and any(map(is_eager, targets)):
            self._check_is_unchanged(leaves_no_graph=True)
        return found

    def watched(self, tensors):
        """Returns what a tape watches if a program lets it watch `tensors`."""
        return tensors

    def _can_reduce_early(self):
        is_here = tf.compat.v1.get_default_graph() is self._graph and not is_recorded()
        is_whole = self.replicas > 1 and self._accumulators is None
        return self.reduces_early and is_here and is_whole

    def _reduced_early(self, found, sources):
        """Returns gradients of a tape; those with respect to variables are of the global batch."""
        flat = keras.tree.flatten(found)
        are_weights = map(self.dependence.is_weight, sources)
        own = [g if is_one else None for g, is_one in zip(flat, are_weights, strict=True)]
        with self._colocation():
            own = self.reduced(self._scaled_by_rows(own, bool(self._scaled_by)))
        self.dependence.note_reduced_gradients(own)
        both = [g if o is None else o for g, o in zip(flat, own, strict=True)]
        return keras.tree.pack_sequence_as(found, both)

    def _check_is_unchanged(self, leaves_no_graph=False):
        if self.replicas > 1 and self.communicates and self._accumulators is None:
            fallbacks.on_changed_gradient(self, leaves_no_graph)

    def note_use(self, tensors):
        """Records whether a program changes gradients of tapes, given what it computes of them."""
        self.needs_whole_gradients |= any(map(self.dependence.is_changed_gradient, tensors))

    @property
    def _can_exchange(self):
        """True if a loss may need values of other replicas, and the step can have them.

        After `kdist.gather_batch`, a program has the rows of all replicas where it needs them.
        """
        is_divided = self.replicas > 1 and self.communicates and not self.share.is_repeated
        return is_divided and not self.dependence.holds_all_rows and not self.is_dry_run

    def mixes_rows(self, tensor) -> bool:
        """Returns True if a tensor has rows that were combined with others of the batch.

        A replica has its own rows only, so that its values are not those of one device.
        """
        return self._can_exchange and not is_eager(tensor) and self.dependence.of(tensor).mixes_rows

    def check_loss(self, *tensors):
        """Warns if a loss is computed from tensors that combine rows, of which a step has a part.

        With several replicas, `_function_of_batch` finds it, but does not tell micro-steps apart.
        """
        if self._accumulators is None and self.communicates:
            return
        for tensor in filter(is_in_graph, tensors):
            if self.dependence.of(tensor).mixes_rows:
                self.dependence.check_rows_are_unknown()
                if self._accumulators is None:
                    fallbacks.on_mixed_rows(self, tensor)
                else:
                    fallbacks.on_rows_of_micro_step(self, tensor)
                return
            if self._accumulators is not None and not self._is_linear(tensor):
                fallbacks.on_function_of_micro_step(self, tensor)
                return

    def _is_linear(self, loss):
        """Returns False for a loss that is known to be no sum or mean of those of its rows."""
        if self.dependence.has_rows(loss) or self.dependence.noted(loss) is not None:
            return True
        try:
            return find_function(loss, self.dependence.values) is None
        except UnknownFunctionError:
            if self.dependence.of(loss).may_be_divided:
                self.dependence.check_rows_are_unknown()
            return True

    def is_scaled_by_rows(self, tensor) -> bool:
        """Returns True if the values of rows were multiplied or divided by the number of rows.

        Raises:
            KnownRowsError: a constant may be that number.
        """
        if not self._can_exchange or is_eager(tensor):
            return False
        found = self.dependence.of(tensor)
        if found.axis is not None and found.may_be_divided:
            self.dependence.check_rows_are_unknown()
        return found.has_scaled_rows

    def scaled_by_rows_of_batch(self, values):
        """Returns values of rows, scaled by the batch's number of rows where by the replica's.

        Args:
            values: a tensor, a number, or None.

        Raises:
            KnownRowsError: a constant may be that number.
        """
        if not is_in_graph(values) or self.is_dry_run or self.share.is_repeated:
            return values
        if self.dependence.holds_all_rows:
            return values
        found = self.dependence.of(values)
        if found.may_be_divided or found.may_count_rows:
            self.dependence.check_rows_are_unknown()
        if not found.has_scaled_rows or found.mixes_rows or not values.dtype.is_floating:
            return values
        scaled = values / self.batch_fraction(values.dtype) ** found.degree
        return self.dependence.note(scaled, dataclasses.replace(found, degree=0.0))

    def are_some_rows(self, tensor) -> bool:
        """Returns True for values of some rows, whose number differs between replicas."""
        return self._can_exchange and not is_eager(tensor) and self.dependence.of(tensor).is_chosen

    def check_outputs(self, outputs):
        """Lets every replica predict the whole batch if predictions are not those of its rows.

        They are joined along their first axis, and may combine rows, or have no axis of rows there.
        """
        if not self._can_exchange:
            return
        if any(getattr(v, "name", "") != _STATE_OF_SEEDS for v in self._written.values()):
            self.dependence.check_rows_are_unknown()  # such as a weight that counts them
        for output in filter(is_in_graph, keras.tree.flatten(outputs)):
            if not self.dependence.is_in_order(output):
                self.dependence.check_rows_are_unknown()
                fallbacks.on_joined_outputs(self, output)
            elif self.mixes_rows(output) or self.is_scaled_by_rows(output):
                self.dependence.check_rows_are_unknown()
                fallbacks.on_mixed_rows(self, output, "output")

    def note_micro_batches(self, sizes):
        """Records the numbers of rows of a pipeline's micro-batches: integers, or tensors."""
        self.micro_batches = len(sizes)
        self.dependence.note_sizes_of_parts(sizes)

    def note_mean(self, value):
        """Records that a value is a mean over rows, or has been corrected like one; returns it."""
        return self.dependence.note(value, MEAN)

    def _function_of_target(self, value) -> FunctionOfBatch | None:
        """Returns the function of the batch that the target of a tape is; None if it is linear."""
        if self.mixes_rows(value) and self.dependence.has_rows(value):
            value = tf.reduce_sum(value)  # which is what a tape differentiates
        return self._function_of_batch(value, True, False)

    def _function_of_batch(self, value, is_loss, is_in_tape=True) -> FunctionOfBatch | None:
        """Returns `value` as a function of the rows of all replicas; None if it is linear."""
        if not self._can_exchange or self.dependence.has_rows(value):
            return None
        if self.dependence.noted(value) is not None:
            return None
        if id(value) in self._functions:
            return self._functions[id(value)][1]
        try:
            of_batch = self._found_function(value, is_in_tape)
        except UnknownFunctionError as error:
            _logger.debug("%s cannot be computed from all rows: %s", value.name, error)
            self.dependence.check_rows_are_unknown()
            noun = "loss" if is_loss else "value"
            is_of_weights = self.dependence.of_gradient(value).is_of_weights
            if not is_loss and (is_of_weights or not self.may_repeat):
                return None  # such as the norm of a gradient, which is that of the batch
            if self.dependence.of(value).mixes_rows:
                fallbacks.on_mixed_rows(self, value, noun)
            else:
                fallbacks.on_unknown(self, value, noun)
            self.dependence.note(value, {"sum": SUM}.get(self.loss_reduction, MEAN))
            return None
        if of_batch is not None:
            self._functions[id(value)] = value, of_batch
        return of_batch

    def _function_of_all_rows(self, value, noun, may_be_averaged=False) -> FunctionOfBatch | None:
        """Returns a tensor, also one with rows, as a function of those of all replicas.

        It falls back if it cannot, and returns None.

        Args:
            value: a tensor.
            noun: what it is.
            may_be_averaged: whether the mean of the replicas' values does where it is right, and
                for what is computed from gradients. Defaults to False.
        """
        try:
            return self._found_function(value, is_in_tape=True, is_state=True)
        except UnknownFunctionError as error:
            _logger.debug("%s cannot be computed from all rows: %s", value.name, error)
            self.dependence.check_rows_are_unknown()
            is_averaged = may_be_averaged and (
                self.dependence.of_gradient(value).is_of_weights or self._is_mean_of_replicas(value)
            )
            if not is_averaged:
                fallbacks.on_mixed_rows(self, value, noun)
            return None

    def _found_function(self, value, is_in_tape, is_state=False):
        """Returns a `FunctionOfBatch`, or None as `find_function` does.

        Raises:
            UnknownFunctionError: the function cannot be computed.
        """
        found = find_function(value, self.dependence.values, is_state)
        if found is None:
            return None
        is_here = tf.compat.v1.get_default_graph() is self._graph is value.graph
        if not (is_here and (is_in_tape or not is_recorded())):
            raise UnknownFunctionError("replicas cannot exchange values in a nested function")
        if found.has_rows and self.dependence.static_rows is not None:
            raise UnknownFunctionError("the number of rows is known")
        with self._colocation():
            return found.of_batch(self.share, self.zero_if_empty)

    def _terms(self, value, warns=False, is_declared=False):
        """Returns [(factor, term, degree)] whose sum is `value`.

        The degree is 0 for what is averaged over replicas, 1 for what is added up.

        Args:
            value: a tensor.
            warns: whether to warn if the graph does not tell. Defaults to False.
            is_declared: whether `loss_reduction` takes precedence. Defaults to False.
        """
        default = {"auto": None, "mean": 0, "sum": 1}[self.loss_reduction]
        is_noted = self.dependence.noted(value) is not None
        if not is_noted and not value.shape.rank and is_declared and default is not None:
            return [(1.0, value, default)]
        terms = self.dependence.terms(value)
        degrees = [degree for *_, degree in terms]
        is_divided = self.replicas > 1 and not self.share.is_repeated
        is_divided = is_divided or self._accumulators is not None or self.micro_batches > 1
        if warns and None in degrees and is_divided:
            self.dependence.check_rows_are_unknown()
            fallbacks.on_unknown(self, value)
        known = [(default if warns else 0) or 0 if d is None else d for d in degrees]
        return [(f, t, d) for (f, t, _), d in zip(terms, known, strict=True)]

    @property
    def weight(self):
        """Weight of this replica's loss in the global gradient."""
        return self.share.batch_fraction

    @property
    def sum_weight(self):
        """Weight of a sum over this replica's rows in the global sum; None for 1."""
        return None

    def batch_fraction(self, dtype):
        """Returns the replica's fraction of the batch's rows."""
        return tf.cast(self.share.batch_fraction, dtype)

    def correct_sum(self, loss):
        """Returns a sum over rows, scaled so that its weighted mean is the global sum."""
        self._check_not_gathered("a loss that is a sum")
        return tf.math.divide_no_nan(loss, tf.cast(self.share.batch_fraction, loss.dtype))

    def correct_mean(self, loss, divisor, rows):
        """Returns a mean by another divisor, scaled so that its weighted mean is the global one.

        The result is loss_r · (divisor_r / divisor) / (rows_r / rows). Masks and sums of sample
        weights differ between replicas even if the rows do not.

        Args:
            loss: scalar, a sum divided by `divisor`.
            divisor: scalar, this replica's divisor.
            rows: number of rows of the loss, on this replica.
        """
        counted = tf.cast(self.zero_if_empty(rows), loss.dtype)
        divisor = self.zero_if_empty(tf.cast(divisor, loss.dtype))
        all_divisors, all_rows = tf.unstack(all_reduce_sum([tf.stack([divisor, counted])])[0])
        return tf.math.divide_no_nan(loss * divisor * all_rows, all_divisors * counted)

    def note_gather(self, is_whole_loss):
        """Records that the step gathers the rows of all replicas (`kdist.gather_batch`).

        Args:
            is_whole_loss: whether a compiled loss gathers them, which Keras reduces in
                `whole_loss`.

        Raises:
            ValueError: the step has micro-steps or micro-batches.
        """
        if self._accumulators is not None or self.micro_batches > 1:
            raise ValueError(
                "gather_batch: a micro-batch has only some rows of the batch. Compile with "
                "accumulate=1, and use a layout with micro_batches=1"
            )
        self.dependence.holds_all_rows |= not is_whole_loss

    def whole_loss(self):
        """Marks that the loss of the whole batch is computed, on each replica."""
        return self._marked("is_whole_loss")

    def assigning(self):
        """Marks that a Keras variable is being assigned."""
        return self._marked("is_assigning")

    def normalizing(self):
        """Marks that BatchNormalization computes, whose statistics are those of each replica."""
        return self._marked("is_normalizing")

    @contextlib.contextmanager
    def _marked(self, name):
        before = getattr(self, name)
        setattr(self, name, True)
        try:
            yield
        finally:
            setattr(self, name, before)

    def unscaled_gradient(self, gradient, undo=False):
        """Returns the gradient of an exchanged tensor, scaled by this replica's weight.

        It is returned as it is if the loss was scaled before it was differentiated. A custom
        `train_step` may not do that: its gradients are scaled later, each by the weight of the
        replica that holds the rows, instead of that of the replica that computed the loss.

        Args:
            gradient: the gradient of this replica's loss.
            undo: whether to divide by the weight. Defaults to False.
        """
        if self._scaled_by or self._differentiates_sum:
            return gradient if undo else self.zero_gradient_if_empty(gradient)
        if self.share.is_same_on_all(self.replicas):
            return gradient
        weight = tf.cast(self.weight, gradient.dtype)
        return tf.math.divide_no_nan(gradient, weight) if undo else gradient * weight

    def add_up(self, tensors, exchange):
        """Returns sums over replicas of tensors, which have the gradient of the global loss.

        Args:
            tensors: a list of tensors.
            exchange: function that adds lists of tensors up, such as `all_reduce_sum`.
        """
        undo = functools.partial(self.unscaled_gradient, undo=True)
        sums = exchange([_scaling_gradient(tensor, undo) for tensor in tensors])
        return [_scaling_gradient(total, self.unscaled_gradient) for total in sums]

    def _check_not_gathered(self, what):
        if self.dependence.holds_all_rows:
            raise ValueError(
                f"gather_batch: {what} cannot be told from one over the rows of this replica. "
                "Reduce it to a mean, or call gather_batch in no loss and compile with "
                "gather_batch=True"
            )

    def zero_if_empty(self, value):
        """Returns `value`, or zero if this replica has no rows (see `row_shares`)."""
        if not self.share.may_be_empty:
            return value
        return tf.where(self.share.rows > 0, value, tf.zeros_like(value))

    # Gradients.

    def gradients(self, optimizer, gradients, variables):
        """Returns the gradients of the global batch; None before the last micro-step.

        Raises:
            ValueError: replicas cannot meet here, as within a condition of TensorFlow.
        """
        try:
            with self._colocation():
                return self._gradients(optimizer, gradients, variables)
        except RuntimeError as error:
            if "merge_call" not in str(error):
                raise
            raise ValueError(
                "an optimizer is applied within tf.cond or a loop of TensorFlow, where replicas "
                "cannot add up their gradients. Apply it in the step itself: repeat it by a loop "
                "of Python, and accumulate gradients by `compile(accumulate=…)` or by the "
                "`gradient_accumulation_steps` of Keras's optimizers"
            ) from error

    def _gradients(self, optimizer, gradients, variables):
        is_scaled = id(optimizer) in self._scaled_by
        gradients = [None if g is None else self._of_batch(g) for g in gradients]
        whole = [g if self._are_whole_slices(g) else None for g in gradients]
        values = {
            place: gradient
            for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None and getattr(variable, "overwrite_with_gradient", False)
        }
        for place, value in zip(values, self._largest(values.values()), strict=True):
            whole[place] = value
        own = [g if w is None else None for g, w in zip(gradients, whole, strict=True)]
        scaled = self._scaled_by_rows(own, is_scaled)
        gradients = [with_shape_of(v, g) for v, g in zip(variables, scaled, strict=True)]
        if self._accumulators is not None:
            gradients = self.reduced_in_micro_step(optimizer, gradients, variables)
            with self._marked("applying"):  # its variables are no state of the program
                gradients = self._accumulators.add(optimizer, gradients, variables, self.is_last)
            if not self.is_last:
                self._note_update_to_come(variables)
                return None
        reduced = self.reduced_for(optimizer, gradients, variables)
        return [g if w is None else w for g, w in zip(reduced, whole, strict=True)]

    def _note_update_to_come(self, variables):
        number = len(self._graph.get_operations())
        for variable in variables:
            if not hasattr(variable, "gathered"):  # divided among replicas, and read by gathers
                self._waiting.setdefault(id(variable), (variable, number))

    def check_updates(self):
        """Warns if a loss is computed with weights that the step has updated on one device.

        With micro-steps, all optimizers apply their gradients in the last one.
        """
        if not self._waiting or self.local_replica or tf.executing_eagerly():
            return
        waiting = self._waiting.values()
        tainted = set()  # ids of what is computed from such weights alone
        first = min(number for _, number in waiting)
        for number, operation in enumerate(self._graph.get_operations()[first:], first):
            if operation.type == "ReadVariableOp":
                (value,) = operation.outputs
                is_late = any(n <= number and self.is_read_of(v, value) for v, n in waiting)
            else:
                others = [tensor for tensor in operation.inputs if id(tensor) not in tainted]
                is_late = len(others) < len(operation.inputs)
                if is_late and not all(self.dependence.of(each).is_fixed for each in others):
                    fallbacks.on_late_updates(next(iter(waiting))[0])
                    return
            if is_late:
                tainted.update(map(id, operation.outputs))

    def _scaled_by_rows(self, gradients, is_scaled):
        """Returns gradients whose sum over replicas is that of the global batch.

        Args:
            gradients: gradients of this replica's rows, or None.
            is_scaled: whether the loss was scaled before it was differentiated.
        """
        weights = [None if g is None else self._weight_of(g, is_scaled) for g in gradients]
        scaled = [
            g if g is None else scale_gradient(self.zero_gradient_if_empty(g), weight)
            for g, weight in zip(gradients, weights, strict=True)
        ]
        return [self.split_slices(g) if isinstance(g, tf.IndexedSlices) else g for g in scaled]

    def _of_batch(self, gradient):
        """Returns a gradient that a program may have changed by means, sums, or numbers of rows.

        What it has computed of a gradient of the whole batch is computed of those of the whole
        batch, such as the root of the number of rows.
        """
        values = values_of(gradient)
        if not is_in_graph(values):
            return gradient
        self.dependence.check_counts_no_rows(values)
        is_whole = self._dependence_of_gradient(gradient).is_reduced and self._can_exchange
        if not is_whole or self.dependence.of(values).is_fixed or self._is_mean_of_replicas(values):
            return gradient
        function = self._function_of_all_rows(values, "gradient")
        if function is None:
            return gradient
        whole = tf.ensure_shape(function.value, values.shape)
        self.dependence.note_reduced_gradients([whole])
        if values is gradient:
            return whole
        return tf.IndexedSlices(whole, gradient.indices, gradient.dense_shape)

    def _are_whole_slices(self, gradient):
        """Returns True for `tf.IndexedSlices` that have been reduced: replicas' are equal."""
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return is_sparse and self._dependence_of_gradient(gradient).is_reduced

    def _weight_of(self, gradient, is_scaled):
        """Returns the weight of a gradient of this replica's rows in the global one; None for 1."""
        dependence = self._dependence_of_gradient(gradient)
        if dependence.is_nonlinear:
            self._check_is_unchanged()
        if dependence.is_reduced:
            return self.weight  # equal on all replicas
        is_known = dependence.is_of_gradient and not dependence.may_be_divided
        degree = {0.0: 0, 1.0: 1}.get(dependence.degree) if is_known else None
        if degree is None and not is_scaled:
            degree = 1 if self.loss_reduction == "sum" else None
            if is_known and self._accumulators is not None:
                fallbacks.on_function_of_micro_step(self, values_of(gradient), "gradient")
            if not (dependence.is_of_gradient or dependence.is_fixed or is_eager(gradient)):
                fallbacks.on_unknown(self, values_of(gradient), "gradient")
        if degree == 1 or (degree is None and is_scaled):
            return None if is_scaled else self.sum_weight
        return self.weight

    def _dependence_of_gradient(self, gradient):
        values = values_of(gradient)
        if (noted := self.dependence.noted_gradient(values)) is not None:
            return noted
        if is_eager(values):
            # A program that runs eagerly leaves no graph. All its gradients have been reduced.
            return Dependence(degree=None, is_reduced=self._can_reduce_early())
        return self.dependence.of_gradient(values)

    def split_slices(self, gradient):
        """Returns the `SplitSlices` of a gradient of looked-up rows."""
        return SplitSlices.of(gradient, self._are_fixed)

    def _are_fixed(self, indices):
        """Returns True if the indices of a lookup do not depend on the batch.

        Without a graph, these are distinct indices that are equal on all replicas.
        """
        if not is_eager(indices):
            return self.dependence.are_fixed(indices)
        if not self._can_exchange:
            return False
        mark = tf.raw_ops.Fingerprint(data=tf.reshape(indices, [1, -1]), method="farmhash64")
        numbers = tf.cast(mark, tf.float64)
        sums, squares = self._all_reduce_sum([numbers, tf.square(numbers)])
        are_equal = tf.reduce_all(self.replicas * squares == tf.square(sums))
        return bool(are_equal) and len(tf.unique(indices)[0]) == len(indices)

    def reduced_in_micro_step(self, optimizer, gradients, variables):
        """Returns the gradients of a micro-step that are added up, and reduced in the last one."""
        return gradients

    def reduced_for(self, optimizer, gradients, variables):
        """Returns the sums over replicas of gradients with which `optimizer` updates variables."""
        return self.reduced(gradients)

    def reduced(self, gradients):
        """Returns the sums of gradients over all replicas.

        Args:
            gradients: tensors, `SplitSlices`, or None.
        """
        if self.replicas > 1:
            sent = [summed_tensors(g) for g in gradients]
            present = [tensor for tensors in sent for tensor in tensors]
            sums = iter(self._all_reduce_sum(present))
            received = [[next(sums) for _ in tensors] for tensors in sent]
            gradients = [
                with_summed_tensors(g, r) for g, r in zip(gradients, received, strict=True)
            ]
        return [g.joined() if isinstance(g, SplitSlices) else g for g in gradients]

    def _largest(self, values):
        """Returns the maxima over replicas of what replaces variables, as scales of float8."""
        if values and self._accumulators is not None:
            raise ValueError(
                "float8 and accumulate cannot be combined: the scales of float8 are those of whole "
                "batches. Compile without accumulate, or choose another dtype policy"
            )

        def in_its_place(value):
            place = tf.one_hot(self.replica, self.replicas, dtype=value.dtype)
            place = tf.reshape(place, [-1, *[1] * value.shape.rank])
            return tf.math.multiply_no_nan(value, place)

        of_replicas = self.reduced([in_its_place(value) for value in values]) if values else []
        return [tf.reduce_max(each, axis=0) for each in of_replicas]

    def zero_gradient_if_empty(self, gradient):
        """Returns the gradient, or zero (not infinity × 0) if this replica has no rows."""
        return zero_unless(self.share.rows > 0, gradient) if self.share.may_be_empty else gradient

    def build(self, optimizer, variables):
        """Builds an optimizer that has no variables yet."""
        optimizer.build(variables)

    def apply(self, update, optimizer, gradients, variables):
        """Calls `update` on gradients that have been reduced.

        Args:
            update: function of gradients and variables.
            optimizer: the optimizer that it belongs to.
            gradients: one gradient per variable.
            variables: Keras variables.
        """
        part = "update", id(optimizer), tuple(map(id, variables))
        self._call(part, functools.partial(_updated, update, variables), gradients)

    def are_finite(self, optimizer, is_finite):
        """Returns whether the gradients of `optimizer` are finite on all replicas.

        Args:
            optimizer: an optimizer with a loss scale.
            is_finite: whether those that this replica applies are finite.
        """
        return is_finite

    def clipped(self, keras_function, optimizer, gradients):
        """Returns the gradients that an optimizer applies, clipped by `keras_function`."""
        return keras_function(optimizer, gradients)

    def optimizer_method(self, name, for_one_device, keras_function):
        """Returns the function for a part of an update: for one replica, or Keras's own."""
        return for_one_device if self.has_copies else keras_function

    @contextlib.contextmanager
    def update(self):
        """Marks that the optimizer is updating with gradients that have been reduced."""
        self.applying = True
        try:
            with self._colocation():
                yield
        finally:
            self.applying = False

    # State.

    def check_scope(self, variables):
        """Checks that each replica has its own copy of variables that it changes.

        Args:
            variables: Keras variables or `RawVariable`.

        Raises:
            ValueError: If a variable was created outside of the strategy's scope.
        """
        if not self.has_copies or self.replicas == 1:
            return
        extended = tf.distribute.get_strategy().extended
        for variable in variables:
            is_divided = hasattr(variable, "gathered")
            if not (is_divided or extended.variable_created_in_scope(variable._value)):
                raise ValueError(
                    f"{variable.path!r} was created outside of strategy.scope(), so that each of "
                    f"the {self.replicas} replicas would change it. Create it, or the layer or "
                    "model that it belongs to, in `with strategy.scope():`. There, "
                    "kdist.Model.of(model) copies a model that was created before"
                )

    def note_written(self, variable, value):
        """Records that a layer writes a value to a variable, for `average_state`."""
        if self.applying:
            return
        self._written.setdefault(id(variable), variable)
        if variable.synchronization == "on_read" or hasattr(variable, "gathered"):
            return  # a metric, or a weight that replicas divide
        if getattr(variable, "name", "") != _STATE_OF_SEEDS:
            self.check_scope([variable])
            self.dependence.check_counts_no_rows(value)
        key = id(variable._value)
        if self.is_kept(variable, value):
            self._before[key] = None
            self._check_is_assigned_once(variable, value)
        elif key not in self._before:
            native = self.local(variable._value)
            with self._graph.as_default():  # not in that of tf.cond
                self._before[key] = native, tf.identity(native)

    def _check_is_assigned_once(self, variable, value):
        """Warns if a program updates a weight itself, in each micro-step."""
        is_first = self.is_last and not self.local_replica and self._accumulators is not None
        if not (is_first and getattr(variable, "trainable", False) and is_in_graph(value)):
            return
        if not self.dependence.of(value).is_fixed:
            fallbacks.on_repeated_assignment(variable)

    def is_kept(self, variable, value):
        """Returns False for a change of state that only the last micro-step of a step makes.

        Each micro-step would repeat what does not depend on the rows, such as a count of steps.
        """
        if self.is_last or getattr(variable, "name", "") == _STATE_OF_SEEDS:
            return True
        return not (is_in_graph(value) and self.dependence.of(value).is_fixed)

    @property
    def is_alone(self):
        """True if no other replica uses the variables, and the step runs."""
        return self.replicas == 1 and not (self.has_copies or self.is_dry_run)

    @property
    def has_repeated_changes(self):
        """True if the step has changed state that it does not keep."""
        return any(self._before.values())

    def undo_repeated_changes(self):
        """Restores the state that is not kept; called at the end of each micro-step."""
        with self.assigning():
            for native, value in filter(None, self._before.values()):
                native.assign(value)

    def state_of_batch(self, variable, value):
        """Returns what a layer or a program assigns to a variable, given what this replica would.

        Means and sums over rows, their functions, and rows, as in a queue of features, are those of
        the whole batch. Within micro-steps, means are averaged at the end. Metrics are not changed.
        """
        is_shared = variable.value.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        is_state = is_shared or can_be_averaged(variable, of_any_type=True)
        if self.applying or is_eager(value) or not is_state:
            return value
        if not self._can_exchange or self.dependence.of(value).is_fixed:
            return value
        # Also means, as the step may read the variable.
        noun = f"new value of {variable.path}"
        found = self._function_of_all_rows(value, noun, may_be_averaged=True)
        return value if found is None else tf.ensure_shape(found.value, value.shape)

    def _is_mean_of_replicas(self, value):
        """Returns True if the mean of the replicas' values is the value of the whole batch."""
        dependence = self.dependence.of(value)
        if dependence.degree != 0 or dependence.mixes_rows:
            return False
        try:
            return find_function(value, self.dependence.values) is None
        except UnknownFunctionError:
            return False

    def local(self, variable):
        """Returns this replica's copy of a TensorFlow variable."""
        if isinstance(variable, tf.distribute.DistributedValues):
            return tf.distribute.get_strategy().experimental_local_results(variable)[
                self.local_replica
            ]
        return variable

    def average_state(self, except_for):
        """Averages variables that layers wrote, weighted by the replicas' rows of this micro-step.

        Args:
            except_for: variables that are already equal on all replicas.
        """
        if self.replicas == 1 or not self.has_copies:
            return
        equal = {id(variable) for variable in except_for}
        variables = [
            variable
            for key, variable in self._written.items()
            if key not in equal and can_be_averaged(variable)
        ]
        if not variables:
            return
        part = tuple(map(id, variables))
        parts = self._call(("state", part), functools.partial(_shares_of_mean, variables))
        with self._colocation():
            means = self._all_reduce_sum(parts)
        self._call(("average", part), functools.partial(_assign_copies, variables), means)

    @contextlib.contextmanager
    def undoing_if_empty(self, variables):
        """Restores `variables` at the end if this replica has no rows."""
        if not self.share.may_be_empty:
            yield
            return
        natives = [variable.value for variable in variables]
        before = [tf.identity(native) for native in natives]
        yield
        for native, value in zip(natives, before, strict=True):
            native.assign(tf.where(self.share.rows > 0, native, value))

    @contextlib.contextmanager
    def with_keras_metrics(self):
        """Returns a context manager in which metrics count rows, as Keras's own do."""
        before, self.own_metrics = self.own_metrics, {}
        try:
            yield
        finally:
            self.own_metrics = before

    def is_read_of(self, variable, tensor):
        """Returns True if `tensor` is the value of this replica's copy of a variable."""
        if tensor.op.type != "ReadVariableOp":
            return False
        handle = tensor.op.inputs[0]
        outside = outer_tensor(handle)
        return (handle if outside is None else outside) is self.local(variable.value).handle

    def as_increment(self, value, term):
        """Returns what this replica adds to the state of a metric.

        Args:
            value: what the metric adds.
            term: the same, before casts.
        """
        dependence = self.dependence.of(term)
        if dependence.axis is not None and dependence.mixes_rows:
            exchanges = self._can_exchange
            function = self._function_of_all_rows(term, "value") if exchanges else None
        else:
            function = self._function_of_batch(term, is_loss=False)
        if function is not None and value.dtype.is_floating:
            is_sum = dependence.degree == 1  # of the rows of the micro-step
            fraction = self.share.micro_step_fraction if is_sum else self.share.batch_fraction
            return tf.cast(function.value, value.dtype) * tf.cast(fraction, value.dtype)
        if dependence.is_fixed:
            self.dependence.check_counts_no_rows(term)
            if dependence.may_count_rows:
                return value
            # The last replica is never empty.
            counting = 0 if self.share.is_repeated else self.replicas - 1
            is_counted = self.replica == counting and self.is_last
            return value if is_counted else tf.zeros_like(value)
        if dependence.degree == 0 and dependence.axis is None and value.dtype.is_floating:
            return value * self.batch_fraction(value.dtype)
        return value

    def handle(self, variable):
        """Returns the handle by which a gradient tape identifies a Keras variable."""
        return variable.value.handle

    def sharded_value(self, variable):
        """Returns the whole value of a weight that replicas divide among themselves."""
        return variable.recorded(variable.gathered(), self)

    def assign_sharded(self, variable, value):
        """Assigns a weight that replicas divide among themselves.

        Raises:
            ValueError: the replicas may differ in the value, or cannot exchange it here.
        """
        if self.is_dry_run:
            self.note_use([value])
            return
        raise ValueError(
            f"{variable.path!r} is assigned within a step, and is divided over the devices by "
            'shard="weights". Assign it in the train_step itself, without accumulate, a value that '
            'depends on weights only, such as a moving average. Or use shard="optimizer"'
        )

    def assign_add(self, variable, value, keras_function):
        """Adds `value` to a variable; Keras's own function reads and then assigns."""
        return keras_function(variable, value)

    # Random numbers.

    @property
    def seeds_differ(self):
        """True if other replicas draw from the same seed and must get other numbers."""
        return self.replicas > 1

    def seed(self, seed):
        """Returns the seed of this replica; that of the first one is Keras's own."""
        stride = tf.cast(tf.constant([_SEED_STRIDE, 0], tf.int64), seed.dtype)
        return seed + stride * tf.cast(self.replica, seed.dtype)


def with_correct_sums(step, value, is_loss):
    """Returns a scalar whose terms that are sums over rows are corrected by `step.correct_sum`.

    `is_loss` tells whether to warn if the graph does not tell what it is.
    """
    terms = [t for t in step._terms(value, is_loss) if t[-1] == 1]
    if not terms:
        return value
    if terms[0][1] is value:
        return step.note_mean(step.correct_sum(value))
    sums = tf.add_n([tf.cast(f, t.dtype) * tf.reduce_sum(t) for f, t, _ in terms])
    return step.note_mean(value + step.correct_sum(sums) - sums)


def _updated(update, variables, gradients):
    with current().update():
        update(gradients, variables)


def _shares_of_mean(variables):
    """Returns what a replica adds to the mean of each variable's copies over all replicas."""
    step = current()
    with step._colocation():
        return [
            scale_gradient(
                step.zero_if_empty(tf.identity(step.local(variable.value))),
                step.share.micro_step_fraction,
            )
            for variable in variables
        ]


def _assign_copies(variables, values):
    step = current()
    with step._colocation():
        for variable, value in zip(variables, values, strict=True):
            step.local(variable.value).assign(value)


class RawVariable(NamedTuple):
    """A `tf.Variable` of a program, with what `can_be_averaged` asks of Keras variables."""

    value: tf.Variable
    synchronization: str = "auto"

    @property
    def path(self):
        return self.value.name

    @property
    def _value(self):
        return self.value


def can_be_averaged(variable, of_any_type=False):
    """Returns True for float state with a copy per replica, unlike counters and seeds."""
    value = variable.value
    return (
        isinstance(value, tf.distribute.DistributedValues)
        and (of_any_type or value.dtype.is_floating)
        and value.aggregation in (tf.VariableAggregation.NONE, tf.VariableAggregation.MEAN)
        and variable.synchronization != "on_read"
    )


def _scaling_gradient(tensor, scale):
    """Returns `tensor`; its gradient is passed through `scale`."""

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), scale

    return identity(tensor) if tensor.dtype.is_floating else tensor
