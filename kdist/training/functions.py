"""Step functions: one call runs a group of steps on every replica.

Several steps in one TensorFlow function cost one call from Python instead of several. Keras builds
that loop from optionals and conditions, which fail under MirroredStrategy; a plain loop over a
known number of steps does not.
"""

import tensorflow as tf

from kdist.training.keras_internals import reduce_per_replica
from kdist.training.logs import LazyLogs

_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


class StepFunction:
    """Runs `step` on the batches of an iterator, on every replica of the trainer's strategy.

    Raises a ValueError where the model asks for XLA and there are several replicas.

    Args:
        trainer: the model.
        step: a function of one replica's batch, such as `model.train_step`, that gives its logs.
        logs_are_metrics: the logs are the results of the model's metrics. Then nothing is
            carried out of the loop, and the metrics are read when somebody reads the logs.
    """

    def __init__(self, trainer, step, logs_are_metrics):
        self._trainer = trainer
        self._logs_are_metrics = logs_are_metrics
        self._on_all_replicas = self._one_step(step)
        compiled = (lambda f: f) if trainer.run_eagerly else _function
        self._one = compiled(lambda iterator: self._on_all_replicas(next(iterator)))
        self._group = self._several if trainer.run_eagerly else _function(self._loop)
        self._on_batch = compiled(self._on_all_replicas)
        self._read_metrics = compiled(trainer.get_metrics_result)

    def __call__(self, iterator, length=None, may_run_out=False):
        """Runs `length` steps (by default `steps_per_execution`) and gives the last one's logs.

        Raises:
            StopIteration: there was no batch left for the first step.
        """
        length = length or self._trainer.steps_per_execution
        if may_run_out or not isinstance(iterator, _ITERATORS):
            outputs = self._as_many_as_there_are(iterator, length)
        elif length == 1:
            outputs = self._one(iterator)
        else:
            outputs = self._group(iterator, tf.constant(length))
        return LazyLogs(self._read_metrics) if self._logs_are_metrics else outputs

    def _one_step(self, step):
        strategy, trainer = self._trainer.distribute_strategy, self._trainer

        @tf.autograph.experimental.do_not_convert
        def on_all_replicas(data):
            outputs = strategy.run(step, args=(data,))
            if self._logs_are_metrics:
                return ()
            return reduce_per_replica(outputs, strategy, reduction="auto")

        if not trainer.run_eagerly and trainer.jit_compile:
            _check_xla_can_compile(strategy)
            on_all_replicas = _function(on_all_replicas, jit_compile=True)
        return trainer._autoconvert_optionals(on_all_replicas)

    def _loop(self, iterator, length):
        if self._logs_are_metrics:
            start = tf.constant(0), ()
        else:
            start = tf.constant(1), self._on_all_replicas(next(iterator))
        _, outputs = tf.while_loop(
            lambda done, _: done < length,
            lambda done, _: (done + 1, self._on_all_replicas(next(iterator))),
            start,
        )
        return outputs

    def _several(self, iterator, length):
        for _ in range(int(length)):
            outputs = self._one(iterator)
        return outputs

    def _as_many_as_there_are(self, iterator, length):
        # The batch is fetched before the step begins: within one function, what needs no data
        # (the step counter, weight decay) would still be done after the last batch.
        outputs = None
        for _ in range(length):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if outputs is None:
                    raise StopIteration from None
                break
            outputs = self._on_batch(batch)
        return outputs


def _check_xla_can_compile(strategy):
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"XLA cannot compile a step over the {strategy.num_replicas_in_sync} replicas of "
            f"{type(strategy).__name__}, whose gradients meet in it; leave jit_compile=True "
            "(--jit_compile) out, or train on one device (--strategy=one_device)"
        )


def _function(python_function, **options):
    return tf.function(python_function, reduce_retracing=True, autograph=False, **options)
