"""One replica's part of a step, and the points at which replicas meet in it.

A step of kdist runs the model's `train_step` on each replica as though that replica were alone:
its losses are means over its own rows, and no code has to know how many others there are. A
`ReplicaStep` is what makes the whole right. It is asked at the few points where replicas meet, by
the hooks that `kdist.training.keras_hooks` puts into Keras:

- a loss is weighed by the replica's share of the batch before it is differentiated, so that
  gradients need only be added up:
  sum over replicas of (rows of r / rows) · mean over rows of r = mean over rows;
- the optimizer acts on the gradient of the whole batch: it is reduced first, then clipped, checked
  for infinity, averaged and applied, by Keras's own code and on each replica's own copy of the
  variables;
- state that layers write, such as the moving statistics of a BatchNorm, is averaged at the step's
  end;
- random numbers are drawn from a seed that holds the replica's number.
"""

import contextlib
import threading

import keras
import tensorflow as tf

from kdist.training.beside import beside_inputs
from kdist.training.reduction import all_reduce_sum
from kdist.training.share import Share

_this_thread = threading.local()

# Any odd number that carries far: seeds of two replicas shall not meet by counting up.
_SEED_STRIDE = 0x9E3779B1


def current() -> "ReplicaStep | None":
    """The step that runs in this thread, if one does."""
    return getattr(_this_thread, "step", None)


@contextlib.contextmanager
def asked(step):
    """The hooks of this thread ask `step` while the context lasts."""
    before, _this_thread.step = current(), step
    try:
        yield step
    finally:
        _this_thread.step = before


