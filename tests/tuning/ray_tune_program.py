"""A search by Ray Tune with a good and a bad region, two trials at a time, which is killed.

Run as `python ray_tune_program.py DIRECTORY`. A first process searches until it is killed, and a
second one continues. Both use one Ray cluster on loopback. The last line of the output is a JSON
object.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import ray
from ray import tune
from ray._private import ray_constants

import kdist

EPOCHS = 3
X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def train(config):
    """Trains a model that learns with the rate of the good region only."""
    import keras
    from ray.tune.integration.keras import TuneReportCheckpointCallback

    directory, region = pathlib.Path(config["directory"]), config["region"]

    class Wait(keras.callbacks.Callback):
        """Keeps a trial in its last epoch: in the good region until the search has been killed."""

        def on_epoch_begin(self, epoch, logs=None):
            if epoch + 1 == EPOCHS:
                wait_until(lambda: region == "good" and (directory / "killed").exists())

    note(directory, f"{region} starts")
    if region == "crash":
        wait_until(lambda: "bad starts" in notes(directory))  # both run at the same time
        os.kill(os.getpid(), signal.SIGKILL)
    run = kdist.tuning.ray_tune.run_directory()
    strategy = kdist.create_strategy("mirrored", devices=2)
    with strategy.scope():
        inputs = keras.Input((4,))
        outputs = keras.layers.Dense(1, kernel_initializer="zeros")(inputs)
        model = kdist.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1 if region == "good" else 1e-7), "mse")
    callbacks = [
        kdist.callbacks.Telemetry(run, device_seconds=None, report=False),
        kdist.callbacks.Checkpoint(
            run / "checkpoints",
            at_resume=lambda step: note(directory, f"{region} continues after step {step}"),
        ),
        TuneReportCheckpointCallback(checkpoint_on=[]),
        Wait(),
    ]
    options = {"batch_size": 16, "epochs": EPOCHS, "verbose": 0, "callbacks": callbacks}
    history = model.fit(X, Y, validation_data=(X, Y), **options)
    return {name: values[-1] for name, values in history.history.items()}


def note(directory, text):
    """Adds a line to the notes of all trials."""
    with open(directory / "notes", "a") as file:
        file.write(f"{text}\n")


def notes(directory):
    """Returns the notes of all trials, in order."""
    path = directory / "notes"
    return path.read_text().splitlines() if path.exists() else []


def wait_until(condition):
    """Returns when a condition holds."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_hopeless(trial, result):
    """Returns whether a trial is stopped early, as by a scheduler."""
    return result["val_loss"] > 2 and result["training_iteration"] == 2


def search(directory):
    """Runs the search, or continues it; returns what a test checks."""
    trainable = tune.with_resources(train, {"cpu": 1})
    if tune.Tuner.can_restore(directory / "planted"):
        tuner = tune.Tuner.restore(str(directory / "planted"), trainable)
    else:
        record = kdist.tuning.ray_tune.RecordTrials("val_loss", "min")
        regions = tune.grid_search(["crash", "bad", "good"])
        tuner = tune.Tuner(
            trainable,
            param_space={"region": regions, "directory": str(directory)},
            tune_config=tune.TuneConfig(metric="val_loss", mode="min"),
            run_config=tune.RunConfig(
                name="planted", storage_path=str(directory), stop=is_hopeless, callbacks=[record]
            ),
        )
    results = tuner.fit()
    return {
        "best": results.get_best_result().config["region"],
        "failed": results.num_errors,
        "ended": results.num_terminated,
        "tensorflow": "tensorflow" in sys.modules,
    }


def is_saved(directory):
    """Returns whether Tune has saved the end of one trial, and kdist two epochs of another."""
    text = "".join(path.read_text() for path in directory.glob("planted/experiment_state-*"))
    checkpoints = list(directory.glob("planted/*region=good*/checkpoints"))
    steps = kdist.run_directory.newest_step(checkpoints[0]) if checkpoints else None
    return "TERMINATED" in text and steps == 2 * len(X) // 16


def kill_and_continue(directory):
    """Searches in a process that is killed, and in another one; returns its result."""
    from tests.serving.ray_program import nodes

    with nodes(directory, 0, head_cpus=2) as cluster:
        command = [sys.executable, __file__, str(directory), cluster.address]
        # Tune saves its state after each event, instead of every ten seconds.
        environment = {**os.environ, "TUNE_GLOBAL_CHECKPOINT_S": "0"}
        first = subprocess.Popen(command, env=environment)
        wait_until(lambda: is_saved(directory) or first.poll() is not None)
        first.kill()
        assert first.wait() == -signal.SIGKILL
        (directory / "killed").touch()
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seen = json.loads(ended.stdout.strip().splitlines()[-1])
    return seen | {"notes": notes(directory)}


if __name__ == "__main__":
    directory, *address = sys.argv[1:]
    if address:
        ray_constants.ENABLE_RAY_CLUSTER = False  # see tests/serving/ray_program.py
        ray.init(*address, log_to_driver=False, _node_ip_address="127.0.0.1")
        print(json.dumps(search(pathlib.Path(directory))))
    else:
        print(json.dumps(kill_and_continue(pathlib.Path(directory))))
