"""kdist's `fit` in each task of a job, or in one process alone."""

from benchmarks.rivals import cluster_workload

if __name__ == "__main__":
    given = cluster_workload.read()

import keras
import tensorflow as tf

import kdist


def main():
    # The program of a server ends here. The two hosts of a slow link have a private network.
    strategy = kdist.create_strategy(given.strategy, given.devices, allow_remote=True)
    keras.utils.set_random_seed(given.seed)
    batch = kdist.Batch(given.local_batch_size, strategy.num_replicas_in_sync)
    train, test = pipelines(batch)
    steps = given.steps or train.steps_per_epoch
    with strategy.scope():
        model = kdist.models.lenet(train.image_shape, train.num_classes)
        compile_model(model, batch, steps)
    timer = cluster_workload.Timer()
    clock = keras.callbacks.LambdaCallback(on_epoch_begin=timer.begin, on_epoch_end=timer.end)
    epochs = 1 + given.epochs
    model.fit(train, epochs=epochs, steps_per_epoch=steps, callbacks=[clock], verbose=0)
    more = {}
    if test is not None:
        more["accuracy"] = model.evaluate(test, verbose=0, return_dict=True)["accuracy"]
    versions = {"TensorFlow": tf.__version__, "Keras": keras.__version__}
    cluster_workload.report(timer, steps, batch.global_size, versions, **more)


def pipelines(batch):
    """Returns the training and test pipelines; random data have no test pipeline."""
    if given.dataset == "random":
        return kdist.data.Pipeline(kdist.data.from_arrays(*given.arrays()), batch), None
    return kdist.data.load(given.dataset, batch=batch, seed=given.seed, download=False)


def compile_model(model, batch, steps):
    """Compiles the model; sets local_steps only if the workload has any."""
    rate = given.learning_rate
    if given.dataset != "random":
        examples = (1 + given.epochs) * steps * batch.global_size
        rate = kdist.schedules.Cosine(rate, batch, total_examples=examples)
    options = {} if given.local_steps is None else {"local_steps": given.local_steps}
    model.compile(
        keras.optimizers.SGD(rate, momentum=cluster_workload.MOMENTUM),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=given.steps_per_call,
        **options,
    )


if __name__ == "__main__":
    main()
