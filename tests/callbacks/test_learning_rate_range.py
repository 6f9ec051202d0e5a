"""Test of learning rates: losses of one device, state that is restored, and the suggestion."""

import contextlib
import doctest

import keras
import numpy as np
import pytest

import kdist
from kdist.callbacks import LearningRateRange, learning_rate_range
from kdist.checkpoint.snapshot import capture

RNG = np.random.default_rng(0)
X = RNG.standard_normal((96, 6)).astype("float32")
Y = (X @ RNG.standard_normal((6, 1)) + 0.1 * RNG.standard_normal((96, 1))).astype("float32")
BATCH = 24


def compiled(strategy=None, rate=0.01, dropout=0.2, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = keras.Input((6,))
        x = keras.layers.Dense(8, activation="tanh")(inputs)
        model = kdist.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(dropout, seed=3)(x)))
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", **options)
    return model


def searched(model, first=1e-5, last=10.0, steps=24, **options):
    search = LearningRateRange(first, last, steps)
    search.run(model, X, y=Y, batch_size=BATCH, **options)
    return search


def test_state_is_restored_bit_by_bit(strategy):
    model = compiled(strategy)
    model.fit(X, Y, batch_size=BATCH, epochs=1, verbose=0)  # momentum is not zero
    before, numbers = capture(model), np.random.get_state()[1].copy()  # noqa: NPY002
    searched(model)
    after = capture(model)
    assert before.keys() == after.keys()
    for name in before.keys() - {name for name in before if name.startswith("metrics/")}:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    np.testing.assert_array_equal(numbers, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"steps_per_execution": 2}])
def test_losses_are_those_of_one_device(options, mirrored):
    # Replicas draw masks of their own.
    one = searched(compiled(dropout=0.0, **options), shuffle=False)
    two = searched(compiled(mirrored, dropout=0.0, **options), shuffle=False)
    assert len(one.losses) == len(two.losses) >= 20
    np.testing.assert_allclose(one.losses[:20], two.losses[:20], rtol=1e-4)


def test_losses_are_those_of_single_batches():
    search = searched(compiled(), first=1e-9, last=1e-8, shuffle=False)
    losses = search.losses.reshape(-1, len(X) // BATCH)
    assert np.ptp(losses, axis=1).min() > 0.05  # batches differ, a running mean would hide it
    model = compiled()
    dropout = [float(model.train_on_batch(X[:BATCH], Y[:BATCH]))]
    np.testing.assert_allclose(search.losses[:1], dropout, rtol=1e-5)


@pytest.mark.slow
def test_suggestion_trains_better_than_a_tenth_or_ten_times_of_it():
    rate = searched(compiled(), steps=60).rate

    def trained(rate):
        model = compiled(rate=rate)
        return model.fit(X, Y, batch_size=BATCH, epochs=5, verbose=0).history["loss"][-1]

    assert trained(rate) < trained(rate / 10)
    assert not trained(rate) > trained(10 * rate)


def test_a_loss_that_is_not_finite_ends_the_sweep():
    search = searched(compiled(), first=1e-4, last=1e12, steps=30)
    assert len(search.losses) < 30
    assert 1e-4 < search.rate < 1e3
    assert "grows again" in search.reason


def test_an_interrupted_sweep_restores_the_state():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    model = compiled()
    before = capture(model)
    with pytest.raises(KeyboardInterrupt):
        searched(model, callbacks=[Stop()])
    np.testing.assert_array_equal(before["weights/0"], capture(model)["weights/0"])


@pytest.mark.slow
def test_plot_shows_the_suggestion():
    search = searched(compiled())
    axes = search.plot()
    assert axes.get_xscale() == "log"
    np.testing.assert_allclose(axes.lines[0].get_xdata(), search.rates)
    assert f"{search.rate:.2g}" in axes.get_legend().get_texts()[-1].get_text()


def test_what_cannot_be_tested_is_refused():
    with pytest.raises(ValueError, match="0 < first < last"):
        LearningRateRange(first=1, last=0.1)
    with pytest.raises(ValueError, match="at least 20"):
        LearningRateRange(steps=5)
    with pytest.raises(ValueError, match=r"run\(model, data\)"):
        LearningRateRange().plot()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(ValueError, match="a number"):
        searched(compiled(rate=schedule))
    with pytest.raises(ValueError, match=r"run\(\)"):
        compiled().fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[LearningRateRange()])


def test_examples():
    assert doctest.testmod(learning_rate_range).failed == 0
