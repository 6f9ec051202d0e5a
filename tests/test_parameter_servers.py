"""Jobs with parameter servers: asynchronous training, and a worker that is killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import types

import keras
import pytest
import tensorflow as tf

from kdist.cluster import Cluster
from kdist.launch.local_engine import reserve_ports
from kdist.training.parameter_server.coordinator_loop import AsynchronousFunction
from tests.forked import python_tasks

TRAINING = """
import json, pathlib, sys
import kdist
strategy = kdist.create_strategy("parameter_server", cluster_timeout_seconds=60)
import keras
from sklearn.datasets import load_digits
x, y = load_digits(return_X_y=True)
x = (x * (255 / 16)).reshape(-1, 8, 8, 1).astype("uint8")
keras.utils.set_random_seed(1)
batch = kdist.Batch(local=32, replicas=strategy.num_replicas_in_sync)
source = kdist.data.from_arrays(x, y)
train = kdist.data.Pipeline(source, batch, seed=1)
test = kdist.data.Pipeline(source, batch, training=False)
class Counting(keras.layers.Layer):
    # Counts its steps in a variable.
    def build(self, input_shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
    def call(self, x, training=False):
        if training:
            self.count.assign_add(1.0)
        return x

with strategy.scope():
    layers = keras.layers
    model = kdist.Model.of(keras.Sequential([
        layers.Input((8, 8, 1)), layers.Rescaling(1 / 255), layers.Flatten(),
        layers.Dense(64, activation="relu"), layers.Dropout(0.1), layers.BatchNormalization(),
        Counting(), layers.Dense(10, activation="softmax")]))

def compile(**options):
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy",
                      metrics=["accuracy"], **options)

class Progress(keras.callbacks.Callback):
    batches = 0
    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if directory:
            (directory / "progress").write_text(str(self.batches))
    def on_epoch_end(self, epoch, logs=None):
        is_enough = directory is None or (directory / "enough").exists()
        self.model.stop_training = epoch >= 11 and is_enough

directory = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None
progress = Progress()
compile()
if not kdist.strategies.is_chief(strategy):  # it evaluates
    checkpoint = kdist.callbacks.EpochCheckpoint(directory)
    history = model.fit(train, validation_data=test, callbacks=[checkpoint])
    print(json.dumps({"epochs": history.epoch, "accuracy": history.history["val_accuracy"]}))
    sys.exit()
callbacks = [progress] + ([kdist.callbacks.EpochCheckpoint(directory)] if directory else [])
history = model.fit(train, validation_data=test, epochs=1000, verbose=0, callbacks=callbacks)
result = {
    "logs": sorted(history.history),
    "accuracy": model.evaluate(test, verbose=0)[1],
    "steps": len(history.epoch) * train.steps_per_epoch,
    "batches": progress.batches,
    "iterations": int(model.optimizer.iterations.numpy()),
    "counted": float(model.layers[-2].count.numpy()),
    "staleness": [model.training_state.staleness.mean, model.training_state.staleness.largest],
}
compile(max_staleness=1)
model.fit(train, epochs=2, verbose=0)
result["bounded"] = [model.training_state.staleness.steps, model.training_state.staleness.largest]
try:
    model.train_on_batch(x[:2], y[:2])
except RuntimeError as error:
    result["train_on_batch"] = str(error)
print(json.dumps(result))
"""


@pytest.mark.slow
def test_asynchronous_training_learns_and_loses_no_update(tmp_path):
    tasks = {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}
    (tmp_path / "enough").touch()
    outcome, *_, evaluated = python_tasks(TRAINING, tasks, [str(tmp_path)])
    assert outcome["accuracy"] >= 0.95
    assert outcome["iterations"] == outcome["batches"] == outcome["steps"] == outcome["counted"]
    mean, largest = outcome["staleness"]
    assert 0 < mean <= largest
    steps, largest = outcome["bounded"]
    assert steps == 2 * outcome["steps"] / 12
    assert largest <= 1
    assert "use fit" in outcome["train_on_batch"]
    # The evaluator evaluated the last epoch, with the chief's result, and earlier ones.
    assert outcome["logs"] == ["accuracy", "loss"]
    assert evaluated["epochs"][-1] == 11
    assert evaluated["accuracy"][-1] == pytest.approx(outcome["accuracy"], abs=1e-6)
    lines = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [n + 1 for n in evaluated["epochs"]]


def test_the_count_of_an_accumulating_optimizer_is_corrected_after_a_repeated_group():
    optimizer, group = keras.optimizers.SGD(gradient_accumulation_steps=2), object()
    trainer = types.SimpleNamespace(
        optimizer=optimizer,
        distribute_strategy=tf.distribute.get_strategy(),
        get_metrics_result=dict,
    )
    dispatcher = types.SimpleNamespace(
        repeats=lambda: 1,
        wait=lambda: (0, (tf.zeros(4), {}), 1.0),
        is_idle=True,
        forget=lambda: None,
    )
    function = AsynchronousFunction(trainer, None, dispatcher, updates=True)
    function._dispatched[0] = [group], 3
    with function.in_flight([]):
        optimizer._iterations.assign(5)  # two of the three steps ran twice
        function.run(group)
    assert int(optimizer._iterations) == 3


@pytest.mark.exhaustive
def test_a_restarted_worker_rejoins(tmp_path):
    with reserve_ports(4) as ports, contextlib.ExitStack() as running:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        job = {"chief": addresses[:1], "worker": addresses[1:3], "ps": addresses[3:]}

        def start(role, index=0):
            environment = dict(os.environ)
            cluster = Cluster(job, role, index)
            cluster.publish(environment)
            output = (tmp_path / cluster.name).open("w")
            command = [sys.executable, "-c", TRAINING, str(tmp_path)]
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            running.callback(process.wait)
            running.callback(process.kill)
            return process

        chief, victim, *_ = start("chief"), start("worker", 1), start("worker", 0), start("ps")
        _wait_for(lambda: int(_said(tmp_path, "progress") or 0) > 60, chief, tmp_path)
        victim.send_signal(signal.SIGKILL)
        victim.wait(10)
        substitute = start("worker", 1)
        _wait_for(lambda: "worker 1 joins" in _said(tmp_path, "worker 1"), chief, tmp_path)
        time.sleep(3)
        (tmp_path / "enough").touch()
        assert chief.wait(60) == 0, _said(tmp_path, "chief")
        assert substitute.wait(30) == 0
    assert "worker 1 joins a running job" in _said(tmp_path, "worker 1")
    outcome = json.loads(_said(tmp_path, "chief").strip().splitlines()[-1])
    assert outcome["accuracy"] >= 0.95
    assert outcome["batches"] == outcome["steps"]
    # Updates of the dead worker's repeated bundle remain.
    assert outcome["steps"] <= outcome["iterations"] <= outcome["steps"] + 64


def _wait_for(condition, process, directory):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, _said(directory, "chief")
        assert time.monotonic() < deadline, _said(directory, "chief")
        time.sleep(0.05)


def _said(directory, name):
    file = directory / name
    return file.read_text() if file.exists() else ""
