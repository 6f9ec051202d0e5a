import json
import math
import resource
import shutil

import keras
import numpy as np
import pytest

import kdist
from kdist.callbacks import (
    EpochCheckpoint,
    NonFiniteLossError,
    StopOnNonFiniteLoss,
    Telemetry,
)
from kdist.compat.keras import MULTI_OPTIMIZERS
from kdist.telemetry import NullWriter
from tests.forked import python


def linear(rate=0.1, model_class=kdist.Model, **arguments):
    inputs = keras.Input((4,))
    model = model_class(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(rate), "mse", **arguments)
    return model


X = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_telemetry_writes_steps_examples_and_epochs(tmp_path, strategy):
    with strategy.scope():
        model = linear()
    telemetry = Telemetry(tmp_path, every_seconds=0.0)
    history = model.fit(
        X, Y, batch_size=8, epochs=2, validation_data=(X, Y), verbose=0, callbacks=[telemetry]
    ).history
    records = lines(tmp_path / "metrics.jsonl")
    kinds = [r["kind"] for r in records]
    assert kinds == (["train"] * 5 + ["timing", "epoch"]) * 2
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 11))
    assert [r["examples"] for r in records if r["kind"] == "train"] == list(range(8, 81, 8))
    epochs = [r for r in records if r["kind"] == "epoch"]
    assert [r["val_loss"] for r in epochs] == pytest.approx(history["val_loss"])
    assert [r["loss"] for r in epochs] == pytest.approx(history["loss"])
    assert [r["learning_rate"] for r in records] == pytest.approx([0.1] * 14)
    assert sum(telemetry.epoch_seconds) == pytest.approx(sum(r["epoch_seconds"] for r in epochs))
    after_first = sum(telemetry.epoch_seconds) - telemetry.first_call_seconds
    # Steps only, without the rest of an epoch, such as reading its metrics.
    assert telemetry.examples_per_second >= 9 * 8 / after_first
    timing = [r for r in records if r["kind"] == "timing"]
    seconds = sum(r["window_seconds"] for r in timing)
    assert [r["window_steps"] for r in timing] == [4, 5]
    assert telemetry.examples_per_second == pytest.approx(9 * 8 / seconds)


@pytest.mark.skipif(not MULTI_OPTIMIZERS, reason="Keras 3.14 has no MultiOptimizer")
def test_several_optimizers_have_no_common_rate(tmp_path):
    model = linear()
    rates = keras.optimizers.OptimizerMap(default_optimizer=keras.optimizers.SGD(0.1))
    model.compile(keras.optimizers.MultiOptimizer(rates), "mse")
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Telemetry(tmp_path, every_seconds=0.0)])
    records = lines(tmp_path / "metrics.jsonl")
    assert {record["learning_rate"] for record in records} == {None}
    assert kdist.report.write([tmp_path], tmp_path / "report.html").exists()


def test_telemetry_uses_the_given_writer(tmp_path):
    class Listener(NullWriter):
        records, closed = [], False

        def write(self, record):
            self.records.append(record)

        def close(self):
            self.closed = True

    writer = Listener()
    telemetry = Telemetry(tmp_path / "run", every_seconds=0.0, writer=writer)
    linear().fit(X, Y, batch_size=8, verbose=0, callbacks=[telemetry])
    assert [record["kind"] for record in writer.records] == ["train"] * 5 + ["timing", "epoch"]
    assert not writer.closed  # the summary follows
    assert not (tmp_path / "run").exists()


def test_telemetry_writes_the_schedules_rate(tmp_path, mirrored):
    rate = kdist.schedules.Ramp(0.1, kdist.Batch(4, 2), ramp_examples=40)
    with mirrored.scope():
        model = linear(rate)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Telemetry(tmp_path, every_seconds=0.0)])
    written = [r["learning_rate"] for r in lines(tmp_path / "metrics.jsonl")][:5]
    assert written == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1], rel=1e-5)


def test_telemetry_reads_no_logs_in_between(tmp_path):
    model = linear()
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Telemetry(tmp_path, every_seconds=1e9)])
    # The last line has the epoch's logs, which Keras has read.
    assert [r["kind"] for r in lines(tmp_path / "metrics.jsonl")] == ["timing", "epoch", "train"]


