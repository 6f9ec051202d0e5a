"""Measurements of a training from inside `fit`."""

import json
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.callbacks import Profile, Telemetry
from kdist.report.telemetry_plots import device_plots
from kdist.telemetry.facts import shares_cores
from kdist.telemetry.writers.tensorboard import TensorBoardWriter
from kdist.testing import python
from tests.tiers import seldom


def lines(path, kind=None):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [r for r in records if kind is None or r["kind"] == kind]


def sleeping(x, seconds, slept=None):
    """Returns `x` after `seconds`; appends the seconds that passed to the list `slept`."""

    def wait(x):
        began = time.monotonic()
        time.sleep(seconds)
        if slept is not None:
            slept.append(time.monotonic() - began)
        return x

    return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)


class Slow(keras.layers.Layer):
    """A layer of which it is known how long it takes."""

    def __init__(self, seconds, slept):
        super().__init__()
        self.wait = lambda x: sleeping(x, seconds, slept)

    def call(self, x):
        return x + tf.stop_gradient(self.wait(x) - x)


def model(seconds=0.0, slept=None, **options):
    inputs = keras.Input((4,))
    x = Slow(seconds, slept)(inputs) if seconds else inputs
    model = kdist.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("sgd", "mse", **options)
    return model


def data(batches, seconds=0.0, slept=None):
    x = np.zeros((32 * batches, 4), "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(32, drop_remainder=True)
    if seconds:
        dataset = dataset.map(lambda x, y: (sleeping(x, seconds, slept), y))
    return dataset.prefetch(2)


class Times(keras.callbacks.Callback):
    """Notes the seconds of each step, which a busy machine makes longer."""

    def on_train_begin(self, logs=None):
        self.steps = []

    def on_train_batch_begin(self, batch, logs=None):
        self._began = time.monotonic()

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(time.monotonic() - self._began)


def fitted(model, data, directory, own=(), **options):
    telemetry = Telemetry(directory, device_seconds=None, **options)
    model.fit(data, verbose=0, callbacks=[telemetry, *own])
    return telemetry.summary()


def test_steps_and_examples_of_data_of_unknown_length_are_those_that_ran(tmp_path):
    """An epoch's end leaves two steps to the second of its calls, which have four."""
    short = model(steps_per_execution=4)
    telemetry = Telemetry(tmp_path, device_seconds=None)
    short.fit(data(6).filter(lambda x, y: True), epochs=2, verbose=0, callbacks=[telemetry])
    last = lines(tmp_path / "metrics.jsonl")[-1]
    assert (last["step"], last["examples"]) == (12, 12 * 32)


def test_plain_keras_counts_the_steps_that_ran(tmp_path):
    """The second call of an epoch has two steps."""
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse", steps_per_execution=4)
    plain.fit(data(6), epochs=2, verbose=0, callbacks=[Telemetry(tmp_path, device_seconds=None)])
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl", "epoch")] == [6, 12]


def test_steps_before_a_training_in_another_directory_count(tmp_path):
    """The optimizer counts its updates, each after two steps."""
    trained = model()
    trained.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
    trained.fit(data(4), verbose=0)
    fitted(trained, data(4), tmp_path)
    (epoch,) = lines(tmp_path / "metrics.jsonl", "epoch")
    assert (epoch["step"], epoch["examples"]) == (8, 8 * 32)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"steps_per_execution": 6}, *seldom([{}])], ids=str)
def test_a_slow_pipeline_is_input_bound_with_both_rates(tmp_path, options):
    """400 ms a batch of 32 and 200, or what a busy machine makes of that; 20 steps are enough."""
    of_device, of_pipeline = [], []
    slow = model(0.2, of_device, **options)
    summary = fitted(slow, data(30, 0.4, of_pipeline), tmp_path)
    (text,) = summary["verdict"]
    found = re.match(
        r"input-bound: the pipeline delivers ([\d,]+) examples/s, the devices could train on "
        r"([\d,]+)",
        text,
    )
    pipeline, devices = (int(number.replace(",", "")) for number in found.groups())
    assert pipeline == pytest.approx(32 / np.mean(of_pipeline), rel=0.1)
    assert devices == pytest.approx(32 / np.mean(of_device), rel=0.3)  # it does more than sleep
    assert summary["breakdown"]["input"] == pytest.approx(1 - pipeline / devices, abs=0.06)


@pytest.mark.slow
def test_a_slow_device_is_not_input_bound(tmp_path):
    times = Times()
    summary = fitted(model(0.12), data(20, 0.01), tmp_path, own=[times])
    assert summary["verdict"] == []
    assert summary["breakdown"]["step"] > 0.9
    assert summary["step_seconds_p50"] == pytest.approx(np.median(times.steps), rel=0.2)
    assert summary["step_seconds_p50"] > 0.11


def test_windows_have_the_requested_length(tmp_path):
    fitted(model(0.02), data(60), tmp_path, window_seconds=0.3)
    windows = lines(tmp_path / "metrics.jsonl", "timing")
    assert len(windows) >= 3
    assert sum(w["window_steps"] for w in windows) == 59  # the first call may compile
    assert [w["step"] for w in windows] == sorted(w["step"] for w in windows)
    for window in windows:
        shares = [window[f"{part}_share"] for part in ("input", "callback", "telemetry", "step")]
        assert sum(shares) == pytest.approx(1)
    assert all(w["window_seconds"] >= 0.3 for w in windows[:-1])


class Interrupt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise KeyboardInterrupt


