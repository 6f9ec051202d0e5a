"""Training with parameter servers, for tests that disturb it.

python parameter_server_program.py parameter_server DIRECTORY OUTPUT

Steps are slow, so that faults happen during training, until the file `full-speed` exists beside
OUTPUT.
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
    slow = keras.callbacks.Callback()
    full_speed = pathlib.Path(output).with_name("full-speed")
    slow.on_train_batch_end = lambda batch, logs: (
        None if full_speed.exists() else time.sleep(SECONDS_PER_STEP)
    )
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
