"""Training whose workers wait, so that a test can take one away and give it back.

python elastic_program.py CHECKPOINTS OUTPUT

All four workers wait after step LOST to be killed, and three after step BACK for SIGTERM. Each of
them then writes its process id to waits-<step>-<worker> next to OUTPUT, the file of the weights.
"""

import json
import os
import pathlib
import signal
import sys

import keras

import kdist

PLANNED, LOCAL, EXAMPLES, EPOCHS = 4, 8, 320, 2
LOST, BACK = 7, 14


class Wait(keras.callbacks.Callback):
    """Waits for a signal after one step."""

    def __init__(self, step, directory, worker):
        super().__init__()
        self._step, self._marker = step, directory / f"waits-{step}-{worker}"

    def on_train_begin(self, logs=None):
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == self._step:
            new = self._marker.with_suffix(".new")
            new.write_text(str(os.getpid()))
            new.rename(self._marker)
            os.read(self._reader, 1)


def compiled(model_class, shape, batch, **options):
    layers = keras.layers
    inputs = keras.Input(shape)
    x = layers.Dense(16, activation="relu")(layers.Flatten()(inputs))
    model = model_class(inputs, layers.Dense(10, activation="softmax")(x))
    rate = kdist.schedules.Ramp(peak=0.1, batch=batch, ramp_examples=EXAMPLES)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model


def main(checkpoints, output):
    """Trains or resumes."""
    strategy, cluster = kdist.create_strategy(), kdist.Cluster.resolve()
    keras.utils.set_random_seed(3)
    batch = kdist.strategies.elastic_batch(strategy, LOCAL)
    train, _ = kdist.data.load("digits", batch=batch, examples=EXAMPLES)
    with strategy.scope():
        model = compiled(kdist.Model, train.image_shape, batch, accumulate=batch.accumulate)
    step = LOST if cluster.num_workers == PLANNED else BACK
    run_directory, output = pathlib.Path(checkpoints).parent, pathlib.Path(output)
    callbacks = [
        Wait(step, output.parent, cluster.index),
        kdist.callbacks.Telemetry(
            run_directory, every_seconds=0.0, device_seconds=None, profiles=False, report=False
        ),
        kdist.callbacks.Checkpoint(checkpoints, every_steps=1),
    ]
    model.fit(train, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    if kdist.strategies.is_chief(strategy):
        output.write_text(json.dumps([weight.tolist() for weight in model.get_weights()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
