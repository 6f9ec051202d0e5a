"""Training of a model that is split over hosts, for tests that disturb it.

python multi_host_program.py LAYOUT DIRECTORY OUTPUT

Checkpoints go to DIRECTORY; after training, weights and history go to OUTPUT.
"""

import json
import pathlib
import sys
import time

import keras

import kdist
from kdist.parallel import split, stage

SECONDS_PER_STEP = 0.1
EXAMPLES, BATCH, EPOCHS = 1280, 64, 2


def main(layout, directory, output):
    """Trains or resumes; all tasks except the first serve."""
    strategy = kdist.create_strategy(kdist.Layout.parse(layout))
    keras.utils.set_random_seed(1)
    batch = kdist.Batch(BATCH // strategy.num_replicas_in_sync, strategy.num_replicas_in_sync)
    train, test = kdist.data.load("digits", batch=batch, examples=EXAMPLES)
    with strategy.scope():
        model = split(_model(train.image_shape), {"first.*": stage(0), "rest.*": stage(1)})
        loss = "sparse_categorical_crossentropy"
        model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    slow = keras.callbacks.Callback()
    slow.on_train_batch_end = lambda batch, logs: time.sleep(SECONDS_PER_STEP)
    callbacks = [kdist.callbacks.Checkpoint(directory, every_steps=5), slow]
    history = model.fit(
        train, validation_data=test, epochs=EPOCHS, callbacks=callbacks, verbose=0
    ).history
    weights = [weight.tolist() for weight in model.get_weights()]
    pathlib.Path(output).write_text(json.dumps({"weights": weights, "history": history}))


def _model(shape):
    layers = keras.layers
    inputs = keras.Input(shape)
    x = layers.Flatten(name="first_flat")(layers.Rescaling(1 / 255, name="first_scale")(inputs))
    x = layers.Dropout(0.1, seed=3, name="first_drop")(layers.Dense(32, "relu", name="first")(x))
    x = layers.Dense(32, "relu", name="rest_1")(x)
    return keras.Model(inputs, layers.Dense(10, "softmax", name="rest_2")(x))


if __name__ == "__main__":
    main(*sys.argv[1:])
