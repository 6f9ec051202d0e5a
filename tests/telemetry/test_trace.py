"""Summaries of synthetic profiles, and of one of a training."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import kdist
from kdist.telemetry.steps.trace import SampledProfiles, read_trace, summarize
from kdist.telemetry.steps.windows import training_flops

MILLISECOND = 10**9  # in picoseconds


def plane(space, name, line, events):
    """A plane with one line of (name, begin, end) in milliseconds."""
    plane = space.planes.add(name=name)
    line = plane.lines.add(name=line)
    for number, (event, begin, end) in enumerate(events):
        plane.event_metadata[number].name = event
        line.events.add(
            metadata_id=number,
            offset_ps=begin * MILLISECOND,
            duration_ps=(end - begin) * MILLISECOND,
        )


def test_operations_on_the_host_belong_to_replicas():
    space = xplane_pb2.XSpace()
    events = [
        ("model/conv/Conv2D:Conv2D", 0, 10),
        ("while/body/_1/while/replica_1/model/conv/Conv2D:Conv2D", 0, 20),
        ("all_reduce_sum/AddN:AddN", 15, 30),
        ("ExecutorState::Process", 0, 100),
        ("while/body:While", 0, 100),
        ("IteratorGetNext:IteratorGetNext", 30, 90),
    ]
    plane(space, "/host:CPU", "thread", events)
    profile = summarize(space, steps=10)
    assert list(profile.busy_seconds) == pytest.approx([0.001, 0.002])
    assert profile.compute_seconds == pytest.approx(0.002)
    assert profile.reduce_seconds == pytest.approx(0.001)  # while nobody computed
    assert [(op.type, op.device) for op in profile.operations] == [
        ("Conv2D", "replica 1"),
        ("AddN", "replica 0"),
        ("Conv2D", "replica 0"),
    ]
    assert profile.operations[0].name == "replica_1/model/conv/Conv2D"
    assert sum(op.share for op in profile.operations) == pytest.approx(1)


def test_kernels_belong_to_gpus():
    space = xplane_pb2.XSpace()
    plane(space, "/host:CPU", "thread", [("model/conv/Conv2D:Conv2D", 0, 1)])
    kernels = [("volta_sgemm", 0, 40), ("ncclDevKernel_AllReduce", 30, 60)]
    plane(space, "/device:GPU:0", "Stream #13(Compute)", kernels)
    plane(space, "/device:GPU:1", "Stream #13(Compute)", [("volta_sgemm", 0, 50)])
    plane(space, "/device:GPU:1", "XLA Modules", [("not a kernel", 0, 90)])
    profile = summarize(space, steps=1)
    assert list(profile.busy_seconds) == pytest.approx([0.04, 0.05])
    assert profile.reduce_seconds == pytest.approx(0.01)
    assert {op.device for op in profile.operations} == {"GPU:0", "GPU:1"}


def test_an_empty_profile_has_no_summary(tmp_path):
    assert read_trace(tmp_path, 1) is None
    assert summarize(xplane_pb2.XSpace(), 1) is None


def small(strategy):
    with strategy.scope():
        inputs = keras.Input((28, 28, 1))
        x = keras.layers.Conv2D(8, 3, padding="same")(inputs)
        x = keras.layers.GlobalAveragePooling2D()(x)
        model = kdist.Model(inputs, keras.layers.Dense(3)(x))
        model.compile("sgd", "mse", steps_per_execution=4)
    return model


X, Y = np.ones((64, 28, 28, 1), "float32"), np.ones((64, 3), "float32")


def test_a_training_of_two_replicas(mirrored, tmp_path):
    model = small(mirrored)
    model.fit(X, Y, batch_size=8, verbose=0)
    with tf.profiler.experimental.Profile(str(tmp_path)):
        model.fit(X, Y, batch_size=8, verbose=0)
    profile = read_trace(tmp_path, steps=8)
    assert len(profile.busy_seconds) == 2
    assert all(seconds > 0 for seconds in profile.busy_seconds)
    assert profile.compute_seconds <= sum(profile.busy_seconds) * (1 + 1e-9)
    assert any("all_reduce_sum" in op.name for op in profile.operations)
    conv = [op for op in profile.operations if "Conv2DBackpropFilter" in op.type]
    assert {op.device for op in conv} == {"replica 0", "replica 1"}
    assert {op.calls for op in conv} == {8}


@pytest.mark.exhaustive
def test_profiles_are_rare(mirrored, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    profiles = SampledProfiles(first_after_seconds=0.0)
    model = small(mirrored)
    seen = []

    class Profiling(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            profiles.begin()

        def on_train_batch_end(self, batch, logs=None):
            seen.append(profiles.end(4))

        def on_train_end(self, logs=None):
            profiles.stop()  # one that has just begun would stay

    model.fit(X, Y, batch_size=8, epochs=300, verbose=0, callbacks=[Profiling()])
    summaries = [profile for profile in seen if profile is not None]
    assert 1 <= len(summaries) <= 2
    assert list(tmp_path.iterdir()) == []


def test_a_profile_of_the_user_stays_complete(mirrored, tmp_path):
    profiles = SampledProfiles(first_after_seconds=0.0)
    with tf.profiler.experimental.Profile(str(tmp_path)):
        profiles.begin()
        assert profiles.end(1) is None
        small(mirrored).fit(X, Y, batch_size=8, verbose=0)
    assert read_trace(tmp_path, steps=8) is not None


def test_without_a_directory_for_temporary_files_nothing_is_profiled(monkeypatch):
    def full(prefix):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    profiles = SampledProfiles(first_after_seconds=0.0)
    profiles.begin()
    assert profiles.end(1) is None
    profiles.stop()


def test_flops_of_forward_and_backward_pass(mirrored):
    forward = 2 * 28 * 28 * 9 * 8 + 2 * 8 * 3
    # Biases and means are counted as well; they are few.
    assert 3 * forward <= training_flops(small(mirrored)) <= 1.2 * 3 * forward


def test_a_model_of_unknown_inputs_is_not_counted():
    class Own(keras.Model):
        def call(self, x):
            return x

    assert training_flops(Own()) is None
