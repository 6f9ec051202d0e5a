"""Keras 2's `fit` (tf-keras) under TensorFlow's ParameterServerStrategy, as in its guide.

Batches are sliced once and kept in memory, so that the input of a worker costs almost nothing.
"""

import os

from benchmarks.rivals import cluster_workload

if __name__ == "__main__":
    given = cluster_workload.read()
    os.environ["GRPC_FAIL_FAST"] = "use_caller"  # as in the guide; set before TensorFlow starts

import tensorflow as tf
import tf_keras


def main():
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        serve(resolver)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    tf_keras.utils.set_random_seed(given.seed)
    with strategy.scope():
        model = lenet()
        model.compile(
            tf_keras.optimizers.SGD(given.learning_rate, momentum=cluster_workload.MOMENTUM),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            steps_per_execution=given.steps_per_call,
        )
    timer = cluster_workload.Timer()
    clock = tf_keras.callbacks.LambdaCallback(on_epoch_begin=timer.begin, on_epoch_end=timer.end)
    model.fit(
        tf_keras.utils.experimental.DatasetCreator(dataset),
        epochs=1 + given.epochs,
        steps_per_epoch=given.steps,
        callbacks=[clock],
        verbose=0,
    )
    versions = {"TensorFlow": tf.__version__, "tf-keras": tf_keras.__version__}
    cluster_workload.report(timer, given.steps, given.local_batch_size, versions)


def serve(resolver):
    """Serves the chief until this process is ended."""
    spec, config = resolver.cluster_spec(), tf.compat.v1.ConfigProto()
    # The guide's remedy for machines with few cores, where training would deadlock.
    if os.cpu_count() < spec.num_tasks("worker") + 1:
        config.inter_op_parallelism_threads = spec.num_tasks("worker") + 1
    server = tf.distribute.Server(
        spec,
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=config,
    )
    server.join()


def lenet():
    """Returns the network of `kdist.models.lenet`."""
    layers = tf_keras.layers
    return tf_keras.Sequential(
        [
            layers.Rescaling(1 / 255, input_shape=cluster_workload.IMAGE_SHAPE),
            *(layers.Conv2D(6, 5, padding="same", activation="relu"), layers.AveragePooling2D(2)),
            *(layers.Conv2D(16, 5, activation="relu"), layers.AveragePooling2D(2)),
            *(layers.Flatten(), layers.Dense(120, "relu"), layers.Dense(84, "relu")),
            layers.Dense(cluster_workload.CLASSES, "softmax"),
        ]
    )


def dataset(_):
    """Returns a worker's batches, endlessly, in a random order."""
    size = given.local_batch_size
    batches = len(given.arrays()[0]) // size
    arrays = [a[: batches * size].reshape(batches, size, *a.shape[1:]) for a in given.arrays()]
    dataset = tf.data.Dataset.from_tensor_slices(tuple(arrays))
    return dataset.shuffle(batches).repeat().prefetch(tf.data.AUTOTUNE)


if __name__ == "__main__":
    main()