def test_telemetry_alone_writes_a_whole_run(tmp_path, mirrored):
    with mirrored.scope():
        model = linear(metrics=["mae"])
    model.fit(
        X, Y, batch_size=8, validation_data=(X, Y), verbose=0, callbacks=[Telemetry(tmp_path)]
    )
    config, summary = (
        json.loads((tmp_path / name).read_text()) for name in ("config.json", "summary.json")
    )
    assert config["optimizer"]["name"] == "SGD"
    assert config["optimizer"]["learning_rate"] == 0.1
    assert config["batch"] == {"global": 8, "local": 4, "replicas": 2, "accumulate": 1}
    assert config["layout"]["data"] == 2
    assert config["versions"]["keras"] == keras.__version__
    assert summary["verdict"] == []
    assert summary["num_replicas"] == 2
    assert {"loss", "mae", "val_loss", "val_mae", "total_seconds"} <= set(summary)
    page = (tmp_path / "report.html").read_text()
    assert "not finished" not in page.partition("<section")[0]


def test_a_second_fit_continues_the_axes_of_its_run(tmp_path):
    linear().fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[Telemetry(tmp_path)])
    model, telemetry = linear(), Telemetry(tmp_path, every_seconds=0)
    model.fit(X, Y, batch_size=20, verbose=0, callbacks=[telemetry])
    model.fit(X, Y, batch_size=10, verbose=0, callbacks=[telemetry])
    records = lines(tmp_path / "metrics.jsonl")
    epochs = [(r["epoch"], r["step"], r["examples"]) for r in records if r["kind"] == "epoch"]
    assert epochs == [(1, 5, 40), (2, 10, 80), (3, 12, 120), (4, 16, 160)]
    seconds = [r["seconds"] for r in records]
    assert seconds == sorted(seconds)


def test_a_run_that_its_program_has_configured_stays_as_it_is(tmp_path):
    run = kdist.run_directory.RunDirectory.create(tmp_path / "run", {"model": "mine"})
    for directory in (run, run.path):
        linear().fit(X, Y, verbose=0, callbacks=[Telemetry(directory, report=False)])
    assert json.loads(run.config.read_text()) == {"model": "mine"}
    run.check_intact()
    assert not run.report.exists()


def losses_of_steps(model, epochs=2):
    """Returns the loss of each of the 5 steps of some epochs, without `fit`."""
    seen = []
    for start in list(range(0, 40, 8)) * epochs:
        x, y = X[start : start + 8], Y[start : start + 8]
        loss = model.train_on_batch(x, y, return_dict=True)["loss"]
        seen.append(float(loss))
        model.reset_metrics()
    return seen


@pytest.mark.parametrize("model_class", [kdist.Model, keras.Model])
def test_curves_are_means_of_windows(tmp_path, model_class):
    """Keras's running mean over the epoch starts with a cliff in each epoch."""
    rmse = keras.metrics.RootMeanSquaredError(name="rmse")
    model = linear(model_class=model_class, metrics=[rmse])
    alone = linear(model_class=keras.Model)
    alone.set_weights(model.get_weights())
    telemetry = Telemetry(tmp_path, every_seconds=0)
    arguments = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(X, Y, callbacks=[telemetry], **arguments)
    train = [r for r in lines(tmp_path / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["loss"] for r in train] == pytest.approx(losses_of_steps(alone), rel=1e-4)
    # It is no mean, and stays Keras's.
    last = train[-1]["rmse"]
    assert last == pytest.approx(model.history.history["rmse"][-1], rel=1e-5)


def test_the_logs_of_a_custom_step_stay_as_they_are(tmp_path):
    class Own(kdist.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "loss": logs["loss"] * 0 + 7}

    inputs = keras.Input((4,))
    model = Own(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Telemetry(tmp_path, every_seconds=0)])
    train = [r for r in lines(tmp_path / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["loss"] for r in train] == [7.0] * 5


def poisoned(bad_example=27):
    x = X.copy()
    x[bad_example] = np.inf
    return x


@pytest.mark.parametrize("k", [1, 3])
def test_a_bad_loss_stops_at_its_step_and_keeps_the_last_good_model(tmp_path, strategy, k):
    with strategy.scope():
        model = linear(steps_per_execution=k)
    checkpoint = EpochCheckpoint(tmp_path)
    callbacks = [StopOnNonFiniteLoss(checkpoint), checkpoint]
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    good = model.get_weights()
    with pytest.raises(NonFiniteLossError, match=r"step 9 \(epoch 2\).*--learning_rate") as caught:
        model.fit(
            poisoned(), Y, batch_size=8, initial_epoch=1, epochs=3, shuffle=False, verbose=0,
            callbacks=callbacks,
        )  # fmt: skip
    assert caught.value.step == 9
    assert str(tmp_path / "epoch-0001.keras") in str(caught.value)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "epoch-0000.keras",
        "epoch-0001.keras",
    ]
    kept = keras.saving.load_model(checkpoint.newest())
    assert all(np.array_equal(a, b) for a, b in zip(kept.get_weights(), good, strict=True))


