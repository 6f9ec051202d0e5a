import doctest
import math
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist import schedules
from kdist.batch import Batch
from kdist.schedules import Cosine, Piecewise, Ramp

EPOCH = 600
IN_EPOCHS = {
    "start": 1e-5,
    "floor": 1e-5,
    "ramp_examples": 5 * EPOCH,
    "decay": 0.8,
    "decay_examples": EPOCH,
    "epoch_examples": EPOCH,
}
ONE_REPLICA = [1e-05, 1.8e-05, 2.6e-05, 3.4e-05, 4.2e-05, 5e-05, 4.2e-05, 3.56e-05, 3.048e-05]
ONE_REPLICA += [2.6384e-05]


def test_examples_in_the_docstrings():
    results = doctest.testmod(schedules)
    assert results.attempted >= 6
    assert results.failed == 0


def test_ramp_by_epochs_on_one_replica():
    rate = Ramp(5e-5, Batch(16), **IN_EPOCHS)
    epochs = np.arange(10) * EPOCH
    np.testing.assert_allclose(rate.at_examples(epochs), ONE_REPLICA, rtol=1e-12)
    # … and constant during each epoch.
    np.testing.assert_allclose(rate.at_examples(epochs + EPOCH - 1), ONE_REPLICA, rtol=1e-12)


@pytest.mark.parametrize(
    "arguments", [{"peak": 4 * 5e-5}, {"peak": 5e-5, "scale": "linear", "base_batch": 16}]
)
def test_ramp_by_epochs_on_four_replicas(arguments):
    rate = Ramp(batch=Batch(16, 4), **IN_EPOCHS, **arguments)
    got = rate.at_examples(np.arange(10) * EPOCH)
    assert got[0] == pytest.approx(1e-5, rel=1e-12)
    assert got[5] == pytest.approx(2e-4, rel=1e-12)
    assert got[9] == pytest.approx(8.7824e-05, rel=1e-12)


def test_ramp_smooth_with_sustain():
    rate = Ramp(
        1.0, Batch(1), ramp_examples=10, sustain_examples=5, decay=0.5, decay_examples=10, floor=0.2
    )
    expected = {0: 0.0, 5: 0.5, 10: 1.0, 15: 1.0, 25: 0.6, 35: 0.4}
    for examples, value in expected.items():
        assert rate.at_examples(examples) == pytest.approx(value, rel=1e-12)


def test_scaling_touches_the_peak_alone():
    options = {"ramp_examples": 100, "start": 0.01, "floor": 0.001, "base_batch": 32}
    rate = Ramp(0.1, Batch(32, 4), scale="sqrt", **options)
    assert rate.at_examples(100) == pytest.approx(0.2)
    assert rate.at_examples(0) == pytest.approx(0.01)
    assert Ramp(0.1, Batch(32, 4), scale="linear", **options).scaled_peak == pytest.approx(0.4)
    assert Ramp(0.1, Batch(32, 4), scale="none", **options).scaled_peak == pytest.approx(0.1)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_more_replicas_change_nothing_at_a_given_example(replicas):
    batch = Batch(4, replicas)
    rate = Cosine(1.0, batch, ramp_examples=64, total_examples=640)
    for examples in (0, 32, 64, 320, 640):
        assert float(rate(examples // batch.global_size)) == pytest.approx(
            float(rate.at_examples(examples)), abs=1e-7
        )


def test_cosine_halfway():
    rate = Cosine(2.0, Batch(1), total_examples=100, floor=1.0)
    assert rate.at_examples(25) == pytest.approx(1 + (1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize(("local", "step"), [(1, 2**24 + 1), (3, 2**23 + 1), (1024, 3 * 2**22 + 1)])
def test_far_steps_are_exact(local, step):
    """Distinguishes steps that float32 rounds, and examples beyond int32."""
    rate = Piecewise([local * step], [1.0, 0.5], Batch(local))
    assert float(rate(tf.constant(step - 1))) == 1.0
    assert float(rate(tf.constant(step))) == 0.5


def test_steps_beyond_int32():
    rate = Ramp(1.0, Batch(1024), ramp_examples=2**50)
    assert float(rate(2**39)) == 0.5
    assert float(rate(tf.constant(2**39, tf.int64))) == 0.5


ALL = [
    Ramp(0.1, Batch(2, 3, 4), ramp_examples=10, decay=0.5, decay_examples=7, epoch_examples=5),
    Cosine(0.1, Batch(2), total_examples=100, ramp_examples=10, scale="sqrt", base_batch=8),
    Piecewise([10, 20], [1.0, 0.1, 0.01], Batch(2)),
]


@pytest.mark.parametrize("rate", ALL, ids=lambda rate: type(rate).__name__)
def test_serialises_through_keras(rate):
    twin = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(rate))
    assert type(twin) is type(rate)
    assert twin.get_config() == rate.get_config()
    examples = np.arange(0, 200, 3)
    np.testing.assert_array_equal(twin.at_examples(examples), rate.at_examples(examples))
    assert repr(rate).startswith(f"{type(rate).__name__}(batch={{'local': 2")


@pytest.mark.parametrize("rate", ALL, ids=lambda rate: type(rate).__name__)
def test_the_optimizer_follows_it_in_graph_and_out(rate):
    in_graph = tf.function(rate)
    for step in (0, 1, 7):
        expected = float(rate.at_examples(step * rate.batch.global_size))
        assert float(rate(step)) == pytest.approx(expected, rel=1e-6)
        assert float(in_graph(tf.constant(step, tf.int64))) == pytest.approx(expected, rel=1e-6)
    optimizer = keras.optimizers.SGD(rate)
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    for step in range(3):
        before = float(variable.numpy())
        optimizer.apply([tf.constant(1.0)])
        expected = float(rate.at_examples(step * rate.batch.global_size))
        assert before - float(variable.numpy()) == pytest.approx(expected, abs=1e-6)


class RatesUsed(keras.callbacks.Callback):
    """Returns the changes of a weight with gradient 1, which equal the rate of each step."""

    def on_train_begin(self, logs=None):
        self.weights = [self.model.get_weights()[0].item()]

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights()[0].item())


def test_fit_follows_it():
    rate = Ramp(0.5, Batch(4), ramp_examples=12, decay=0.5, decay_examples=8)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(rate), loss=lambda _, outputs: keras.ops.mean(outputs))
    used = RatesUsed()
    model.fit(np.ones((24, 1)), np.ones(24), batch_size=4, verbose=0, callbacks=[used])
    expected = rate.at_examples(np.arange(6) * 4)
    np.testing.assert_allclose(-np.diff(used.weights), expected, atol=1e-6)


