"""Telemetry of models that are split over devices."""

import functools
import json

import keras
import numpy as np
import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import kdist
from kdist.callbacks import Telemetry
from kdist.parallel import split, stage
from kdist.parallel.inspect.traffic import watched_graphs
from kdist.report.telemetry_plots import share_plots
from kdist.telemetry.steps.step_times import StepTimes
from kdist.telemetry.steps.trace import ProfileSummary, SampledProfiles, summarize
from kdist.training.groups.clock import Times
from tests.telemetry.test_trace import plane

BATCH, HIDDEN = 16, 128
FLOAT = 4


def stages(layout, **options):
    with kdist.create_strategy(kdist.Layout.parse(layout)).scope():
        inputs = keras.Input((8,))
        x = keras.layers.Dense(HIDDEN, "relu", name="first")(inputs)
        plain = keras.Model(inputs, keras.layers.Dense(4, name="second")(x))
        model = split(plain, {"first": stage(0), "second": stage(1)})
        model.compile("sgd", "mse", **options)
    return model


def examples(rows=4 * BATCH):
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype("float32")
    return x, x[:, :4]


@pytest.mark.parametrize(
    ("layout", "options", "rows", "activations"),
    [
        ("pipeline=2", {}, 64, BATCH * HIDDEN),
        ("pipeline=2", {"steps_per_execution": 4}, 64, BATCH * HIDDEN),
        ("pipeline=2,micro_batches=2", {}, 64, BATCH * HIDDEN),
        ("data=2,pipeline=2", {}, 64, BATCH // 2 * HIDDEN),
    ],
)
def test_bytes_between_devices(layout, options, rows, activations):
    """The activations go to the second stage, with targets; their gradients come back."""
    model = stages(layout, **options)
    with watched_graphs() as graphs:
        model.fit(*examples(rows), batch_size=BATCH, verbose=0)
    layout = model.distribute_strategy.layout
    crossing = graphs.crossing_bytes(BATCH // (layout.data * layout.micro_batches))
    there, back = crossing["CPU:0", "CPU:1"], crossing["CPU:1", "CPU:0"]
    targets = BATCH // layout.data * 4
    # Besides them single numbers.
    assert 0 <= there - FLOAT * (activations + targets) <= FLOAT * 32
    assert 0 <= back - FLOAT * activations <= FLOAT * 32


def test_operations_are_grouped_by_device():
    space = xplane_pb2.XSpace()
    events = [("a/MatMul:MatMul", 0, 10), ("b/MatMul:MatMul", 5, 20), ("range:Range", 0, 40)]
    plane(space, "/host:CPU", "thread", events)
    profile = summarize(space, 10, {"a/MatMul": "CPU:0", "b/MatMul": "CPU:1"})
    assert profile.devices == ["CPU:0", "CPU:1"]
    assert profile.busy_seconds == pytest.approx([0.001, 0.0015])
    assert profile.compute_seconds == pytest.approx(0.002)


def test_the_bubble_is_the_idle_share():
    times = StepTimes(64, 2, devices=["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    profile = ProfileSummary([0.1, 0.2, 0.2], 0.3, 0.1, [], ["CPU:0", "CPU:1", "CPU:3"])
    figures = times.window(Times(10, 2.0, 0.0, 0.0, {0.2: 10}), profile)
    assert figures["device_busy_share"] == pytest.approx([1 / 3, 2 / 3, 0, 2 / 3])
    assert figures["bubble_share"] == pytest.approx(1 - 5 / 12)
    assert "replica_busy_seconds" not in figures


def test_gpus_of_several_hosts():
    """Profiles name this host's alone, and without the host."""
    times = StepTimes(64, 2, devices=["worker:0/GPU:0", "worker:0/GPU:1"])
    profile = ProfileSummary([0.1, 0.2], 0.2, 0.0, [], ["GPU:0", "GPU:1"])
    figures = times.window(Times(10, 2.0, 0.0, 0.0, {0.2: 10}), profile)
    assert figures["device_busy_share"] == pytest.approx([0.5, 1.0])


def test_unknown_devices_of_operations():
    times = StepTimes(64, 2, devices=["CPU:0", "CPU:1"])
    profile = ProfileSummary([0.1], 0.1, 0.0, [], ["replica 0"])
    figures = times.window(Times(10, 2.0, 0.0, 0.0, {0.2: 10}), profile)
    assert "device_busy_share" not in figures
    assert "replica_busy_seconds" not in figures


@pytest.mark.slow
def test_training_of_a_split_model(tmp_path, monkeypatch):
    profiles = functools.partial(SampledProfiles, first_after_seconds=0.0)
    monkeypatch.setattr("kdist.telemetry.steps.windows.SampledProfiles", profiles)
    model = stages("pipeline=2,micro_batches=2")
    telemetry = Telemetry(tmp_path, device_seconds=None)
    x, y = examples(64 * BATCH)
    model.fit(x, y, batch_size=BATCH, epochs=8, verbose=0, callbacks=[telemetry])
    summary = telemetry.summary()
    assert summary["crossing_bytes_per_step"].keys() == {"CPU:0 to CPU:1", "CPU:1 to CPU:0"}
    assert len(summary["device_busy_share"]) == 2
    assert all(0 < share < 1 for share in summary["device_busy_share"])
    assert summary["bubble_share"] == pytest.approx(1 - sum(summary["device_busy_share"]) / 2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("device_busy_share" in line for line in lines if line["kind"] == "timing")
    plots = share_plots(kdist.report.read_run(tmp_path))
    assert plots[-1].title == "Busy share of each device"


@pytest.mark.parametrize("again", ["the same callback", "another callback", "the first callback"])
def test_a_second_fit_uses_the_graphs_of_the_first(again, tmp_path):
    """TensorFlow tells of its graphs once; validation has others."""
    model, (x, y) = stages("pipeline=2"), examples()
    telemetry = Telemetry(tmp_path / "first", device_seconds=None)
    before = [] if again == "the first callback" else [telemetry]
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=before)
    if again != "the same callback":
        telemetry = Telemetry(tmp_path / "second", device_seconds=None)
    validation = {"validation_data": (x, y), "validation_batch_size": 8}
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[telemetry], **validation)
    summary = telemetry.summary()
    if again == "the first callback":
        assert "crossing_bytes_per_step" not in summary
    else:
        expected = FLOAT * (BATCH * HIDDEN + BATCH * 4)
        sent = summary["crossing_bytes_per_step"]["CPU:0 to CPU:1"]
        assert expected <= sent <= expected + FLOAT * 32


def test_a_model_without_a_split_has_no_such_metrics(mirrored, tmp_path):
    with mirrored.scope():
        model = kdist.Model.of(keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]))
        model.compile("sgd", "mse")
    telemetry = Telemetry(tmp_path, device_seconds=None)
    model.fit(*examples(), batch_size=BATCH, verbose=0, callbacks=[telemetry])
    assert "crossing_bytes_per_step" not in telemetry.summary()