def test_a_bad_loss_stops_plain_keras_after_the_epoch():
    model = linear(model_class=keras.Model)
    with pytest.raises(NonFiniteLossError, match="a step of epoch 1"):
        model.fit(poisoned(), Y, batch_size=8, verbose=0, callbacks=[StopOnNonFiniteLoss()])


def test_finite_loss_does_not_stop_training():
    model = linear()
    history = model.fit(X, Y, epochs=3, verbose=0, callbacks=[StopOnNonFiniteLoss(every_seconds=0)])
    assert len(history.history["loss"]) == 3


def test_checkpoints_keep_the_newest(tmp_path):
    model = linear()
    checkpoint = EpochCheckpoint(tmp_path / "new" / "directory", keep=3)
    model.fit(X, Y, epochs=5, verbose=0, callbacks=[checkpoint])
    names = [path.name for path in sorted((tmp_path / "new" / "directory").iterdir())]
    assert names == ["epoch-0003.keras", "epoch-0004.keras", "epoch-0005.keras"]
    newest = keras.saving.load_model(checkpoint.newest())
    assert np.array_equal(newest.get_weights()[0], model.get_weights()[0])
    with pytest.raises(ValueError, match="keep=0"):
        EpochCheckpoint(tmp_path, keep=0)


def test_training_goes_on_when_a_model_cannot_be_written(tmp_path, caplog):
    """Files above a size cannot be written, as on a full disk."""
    model = linear()
    checkpoint = EpochCheckpoint(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Limit(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if epoch == 1 else -1, limits[1]))

    (tmp_path / "unfinished-epoch-0003.keras").touch()  # of a process that was killed
    try:
        model.fit(X, Y, epochs=3, verbose=0, callbacks=[Limit(), checkpoint])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch-0001.keras",
        "epoch-0003.keras",
    ]
    assert caplog.text.count(f"cannot write {tmp_path / 'epoch-0002.keras'}") == 1
    assert "training continues" in caplog.text


def test_models_are_saved_to_a_deleted_directory_and_next_to_anything(tmp_path):
    """Epoch 10,000 is newer than 9,999, though its name sorts before it."""
    directory = tmp_path / "models"
    for name in ("unfinished-epoch-9000.keras", "epoch-0005.keras"):
        (directory / name).mkdir(parents=True)
    (directory / "epoch-best.keras").touch()
    model, checkpoint = linear(), EpochCheckpoint(directory)
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[checkpoint])
    assert [epoch for epoch, _ in checkpoint.written()] == [0, 1]
    shutil.rmtree(directory)
    for epoch in range(9997, 10001):
        checkpoint.on_epoch_end(epoch)
    assert [epoch for epoch, _ in checkpoint.written()] == [10000, 10001]
    assert checkpoint.newest() == directory / "epoch-10001.keras"


# Prints the resident bytes at the end of each epoch. Profiles, of 20 MB each, depend on the time.
MANY_EPOCHS = """
import json, sys, pathlib
import keras, numpy as np, psutil
import kdist
from kdist.callbacks import (
    Checkpoint, EpochCheckpoint, EpochSeconds, StopOnNonFiniteLoss, Telemetry
)

directory, samples = pathlib.Path(sys.argv[1]), []
strategy = kdist.create_strategy("mirrored", 2)
with strategy.scope():
    inputs = keras.Input((4,))
    model = kdist.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("adam", "mse")
sample = lambda epoch, logs: samples.append(psutil.Process().memory_info().rss)
callbacks = [
    Telemetry(directory, every_seconds=0, window_seconds=0, profiles=False),
    Checkpoint(directory / "checkpoints"),
    EpochCheckpoint(directory / "models"),
    EpochSeconds(),
    StopOnNonFiniteLoss(every_seconds=0),
    keras.callbacks.LambdaCallback(on_epoch_end=sample),
]
data = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")
model.fit(*data, batch_size=20, epochs=300, verbose=0, callbacks=callbacks)
print(json.dumps(samples))
"""


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_epochs(tmp_path):
    """The benchmark is benchmarks/memory_growth.py."""
    samples = python(MANY_EPOCHS, [tmp_path])
    assert samples[-1] - samples[100] < 6e6  # 20 kB per epoch


def test_a_model_with_a_bad_loss_is_not_saved(tmp_path):
    model = linear()
    checkpoint = EpochCheckpoint(tmp_path)
    checkpoint.set_model(model)
    checkpoint.on_epoch_end(0, {"loss": math.nan})
    assert checkpoint.newest() is None