def test_at_examples_inside_a_tf_function():
    in_graph = tf.function(lambda: tf.constant(ALL[0].at_examples([0, 5])))
    np.testing.assert_array_equal(in_graph(), ALL[0].at_examples([0, 5]))


def test_saved_model_keeps_its_schedule(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(ALL[0]), "mse")
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.optimizer._learning_rate.get_config() == ALL[0].get_config()


def test_plot(tmp_path):
    import matplotlib

    matplotlib.use("agg")
    axes = ALL[0].plot(num_examples=100)
    line = axes.lines[0]
    np.testing.assert_allclose(line.get_ydata(), ALL[0].at_examples(line.get_xdata()))
    assert axes.get_xlabel() == "examples seen"
    peak = 2 * axes.get_ylim()[1]
    assert Ramp(peak, Batch(1)).plot(50, axes=axes) is axes
    assert len(axes.lines) == 2
    bottom, top = axes.get_ylim()
    assert bottom == 0
    assert top > peak  # the second curve is not cut off at the limits of the first


def test_plot_shows_epochs():
    import matplotlib

    matplotlib.use("agg")
    by_epoch = Ramp(5e-5, Batch(16), **IN_EPOCHS).plot(10 * EPOCH)
    (epochs,) = by_epoch.child_axes
    assert epochs.get_xlabel() == "epochs"
    by_epoch.figure.canvas.draw()
    assert epochs.get_xlim() == pytest.approx((0, 10))
    assert not Ramp(0.1, Batch(1)).plot(50).child_axes
    assert not Piecewise([10], [1.0, 0.1], Batch(2)).plot(50).child_axes


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'kdist\[notebooks\]'"):
        ALL[0].plot(10)


def test_refuses_a_batch_that_is_only_a_number():
    with pytest.raises(TypeError, match="batch=64"):
        Ramp(0.1, 64)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Ramp(-0.1, Batch(1)), "peak=-0.1 is negative"),
        (lambda: Ramp(float("nan"), Batch(1)), "peak=nan.*not finite"),
        (lambda: Ramp(0.1, Batch(1), ramp_examples=-1), "ramp_examples=-1"),
        (lambda: Ramp(0.1, Batch(1), epoch_examples=0), "epoch_examples=0 is not positive"),
        (lambda: Ramp(0.1, Batch(1), sustain_examples=-1), "sustain_examples=-1"),
        (lambda: Ramp(0.1, Batch(1), floor=0.2), "floor 0.2 is above the peak 0.1"),
        (lambda: Ramp(0.1, Batch(1), decay=0), "decay=0 is outside"),
        (lambda: Ramp(0.1, Batch(1), decay=1.5, decay_examples=3), "decay=1.5"),
        (lambda: Ramp(0.1, Batch(1), decay=0.5), "needs decay_examples"),
        (lambda: Ramp(0.1, Batch(1), decay=0.5, decay_examples=0), "decay_examples=0"),
        (lambda: Ramp(0.1, Batch(1), scale="linear"), "needs base_batch"),
        (lambda: Ramp(0.1, Batch(1), scale="log"), "one of none, linear, sqrt"),
        (lambda: Cosine(0.1, Batch(1), total_examples=5, ramp_examples=5), "must be more than"),
        (lambda: Piecewise([1], [1.0], Batch(1)), "1 boundaries need 2 values, got 1"),
        (lambda: Piecewise([5, 5], [1.0, 1.0, 1.0], Batch(1)), "must be positive and increasing"),
        (lambda: Piecewise([5], [1.0, -1.0], Batch(1)), r"values\[1\]=-1.0"),
    ],
)
def test_refuses(make, expected):
    with pytest.raises(ValueError, match=expected):
        make()
