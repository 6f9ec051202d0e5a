"""Local SGD: replicas train apart for k steps, then their weights are averaged.

    model.compile("sgd", loss, local_steps=8)

In a local step no replica hears of the others: each takes the gradient of its own rows, clips it,
checks it for infinity and applies it to its own copy of the weights. After k steps, and at the end
of each epoch, a round ends: weights, and the state that layers wrote, become the mean over all
replicas, in which each counts alike, whatever rows it had. A replica that has no rows in a step
takes it with a gradient of zero, and its layers keep their state.

A loss that is a mean over a mask or over sample weights is that of the replica's own; of a loss
that is a sum over rows, the replica's own stand for those of the batch. Where a loss scale finds
gradients that are not finite, that replica alone leaves out its update; when the round ends, all go
on with the smallest scale and the largest count of updates.

Stich, "Local SGD Converges Fast and Communicates Little", 2019.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from kdist.training.reduction import all_reduce_sum
from kdist.training.share import fraction
from kdist.training.step import ReplicaStep, can_be_averaged, this_replica
from kdist.training.together import in_another_thread, replicas_here

# What becomes of an optimizer's slots, such as momenta, when weights are averaged.
SLOTS = ("keep", "average", "reset")


def check(local_steps, local_slots, strategy: tf.distribute.Strategy):
    """Raises a ValueError unless the arguments of `compile` can be had under `strategy`."""
    if local_slots not in SLOTS:
        raise ValueError(f"local_slots must be one of {', '.join(SLOTS)}, got {local_slots!r}")
    if local_steps is None:
        return
    if not isinstance(local_steps, int) or local_steps < 1:
        raise ValueError(
            "local_steps must be None (replicas meet in every step) or a whole number from 1 on, "
            f"got {local_steps!r}"
        )
    if not _have_copies(strategy):
        raise ValueError(
            f"local_steps={local_steps} (--local_steps): every replica needs weights of its own, "
            "and under this strategy they share them; take --strategy=mirrored or multi_worker, or "
            "leave local_steps out"
        )


def _have_copies(strategy):
    """Each replica has variables of its own, or there is but one."""
    if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
        return False
    mirrors = tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy
    return isinstance(strategy, mirrors) or strategy.num_replicas_in_sync == 1


class LocalStep(ReplicaStep):
    """What one replica does in one micro-step, alone.

    Args:
        rows: this replica's rows of the batch, of all micro-steps together.
        rounds: the `Rounds` that the step belongs to.
        others: those of `ReplicaStep`, in its order.
    """

    def __init__(self, rows, rounds, *others):
        super().__init__(*others)
        self._rows, self._rounds = rows, rounds

    @property
    def weight(self):
        """The mean over a micro-step's rows weighs as they do among this replica's own."""
        return fraction(self.share.rows, self._rows)

    def weigh(self, loss, optimizer):
        """As in any step; of sums over rows, a replica's own stand for those of the batch."""
        loss = super().weigh(loss, optimizer)
        if not loss.shape.rank:
            return loss
        own = tf.cast(fraction(self._rows, self.share.batch_rows), loss.dtype)
        return tf.math.divide_no_nan(loss, own)

    def correct_mean(self, loss, divisor, rows):
        """A mean over a mask or over weights is that of the replica's own."""
        return loss

    def gradients(self, optimizer, gradients, variables):
        """The gradients of this replica's rows; None while there are micro-steps to come."""
        self._rounds.note_update(optimizer, variables)
        return super().gradients(optimizer, gradients, variables)

    def reduced(self, gradients):
        """They are not: each replica has its own."""
        return gradients

    def bring_together(self, except_for):
        """What layers wrote is averaged when the round ends."""
        self._rounds.note_written(v for v in self._written.values() if can_be_averaged(v))

    @contextlib.contextmanager
    def counting(self, variables):
        """What layers and metrics make of another replica's row does not stay."""
        copies = [self.local(v.value) for v in self._state()] if self.share.may_be_empty else []
        before = [tf.identity(copy) for copy in copies]
        with super().counting(variables):
            yield
        for copy, value in zip(copies, before, strict=True):
            copy.assign(tf.where(self.share.rows > 0, copy, value))

    def _state(self):
        return [v for v in self._rounds.state() if can_be_averaged(v)]