def this_replica() -> int:
    """The number of this replica in the job, from 0; in replica context."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


class ReplicaStep:
    """What one replica does in one micro-step.

    Args:
        share: its rows.
        replica: its number in the job, from 0.
        local_replica: its number on this worker, from 0.
        replicas: how many there are.
        has_copies: each replica has its own copy of every variable and keeps it up to date.
        accumulators: gradients of micro-steps, kept for the last one; None in a step of one.
        is_last: this is the last micro-step, which applies the gradients.
        has_group: the replica is on several devices; what is done with a gradient or a variable
            is done on the device that it is on.

    Attributes:
        rehearses: nothing of this step stays: metrics leave it out.
    """

    rehearses = False

    def __init__(
        self,
        share: Share,
        replica: int,
        local_replica: int,
        replicas: int,
        has_copies: bool,
        accumulators,
        is_last: bool,
        has_group: bool = False,
    ):
        self.share = share
        self.replica = replica
        self.local_replica = local_replica
        self.replicas = replicas
        self.has_copies = has_copies
        self.applying = False
        self._accumulators = accumulators
        self.is_last = is_last
        self._beside = beside_inputs if has_group else contextlib.nullcontext
        self._weighed: set[int] = set()
        self._written: dict[int, keras.Variable] = {}

    def running(self):
        """The hooks ask this step while the context lasts."""
        return asked(self)

    # Losses.

    def weigh(self, loss, optimizer):
        """The loss to differentiate; `optimizer` then takes its gradients as they are.

        A loss with a value for each row (reduction "none") is left alone: its gradient is that of
        the sum, which is the same whoever has the rows.
        """
        self._weighed.add(id(optimizer))
        if loss.shape.rank:
            return loss
        return loss * tf.cast(self.weight, loss.dtype)

    @property
    def weight(self):
        """What the mean over this replica's rows weighs in the gradient."""
        return self.share.of_batch

    def of_batch(self, dtype):
        """The replica's share of the rows of the batch."""
        return tf.cast(self.share.of_batch, dtype)

    def correct_sum(self, loss):
        """A sum over rows, such that its weighed mean over replicas is the sum over all rows."""
        return tf.math.divide_no_nan(loss, tf.cast(self.share.of_batch, loss.dtype))

    def correct_mean(self, loss, divisor, rows):
        """A mean by another divisor than rows, such that its mean by rows is that of all rows.

        loss_r · (divisor_r / divisor) / (rows_r / rows): masks, and sums of sample weights, differ
        between replicas where the rows do not.

        Args:
            loss: scalar, a sum divided by `divisor`.
            divisor: scalar, this replica's.
            rows: rows behind the loss, on this replica.
        """
        counted = tf.cast(self.counts(rows), loss.dtype)
        divisor = self.counts(tf.cast(divisor, loss.dtype))
        all_divisors, all_rows = tf.unstack(all_reduce_sum([tf.stack([divisor, counted])])[0])
        return tf.math.divide_no_nan(loss * divisor * all_rows, all_divisors * counted)

    def counts(self, value):
        """`value`, or zero if this replica's row belongs to another."""
        if not self.share.may_be_empty:
            return value
        return tf.where(self.share.rows > 0, value, tf.zeros_like(value))

    # Gradients.

    def gradients(self, optimizer, gradients, variables):
        """The gradients of the whole batch; None while there are micro-steps to come."""
        with self._beside():
            return self._gradients(optimizer, gradients, variables)

    def _gradients(self, optimizer, gradients, variables):
        gradients = [
            g if g is None else self.counts_gradient(_with_shape_of(variable, g))
            for g, variable in zip(gradients, variables, strict=True)
        ]
        if id(optimizer) not in self._weighed:
            gradients = [g if g is None else _scaled(g, self.weight) for g in gradients]
        if self._accumulators is not None:
            gradients = self._accumulators.add(optimizer, gradients, variables, self.is_last)
            if not self.is_last:
                return None
        return self.reduced(gradients)

    def reduced(self, gradients):
        """The sums of gradients over all replicas."""
        present = [g for g in gradients if g is not None]
        if self.replicas == 1 or not present:
            return gradients
        sums = iter(all_reduce_sum(present))
        return [g if g is None else next(sums) for g in gradients]

    def counts_gradient(self, gradient):
        """The gradient, or zero (not infinity × 0) if this replica's row belongs to another."""
        if not self.share.may_be_empty:
            return gradient
        counts = tf.cast(self.share.rows > 0, gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            values = tf.math.multiply_no_nan(gradient.values, counts)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.math.multiply_no_nan(gradient, counts)

    def build(self, optimizer, variables):
        """Makes the variables of an optimizer that has none yet."""
        optimizer.build(variables)

    def apply(self, update, optimizer, gradients, variables):
        """Has `update` act on gradients that are reduced already.

        Args:
            update: a function of gradients.
            optimizer: whose function it is.
            gradients: one for each of `variables`.
            variables: Keras's.
        """
        with self.update():
            update(gradients)

    def part_of_update(self, name, for_one_device, kerass_own):
        """How a part of an optimizer's work is done: on this replica's copies, or Keras's way."""
        return for_one_device if self.has_copies else kerass_own

    @contextlib.contextmanager
    def update(self):
        """The optimizer is at work on gradients that are reduced already."""
        self.applying = True
        try:
            with self._beside():
                yield
        finally:
            self.applying = False

    # State.

    def note_written(self, variable):
        """A layer wrote `variable`; the replicas' copies are brought together at the end."""
        if not self.applying:
            self._written.setdefault(id(variable), variable)

    def local(self, variable):
        """This replica's copy of a TensorFlow variable."""
        if isinstance(variable, tf.distribute.DistributedValues):
            return tf.distribute.get_strategy().experimental_local_results(variable)[
                self.local_replica
            ]
        return variable

    def bring_together(self, except_for):
        """Averages what layers wrote, each replica weighing as its rows of this micro-step do.

        Args:
            except_for: variables that are the same on all replicas anyhow.
        """
        if self.replicas == 1 or not self.has_copies:
            return
        equal = {id(variable) for variable in except_for}
        copies = [
            self.local(variable.value)
            for key, variable in self._written.items()
            if key not in equal and can_be_averaged(variable)
        ]
        with self._beside():
            parts = [_scaled(self.counts(tf.identity(c)), self.share.of_micro_step) for c in copies]
            for copy, mean in zip(copies, all_reduce_sum(parts) if parts else [], strict=True):
                copy.assign(mean)

    @contextlib.contextmanager
    def counting(self, variables):
        """What the step adds to `variables` stays only if its rows are this replica's own."""
        if not self.share.may_be_empty:
            yield
            return
        natives = [variable.value for variable in variables]
        before = [tf.identity(native) for native in natives]
        yield
        for native, value in zip(natives, before, strict=True):
            native.assign(tf.where(self.share.rows > 0, native, value))

    def handle(self, variable):
        """What a gradient tape knows a Keras variable by."""
        return variable.value.handle

    def assign_add(self, variable, value, kerass_own):
        """`variable` + `value`; Keras's own reads and then assigns."""
        return kerass_own(variable, value)

    # Random numbers.

    @property
    def seeds_differ(self):
        """Others draw from the same seed, and shall draw something else."""
        return self.replicas > 1

    def seed(self, seed):
        """The seed of this replica: Keras's own on the first one."""
        stride = tf.cast(tf.constant([_SEED_STRIDE, 0], tf.int64), seed.dtype)
        return seed + stride * tf.cast(self.replica, seed.dtype)


def can_be_averaged(variable):
    """Float state that has a copy on each replica; counters and seeds count alike everywhere."""
    value = variable.value
    return (
        isinstance(value, tf.distribute.DistributedValues)
        and value.dtype.is_floating
        and value.aggregation in (tf.VariableAggregation.NONE, tf.VariableAggregation.MEAN)
        and variable.synchronization != "on_read"
    )


def _with_shape_of(variable, gradient):
    """What is known of the variable's shape, TensorFlow may have lost on the way back."""
    if not isinstance(gradient, tf.IndexedSlices):
        gradient = tf.ensure_shape(gradient, variable.shape)
    return gradient


def _scaled(gradient, factor):
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
