"""A replica's rows as micro-batches, and what makes a micro-batch's part of a loss right.

A replica's loss is what its rows would give at once, whatever the micro-batches:

- a mean over rows is the sum of the micro-batches' means, each weighed by its share of the rows:
  these need not be equal;
- a mean over a mask or over sample weights is a sum that is divided by the mask or the weights of
  *all* rows. These are known before the first micro-batch goes forward: they come of an inference
  pass over all rows of which TensorFlow computes only what the masks depend on, in most models
  nothing but a comparison of the inputs, and loops that read variables, such as those of RNNs;
- with fewer rows than micro-batches some are empty. They are shown a row that belongs to another
  (`kdist.training.share`), weigh nothing, and what layers and metrics write for them is undone.
"""

import contextlib

import keras
import tensorflow as tf

from kdist.training import step as steps
from kdist.training.beside import beside_inputs
from kdist.training.share import BatchDivision, Share, number_of_rows


class MicroBatches:
    """The micro-batches of one replica's step.

    Args:
        model: the model.
        data: the replica's rows: (x, y, sample_weight), each of shape (B, …) in any structure.
        number: into how many they are divided: rows B·m // number up to B·(m + 1) // number.
        loss_place: a function that gives the context in which a loss is computed.

    Attributes:
        parts: the data of each.
        steps: what Keras's hooks ask in each.
    """

    def __init__(self, model, data, number: int, loss_place):
        self._model, self._data, self._loss_place = model, data, loss_place
        self._step = steps.current()
        self._divisors: list | None = None
        division = BatchDivision((number_of_rows(data),), (0,), number)
        taken = [division.take(data, 0, micro_batch) for micro_batch in range(number)]
        self.parts = [part for part, _ in taken]
        self.steps = [MicroStep(self._step, share, self._divisor) for _, share in taken]

    def joined(self, tensors):
        """The micro-batches' tensors as one, of shape (B, …), without rows shown to empty ones."""
        mine = [
            tensor[: micro.micro_share.rows] if micro.micro_share.may_be_empty else tensor
            for tensor, micro in zip(tensors, self.steps, strict=True)
        ]
        return tf.concat(mine, 0)

    def _divisor(self, number):
        """(the divisor of all of the replica's rows, the correction) of the loss `number`."""
        if self._divisors is None:
            x, y, sample_weight = self._data
            rehearsal = _Rehearsal(self._step)
            with tf.name_scope("divisors"), steps.asked(rehearsal):
                y_pred = self._model(x, training=False)
                with self._loss_place():
                    self._model._compute_loss(x, y, y_pred, sample_weight, training=True)
            self._divisors = rehearsal.divisors
        return self._divisors[number]


class _Asked:
    """A step that answers as another one does where it has no answer of its own."""

    def __init__(self, step):
        self._step = step

    def __getattr__(self, name):
        return getattr(self._step, name)


class _Rehearsal(_Asked):
    """Notes what each loss of the whole rows is divided by; nothing else is computed.

    Attributes:
        divisors: (scalar, what corrects a loss that is a sum divided by it), of each loss.
    """

    rehearses = True

    def __init__(self, step):
        super().__init__(step)
        self.divisors: list[tuple] = []

    def correct_mean(self, loss, divisor, rows):
        """As `ReplicaStep.correct_mean`, which is proportional to the loss."""
        correction = self._step.correct_mean(tf.ones([], loss.dtype), divisor, rows)
        self.divisors.append((tf.cast(divisor, loss.dtype), correction))
        return loss


class MicroStep(_Asked):
    """What Keras's hooks ask while a micro-batch goes through a stage: the replica's step, but for
    losses, which are weighed by the micro-batch's share of the replica's rows.

    A synchronised BatchNorm weighs the replicas by their rows of the step, not of the micro-batch.

    Args:
        step: the replica's.
        share: the micro-batch's share of the replica's rows.
        divisor: the number of a loss -> (what all of the replica's rows are divided by, the
            correction).

    Attributes:
        micro_share: the same.
        added_losses: what layers have added to the loss of this micro-batch.
    """

    def __init__(self, step, share: Share, divisor):
        super().__init__(step)
        self.micro_share = share
        self.added_losses: list = []
        self._divisor = divisor
        self._means = 0
        self._before: dict | None = None

    def weighed(self, loss):
        """Its part of the replica's loss: a scalar by rows; values of rows as they are, or zero."""
        if loss.shape.rank:
            return loss * tf.cast(self.micro_share.rows > 0, loss.dtype)
        return loss * tf.cast(self.micro_share.of_batch, loss.dtype)

    def of_batch(self, dtype):
        """The micro-batch's share of the rows of the batch."""
        return self._step.of_batch(dtype) * tf.cast(self.micro_share.of_batch, dtype)

    def correct_sum(self, loss):
        """A sum over rows, such that what `weighed` makes of it adds up to the replica's."""
        return self._of_its_share(self._step.correct_sum(loss))

    def correct_mean(self, loss, divisor, rows):
        """A mean by another divisor than rows: what `weighed` makes of it adds up likewise."""
        of_all, correction = self._divisor(self._means)
        self._means += 1
        part = tf.math.divide_no_nan(loss * tf.cast(divisor, loss.dtype), of_all)
        return self._of_its_share(part * correction)

    def _of_its_share(self, loss):
        return tf.math.divide_no_nan(loss, tf.cast(self.micro_share.of_batch, loss.dtype))

    @contextlib.contextmanager
    def running(self, remembers: bool = False):
        """The hooks ask it meanwhile; what is written then stays only if there are rows.

        Gives a list to which is added what is written: (variable, its value before).

        Args:
            remembers: the list is wanted.
        """
        undoes = self.micro_share.may_be_empty
        before: dict[int, tuple] = {}
        state: list[tuple] = []
        self._before = before if undoes or remembers else None
        with steps.asked(self):
            yield state
            state += [(variable, value) for variable, _, value in before.values()]
            if undoes:
                with beside_inputs():
                    for _, copy, value in before.values():
                        copy.assign(tf.where(self.micro_share.rows > 0, copy, value))
        self._before = None

    @contextlib.contextmanager
    def running_again(self, state):
        """The hooks ask it while the stage goes forward again: as before, and nothing is written.

        Seeds and all else that is written come of `state`, so that what is random is the same.

        Args:
            state: (variable, its value before the stage went forward first), as `running` gives.
        """
        self._means = 0
        with (
            steps.asked(self),
            keras.StatelessScope(state, collect_losses=True, initialize_variables=False),
        ):
            yield

    def note_written(self, variable: keras.Variable):
        """A layer or a metric is about to write `variable`."""
        self._step.note_written(variable)
        if self._before is not None and id(variable) not in self._before:
            copy = self._step.local(variable._value)
            with beside_inputs():
                self._before[id(variable)] = variable, copy, tf.identity(copy)
