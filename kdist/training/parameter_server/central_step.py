"""A replica's step under `central_storage`, where all replicas share one copy of each variable.

Keras's layers and metrics read a variable and then assign it, so that replicas would overwrite each
other. Therefore each replica reads all variables of the model at the beginning of a step, and
computes with these copies. One write at the end adds the increments of metrics, and assigns the
mean of the state that layers wrote. The optimizer updates the variables themselves, once per step.
"""

import contextlib

import tensorflow as tf

from kdist.training.parameter_server.asynchronous_step import (
    LocalCopies,
    StepOnCopies,
    variables_of,
)
from kdist.training.replica.reduction import all_reduce_sum
from kdist.training.replica.step import activate


class CentralCopies(LocalCopies):
    """A replica's copies of all variables of a model.

    The copies of float metrics begin at the total divided by the number of replicas, so that logs
    which a custom `train_step` returns have the same mean over replicas as under `mirrored`.

    Args:
        trainer: the model.
    """

    def __init__(self, trainer):
        super().__init__(trainer.metrics_variables, variables_of(trainer), from_zero=False)
        self._replicas = trainer.distribute_strategy.num_replicas_in_sync

    def pull(self):
        """Reads the variables."""
        super().pull()
        for variable in self._others:
            if id(variable) not in self._copies:  # a large one
                self._copies[id(variable)] = variable._value.read_value()
        for number, variable in enumerate(self._metrics):
            if tf.as_dtype(variable.dtype).is_floating:
                self._begun_with[number] /= self._replicas
                self._copies[id(variable)] = self._begun_with[number]

    def written(self):
        """Returns (variable, new value) pairs of the variables that layers wrote."""
        written = [variable for variable in self._others if id(variable) in self._written]
        return [(variable, self._copies[id(variable)]) for variable in written]

    def add_to_metrics(self, increments):
        """Adds increments to the metrics' variables themselves."""
        for variable, increment in zip(self._metrics, increments, strict=True):
            variable._value.assign_add(increment)


class CentralStep(StepOnCopies):
    """One replica's step under `central_storage`.

    Args:
        trainer: the model.
        others: the arguments of `ReplicaStep`, in order.
    """

    def __init__(self, trainer, *others):
        super().__init__(trainer, CentralCopies(trainer), *others)

    @contextlib.contextmanager
    def running(self):
        self._copies.pull()
        with super().running(), self._copies:
            yield self

    def gradients(self, optimizer, gradients, variables):
        """Returns the gradients of the global batch; sums of micro-steps belong to variables."""
        self._copies.is_updating = True
        try:
            return super().gradients(optimizer, gradients, variables)
        finally:
            self._copies.is_updating = False

    def apply(self, update, optimizer, gradients, variables):
        """Updates variables once for all replicas."""
        self._write_once(lambda: update(gradients, variables))
        self._copies.forget(variables)

    def optimizer_method(self, name, for_one_device, keras_function):
        """Returns the function for a part of an update, which is that of one device."""
        return for_one_device

    def undoing_if_empty(self, variables):
        """Returns a context manager without effect: `average_state` leaves empty replicas out."""
        return contextlib.nullcontext()

    def average_state(self, except_for):
        """Adds the metrics' increments, and assigns the mean of the state that layers wrote."""
        equal = {id(variable) for variable in except_for}
        written = self._copies.written()
        values = [value for _, value in written]
        averaged = [
            number
            for number, (variable, value) in enumerate(written)
            if value.dtype.is_floating and id(variable) not in equal
        ]
        fraction = self.share.micro_step_fraction
        parts = [
            self.zero_if_empty(values[n]) * tf.cast(fraction, values[n].dtype) for n in averaged
        ]
        added = [self.zero_if_empty(increment) for increment in self._copies.added()]
        sums = all_reduce_sum([*parts, *added]) if parts or added else []
        for number, mean in zip(averaged, sums, strict=False):
            values[number] = mean

        def write():
            for (variable, _), value in zip(written, values, strict=True):
                variable._value.assign(value)
            self._copies.add_to_metrics(sums[len(parts) :])

        self._write_once(write)

    def _write_once(self, write):
        """Calls `write`, which assigns variables, once for all replicas."""

        def merged(strategy):
            (device,) = strategy.extended.parameter_devices
            with activate(self), self.update(), tf.device(device):
                write()

        tf.distribute.get_replica_context().merge_call(
            tf.autograph.experimental.do_not_convert(merged)
        )
