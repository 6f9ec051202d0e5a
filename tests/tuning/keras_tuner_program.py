"""A search by KerasTuner with a good and a bad region, on two replicas in each of its processes.

Run as `python keras_tuner_program.py DIRECTORY MAX_TRIALS`. The variables of KerasTuner make it the
chief or a worker of a distributed search. With SLOW=1 in its environment, a trial does not end.
"""

import os
import sys
import time

import keras
import keras_tuner
import numpy as np

import kdist

strategy = kdist.create_strategy("mirrored", devices=2)
directory, max_trials = sys.argv[1:]
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)


class Wait(keras.callbacks.Callback):
    """Keeps a trial from ending."""

    def on_train_end(self, logs=None):
        print("waits", flush=True)
        time.sleep(3600)


def build(hp):
    """Returns a model that learns with the good rates only."""
    rates = [0.05, 0.1] if hp.Choice("region", ["bad", "good"]) == "good" else [1e-7, 1e-6]
    inputs = keras.Input((4,))
    model = kdist.Model(inputs, keras.layers.Dense(1)(inputs))
    rate = hp.Choice("rate", [0, 1])
    model.compile(keras.optimizers.SGD(rates[rate]), "mse")
    return model


tuner = keras_tuner.GridSearch(
    build,
    keras_tuner.Objective("val_loss", "min"),
    max_trials=int(max_trials),
    directory=directory,
    project_name="planted",
    distribution_strategy=strategy,
)
kdist.tuning.keras_tuner.record_trials(tuner, device_seconds=None, report=False)
slow = [Wait()] if "SLOW" in os.environ else []
tuner.search(x, y, validation_data=(x, y), epochs=3, batch_size=16, verbose=0, callbacks=slow)
