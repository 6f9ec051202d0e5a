"""A custom training loop for MirroredStrategy without anything but the training itself.

The loss is computed from the logits; loss and accuracy stay on the devices until the end. Three
choices were fastest with LeNet and MLP. Gradients are summed on one device, not by TensorFlow's
collectives or hierarchical copies. Each replica slices its rows out of the whole batch, which costs
less than the threads of `distribute_datasets_from_function` and `experimental_distribute_dataset`.
With as many replicas as cores, an operation runs on one thread.
"""

import time

from benchmarks.rivals import workload

if __name__ == "__main__":
    given = workload.read()  # before TensorFlow is imported

import keras
import tensorflow as tf

from benchmarks.rivals import tensorflow_parts as parts


class Loop:
    """Trains a model with custom steps.

    Args:
        strategy: the MirroredStrategy.
        model: the model, created in the strategy's scope.
        learning_rate: rate of plain SGD.
        local_batch_size: examples per replica and step.
        takes_whole_batches: whether a replica gets the whole batch and slices its rows out of it.
    """

    def __init__(self, strategy, model, learning_rate, local_batch_size, takes_whole_batches):
        self._strategy, self._local_batch_size = strategy, local_batch_size
        self._global_batch_size = local_batch_size * strategy.num_replicas_in_sync
        self._takes_whole_batches = takes_whole_batches
        with strategy.scope():
            self._logits = keras.Model(model.inputs, model.get_layer("logits").output)
            self._optimizer = keras.optimizers.SGD(learning_rate)
            self._optimizer.build(self._logits.trainable_variables)
            self._loss, self._correct = _sum_on_read(), _sum_on_read()

    def run(self, iterator, calls):
        """Runs the steps of `calls`; returns the mean loss and the accuracy since creation."""
        for steps in calls:
            if steps == 1:
                self._one_step(iterator)
            else:
                self._several_steps(iterator, tf.constant(steps))
        examples = self._global_batch_size * sum(calls)
        loss, correct = self._loss.numpy() / examples, self._correct.numpy() / examples
        with self._strategy.scope():
            self._strategy.run(self._forget)
        return loss, correct

    @tf.function
    def _one_step(self, iterator):
        self._strategy.run(self._step, args=(next(iterator),))

    @tf.function
    def _several_steps(self, iterator, steps):
        for _ in tf.range(steps):
            self._strategy.run(self._step, args=(next(iterator),))

    def _step(self, batch):
        images, labels = self._own_rows(batch) if self._takes_whole_batches else batch
        variables = self._logits.trainable_variables
        with tf.GradientTape() as tape:
            logits = self._logits(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            total = tf.reduce_sum(losses)
            loss = total / self._global_batch_size
        self._optimizer.apply(tape.gradient(loss, variables), variables)
        hits = tf.argmax(logits, axis=-1, output_type=labels.dtype) == labels
        self._loss.assign_add(total)
        self._correct.assign_add(tf.reduce_sum(tf.cast(hits, tf.float32)))

    def _own_rows(self, batch):
        context = tf.distribute.get_replica_context()
        start = int(tf.get_static_value(context.replica_id_in_sync_group)) * self._local_batch_size
        return [values[start : start + self._local_batch_size] for values in batch]

    @tf.function
    def _forget(self):
        self._loss.assign(0.0)
        self._correct.assign(0.0)


def _sum_on_read():
    """Returns a counter that each replica keeps separately and that is summed on reading."""
    return tf.Variable(
        0.0,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def main():
    strategy = tf.distribute.MirroredStrategy(
        parts.logical_cpus(given), tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        model = parts.as_keras(parts.new_model(given))
    loop = Loop(
        *(strategy, model, workload.LEARNING_RATE, given.local_batch_size),
        takes_whole_batches=not given.distributed_data,
    )
    batches = parts.dataset(given.arrays())
    if given.distributed_data:
        batches = strategy.experimental_distribute_dataset(batches)
    iterator = iter(batches)
    loop.run(iterator, given.calls())
    if given.profile:
        parts.report_profile(given, lambda: loop.run(iterator, given.calls()))
        return
    started = time.perf_counter()
    loss, _ = loop.run(iterator, given.calls())
    workload.report(given, time.perf_counter() - started, float(loss), parts.VERSIONS)


if __name__ == "__main__":
    main()