@pytest.mark.parametrize("trains_by", [kdist.Model, keras.Model])
def test_an_interrupted_training_leaves_nothing_behind(tmp_path, trains_by, monkeypatch):
    """The next training with the same strategy had no records of devices, and W&B went on."""
    closed = []
    monkeypatch.setattr(TensorBoardWriter, "close", lambda writer: closed.append(writer))
    plain = model()
    model_ = trains_by(plain.inputs, plain.outputs)
    model_.compile("sgd", "mse")
    options = {"device_seconds": 0.05, "report": False, "tensorboard": True}
    first, second = (Telemetry(tmp_path / n, **options) for n in "ab")
    with pytest.raises(KeyboardInterrupt):
        model_.fit(data(2), epochs=2, verbose=0, callbacks=[first, Interrupt()])
    if trains_by is kdist.Model:
        before = len(lines(tmp_path / "a" / "devices.jsonl"))
        time.sleep(0.3)
        assert len(lines(tmp_path / "a" / "devices.jsonl")) == before
    else:  # Keras does not report the end.
        model_.fit(data(2), verbose=0, callbacks=[first])
    assert closed
    model_.fit(data(10, 0.05), verbose=0, callbacks=[second])
    assert lines(tmp_path / "b" / "devices.jsonl")


def test_goodput_excludes_validation(tmp_path):
    telemetry = Telemetry(tmp_path, device_seconds=None)
    slow = model(0.02)
    slow.fit(data(20), validation_data=data(20, 0.05), epochs=2, verbose=0, callbacks=[telemetry])
    assert 0.05 < telemetry.summary()["goodput"] < 0.5


def test_plain_keras_has_no_timing(tmp_path):
    inputs = keras.Input((4,))
    plain = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    plain.compile("sgd", "mse")
    summary = fitted(plain, data(5), tmp_path)
    assert lines(tmp_path / "metrics.jsonl", "timing") == []
    assert (summary["verdict"], summary["breakdown"]) == ([], {})
    assert summary["examples_per_second"] is None


FAKE_GPUS = """
import json, sys, time
import kdist, keras, numpy as np
from kdist.telemetry.steps import verdict
verdict.MIN_STEPS = verdict.MIN_SECONDS = 0
inputs = keras.Input((4,))
model = kdist.Model(inputs, keras.layers.Dense(1)(inputs))
model.compile("sgd", "mse")
telemetry = kdist.callbacks.Telemetry(sys.argv[1], device_seconds=0.2)
wait = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.3))
x = np.zeros((64, 4), "float32")
model.fit(x, x[:, :1], epochs=8, verbose=0, callbacks=[telemetry, wait])
print(json.dumps(telemetry.summary()["verdict"]))
"""


@pytest.mark.slow
def test_the_slow_one_of_four_gpus_is_named(tmp_path, fake_nvml):
    fast, slow = {"utilization": 90, "sm_clock": 1410}, {"utilization": 90, "sm_clock": 1100}
    said = python(FAKE_GPUS, [str(tmp_path / "run")], fake_nvml(fast, fast, fast, slow))
    assert [text for text in said if text.startswith("GPU 3 runs 22% behind the others")]
    assert not [text for text in said if re.match("GPU [012]", text)]
    records = lines(tmp_path / "run" / "devices.jsonl")
    gpus = {r["device"] for r in records if r["device"].startswith("gpu/")}
    assert gpus == {f"gpu/{n}" for n in range(4)}
    plots = {plot.title: plot for plot in device_plots(kdist.report.read_run(tmp_path / "run"))}
    assert [line["name"] for line in plots["GPU utilization"].data] == sorted(gpus)


def test_requested_steps_are_traced(tmp_path, mirrored):
    with mirrored.scope():
        traced = model(steps_per_execution=4)
    profile = Profile(tmp_path, 10, 14)
    traced.fit(data(40), verbose=0, callbacks=[profile])
    assert profile.steps == 8  # two calls of four: steps 9 to 16
    operations = profile.top_operations()
    assert 1 <= len(operations) <= 10
    times = [operation["seconds_per_step"] for operation in operations]
    assert times == sorted(times, reverse=True)
    assert times[0] > 0


def test_a_training_too_short_for_its_profile_logs_it(tmp_path, capsys):
    profile = Profile(tmp_path, 100, 120)
    model().fit(data(5), verbose=0, callbacks=[profile])
    assert "no profile: training ended after 5 steps" in capsys.readouterr().err
    assert profile.top_operations() == []
    with pytest.raises(ValueError, match=r"--profile=10:20"):
        Profile(tmp_path, 20, 10)


def test_variables_of_a_job_that_the_strategy_does_not_need(monkeypatch):
    strategy = kdist.create_strategy("mirrored", 2)
    monkeypatch.setenv("TF_CONFIG", "{")
    assert shares_cores(strategy)


def test_a_checkpoint_of_the_end_of_a_run_leaves_no_steps(tmp_path):
    for name, resume in (("first", "auto"), ("second", tmp_path / "first/checkpoints")):
        if name == "second":
            (resume,) = resume.glob("step-*")
        run = tmp_path / name
        checkpoint = kdist.callbacks.Checkpoint(run / "checkpoints", resume=resume)
        model().fit(data(4), epochs=1, callbacks=[Telemetry(run), checkpoint], verbose=0)
    assert checkpoint.resumed_from == 4
    assert (run / "summary.json").exists()


class _StopAt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_a_resumed_run_counts_its_steps_and_not_the_updates(tmp_path):
    """The optimizer updates the weights in every second step."""

    def train(*callbacks):
        trained = model()
        trained.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
        checkpoint = kdist.callbacks.Checkpoint(tmp_path / "checkpoints", every_steps=1)
        callbacks = [Telemetry(tmp_path), checkpoint, *callbacks]
        trained.fit(data(4), epochs=2, callbacks=callbacks, verbose=0)
        return checkpoint

    with pytest.raises(KeyboardInterrupt):
        train(_StopAt(6))
    assert train().resumed_from >= 5
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl", "epoch")] == [4, 8]