class Rounds:
    """Counts local steps, and brings the replicas' copies together when a round ends.

    Args:
        trainer: the compiled model.
        length: local steps of a round.
        slots: one of `SLOTS`.

    Attributes:
        done: steps of the round that is under way.

    Raises:
        ValueError: a layer asks for replicas that meet in every step.
    """

    def __init__(self, trainer, length: int, slots: str):
        _check_no_layer_meets(trainer)
        self._trainer, self._length, self._slots = trainer, length, slots
        self._strategy = trainer.distribute_strategy
        self._replicas = self._strategy.num_replicas_in_sync
        self.done = 0
        self._updated: dict[int, keras.Variable] = {}
        self._written: dict[int, keras.Variable] = {}
        self._optimizers: dict[int, keras.optimizers.Optimizer] = {}
        is_eager = trainer.run_eagerly
        self._average_now = self._average if is_eager else _function(self._average)

    # What steps tell, when they are traced.

    def note_update(self, optimizer, variables):
        """`optimizer` updates `variables`."""
        self._optimizers[id(optimizer)] = optimizer
        self._updated.update((id(variable), variable) for variable in variables)

    def note_written(self, variables):
        """Layers wrote these variables, which can be averaged."""
        self._written.update((id(variable), variable) for variable in variables)

    def state(self):
        """Variables that layers may write."""
        return self._trainer.non_trainable_variables

    # When a round ends.

    def count(self, steps: int):
        """Steps of this round that are done, an int32 scalar; the next `steps` follow them."""
        done, self.done = self.done, (self.done + steps) % self._length
        return tf.constant(done)

    def end_of_step(self, done):
        """To be called after each step, within its function.

        Args:
            done: steps that were done before it since `count`'s round began, an int32 scalar.
        """
        if self._length == 1:
            self._average()
        else:
            is_last = (done + 1) % self._length == 0
            tf.cond(is_last, self._average, lambda: tf.constant(False))

    def end(self):
        """Ends a round that is under way; all workers have to call it at the same moment."""
        if self.done:
            self.done = 0
            self._average_now()

    # Averages.

    def _average(self):
        initial = self._initial_values() if self._slots == "reset" else []
        on_replica = functools.partial(self._on_replica, initial)
        self._strategy.run(tf.autograph.experimental.do_not_convert(on_replica))
        return tf.constant(True)

    def _on_replica(self, initial):
        copies = [_own_copy(variable) for variable in self._averaged()]
        sums = all_reduce_sum([_wide(copy) for copy in copies])
        for copy, total in zip(copies, sums, strict=True):
            copy.assign(tf.cast(total / self._replicas, copy.dtype))
        for slot, value in initial:
            copy = _own_copy(slot)
            copy.assign(tf.fill(copy.shape, tf.cast(value, copy.dtype)))
        for optimizer in self._optimizers.values():
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                self._agree(optimizer)

    def _averaged(self):
        """Weights, their moving averages in optimizers, layers' state; slots if they are."""
        variables = [*self._updated.values()]
        variables += [v for key, v in self._written.items() if key not in self._updated]
        for optimizer in map(_inner, self._optimizers.values()):
            variables += _moving_averages(optimizer)
            variables += _slots(optimizer) if self._slots == "average" else []
        return variables

    def _agree(self, optimizer):
        """On the most careful loss scale, and on the largest count of updates.

        A replica whose gradients were not finite has left out an update that others made.
        """
        for variable, choose in (
            (optimizer.dynamic_scale, tf.reduce_min),
            (optimizer.step_counter, tf.reduce_min),
            (_inner(optimizer)._iterations, tf.reduce_max),
        ):
            copy = _own_copy(variable)
            place = tf.one_hot(this_replica(), self._replicas, dtype=copy.dtype)
            (values,) = all_reduce_sum([copy * place])
            copy.assign(choose(values))

    def _initial_values(self):
        """(slot, the number that fills it at the beginning) of all optimizers."""
        # Variables can be made in neither a function's graph nor, here, in the strategy's scope:
        # both belong to threads.
        optimizers = [_inner(optimizer) for optimizer in self._optimizers.values()]
        return in_another_thread(
            lambda: [pair for optimizer in optimizers for pair in _initial_values(optimizer)]
        )


def _check_no_layer_meets(trainer):
    for layer in trainer._flatten_layers():
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"local_steps (--local_steps): the layer {layer.name!r} is synchronised, so that "
                "replicas would meet in every step; make its BatchNorm per replica "
                "(synchronized=False, --nosync_batch_norm), or leave local_steps out"
            )


def _initial_values(optimizer):
    """(slot, number) pairs of an optimizer, read off another one like it."""
    config = {**optimizer.get_config(), "learning_rate": 0.0}
    with tf.device("CPU:0"):
        like_it = type(optimizer).from_config(config)
        like_it.build([_small(variable) for variable in optimizer._trainable_variables])
        values = [slot.numpy().flat[0] for slot in _float_slots(like_it)]
    return list(zip(_float_slots(optimizer), values, strict=True))


def _small(variable):
    """A variable of the same rank and name, but of one element: slots begin with one number."""
    *scopes, name = variable.path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        shape = [1] * len(variable.shape)
        return keras.Variable(tf.zeros(shape), dtype=variable.dtype, name=name)


def _inner(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def _slots(optimizer):
    """The slots that have a copy on each replica."""
    return [slot for slot in _float_slots(optimizer) if can_be_averaged(slot)]


def _float_slots(optimizer):
    """What an optimizer keeps besides its counter and its rate, moving averages and gradients."""
    others = [
        *(optimizer._iterations, optimizer._learning_rate),
        *_moving_averages(optimizer),
        *(getattr(optimizer, "_accumulated_gradients", None) or []),
    ]
    known = {id(variable) for variable in others}
    return [
        variable
        for variable in optimizer.variables
        if id(variable) not in known and tf.as_dtype(variable.dtype).is_floating
    ]


def _moving_averages(optimizer):
    averages = getattr(optimizer, "_model_variables_moving_average", None) or []
    return [variable for variable in averages if variable is not None]


def _own_copy(variable):
    """This replica's copy of a Keras variable, in replica context."""
    strategy = tf.distribute.get_strategy()
    on_this_worker = this_replica() % replicas_here(strategy)
    return strategy.experimental_local_results(variable.value)[on_this_worker]


def _wide(copy):
    """The value in a type in which a sum over replicas keeps its digits."""
    return tf.cast(copy, tf.float32) if copy.dtype.size < 4 else tf.identity(copy)


def _function(python_function):
    return tf.function(python_function, autograph=False)
