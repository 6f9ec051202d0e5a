"""Objectives for tests of searches, which new processes import. Only `train` imports TensorFlow."""

import os
import pathlib
import signal
import time

import optuna


def draw(trial):
    """Returns a number of the trial; trial 1 is killed, and trial 2 is pruned."""
    if trial.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = trial.suggest_float("x", 0, 1)
    if trial.number == 2:
        raise optuna.TrialPruned
    return x


def end_by(number, trial):
    os.kill(os.getpid(), number)


def meet(directory, trial):
    """Returns once another trial is running at the same time."""
    here = pathlib.Path(directory, str(os.getpid()))
    here.touch()
    deadline = time.monotonic() + 60
    while len(list(here.parent.iterdir())) < 2:
        assert time.monotonic() < deadline, "the other trial does not run"
        time.sleep(0.05)
    return 1.0


def fail(trial):
    raise ValueError(trial.number)


def train(trial):
    """Trains a tiny model on two logical devices; returns its loss."""
    import keras
    import numpy as np

    import kdist

    rate = trial.suggest_float("rate", 1e-9, 10, log=True)
    keras.utils.set_random_seed(0)
    strategy = kdist.create_strategy("mirrored", 2)
    with strategy.scope():
        inputs = keras.Input((4,))
        model = kdist.Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(rate), "mse")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    return model.fit(x, x.sum(axis=1), batch_size=16, epochs=4, verbose=0).history["loss"][-1]
