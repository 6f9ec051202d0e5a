"""Training with parameter servers, for tests that disturb it.

python parameter_server_program.py parameter_server DIRECTORY OUTPUT

Steps are slow, so that faults happen during training, until the file `full-speed` exists beside
OUTPUT; without it, training stops before its last quarter, however fast the machine is.
"""

import json
import pathlib
import sys
import time

import keras

import kdist

SECONDS_PER_STEP = 0.05
# After these epochs, one device reaches an accuracy between 0.972 and 0.989, depending on the seed.
# The tests require 0.95.
EPOCHS, BATCH = 40, 32


class Slow(keras.callbacks.Callback):
    """Slows training down, and holds it before its last quarter, until a file exists.

    A killed worker takes 10 s to come back on one machine and 40 s on another; a pause after each
    step alone would let training end on the slower one before all workers were killed.
    """

    def __init__(self, full_speed):
        super().__init__()
        self._full_speed = full_speed

    def on_train_batch_end(self, batch, logs=None):
        if not self._full_speed.exists():
            time.sleep(SECONDS_PER_STEP)

    def on_epoch_begin(self, epoch, logs=None):
        while epoch >= EPOCHS * 3 // 4 and not self._full_speed.exists():
            time.sleep(SECONDS_PER_STEP)


def main(kind, directory, output):
    """Trains or resumes; workers and parameter servers end in `create_strategy`."""
    strategy = kdist.create_strategy(kind)
    keras.utils.set_random_seed(1)
    train, test = kdist.data.load("digits", batch=kdist.Batch(BATCH, 1))
    layers = keras.layers
    with strategy.scope():
        inputs = keras.Input(train.image_shape)
        x = layers.Conv2D(32, 3, activation="relu")(inputs)
        x = layers.Flatten()(layers.Conv2D(64, 3, activation="relu")(x))
        x = layers.Dropout(0.5)(layers.Dense(128, activation="relu")(x))
        model = kdist.Model(inputs, layers.Dense(10, activation="softmax")(x))
        model.compile(
            keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    slow = Slow(pathlib.Path(output).with_name("full-speed"))
    checkpoint = kdist.callbacks.Checkpoint(directory, every_steps=100)
    model.fit(train, epochs=EPOCHS, callbacks=[checkpoint, slow], verbose=0)
    result = {
        "iterations": int(model.optimizer.iterations),
        "steps": EPOCHS * train.steps_per_epoch,
        "accuracy": model.evaluate(test, verbose=0, return_dict=True)["accuracy"],
    }
    pathlib.Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
