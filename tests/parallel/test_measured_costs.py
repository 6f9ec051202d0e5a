"""Measured costs replace computed ones in the search for placements."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist import Layout
from kdist.parallel import measure_costs, split, stage, suggest
from kdist.parallel.search.costs import ModelWork

layers = keras.layers


@keras.saving.register_keras_serializable("test_measured_costs")
class Slow(layers.Layer):
    """A thousand products in a loop, of which computed costs count at most one."""

    def call(self, inputs):
        square = tf.matmul(inputs, inputs, transpose_a=True)

        def body(number, x):
            return number + 1, tf.tanh(tf.matmul(x, square))

        return tf.while_loop(lambda number, _: number < 1000, body, (0, inputs))[1]

    def compute_output_shape(self, input_shape):
        return input_shape


def misleading():
    """The slow layer comes first. Computed costs count only the arithmetic of five others."""
    inputs = keras.Input((128,))
    x = Slow(name="slow")(inputs)
    for number in range(5):
        x = layers.Dense(128, name=f"d{number}")(x)
    return keras.Model(inputs, x)


def test_stages_follow_what_was_measured():
    model = misleading()
    costs = measure_costs(model, batch_size=16, repeats=15)
    assert costs["slow"] > 5 * sum(costs[f"d{number}"] for number in range(5))
    computed = suggest(model, Layout(pipeline=2))
    assert computed["d0"] == stage(0)
    measured = suggest(model, Layout(pipeline=2), costs=costs)
    assert measured == {"slow": stage(0), **{f"d{number}": stage(1) for number in range(5)}}
    with kdist.create_strategy(Layout(pipeline=2)).scope():
        assert split(model, measured).places["d0"] == 1


def test_given_costs_take_the_place_of_computed_ones():
    model = misleading()
    costs = {"slow": 0.0, **{f"d{number}": 1.0 for number in range(4)}, "d4": 4.0}
    placement = suggest(model, Layout(pipeline=2), costs=costs)
    assert [name for name, where in placement.items() if where == stage(1)] == ["d4"]


def test_costs_are_of_each_operation():
    with pytest.raises(ValueError, match="no entry for d0, d1, d2"):
        suggest(misleading(), Layout(pipeline=2), costs={"slow": 1.0})


def test_the_model_stays_as_it_was():
    """Includes moving statistics and seed states, for all kinds of operations."""
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(10, 8, name="embedding")(tokens)
    x = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    x = layers.Dropout(0.5, name="drop")(layers.BatchNormalization(name="norm")(x))
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="dense")], name="inner")
    shared = layers.Dense(8, name="shared")
    x = shared(shared(layers.GlobalAveragePooling1D(name="mean")(x)))
    model = keras.Model(tokens, inner(x))
    before = [variable.numpy() for variable in model.variables]
    costs = measure_costs(model, batch_size=2, repeats=9)
    names = ("embedding", "attention", "norm", "drop", "mean", "shared", "inner")
    assert set(costs) == set(names)
    assert all(seconds >= 0 for seconds in costs.values())
    assert sum(costs.values()) > 0
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def recurrent(batch_size, stateful):
    inputs = keras.Input(batch_shape=(batch_size, 4, 5))
    x = layers.LSTM(6, stateful=stateful, name="recurrent")(inputs)
    model = keras.Model(inputs, layers.Dense(3, name="head", trainable=False)(x))
    model.get_layer("recurrent").cell.bias.trainable = False
    return model


def test_inputs_with_a_batch_size_of_their_own():
    fixed = recurrent(10, stateful=True)
    expected = ModelWork(recurrent(None, stateful=False)).operation_costs()
    for ours, theirs in zip(ModelWork(fixed).operation_costs(), expected, strict=True):
        assert ours.seconds == pytest.approx(theirs.seconds, rel=0.2)  # it also writes states
        assert ours.kept_bytes == theirs.kept_bytes
    costs = measure_costs(fixed, repeats=1)
    assert set(suggest(fixed, Layout(pipeline=2), costs=costs)) == {"recurrent", "head"}


def test_what_cannot_be_measured():
    with pytest.raises(ValueError, match="batch_size=0"):
        measure_costs(misleading(), batch_size=0)
    inputs = keras.Input((None, 4), name="sequence")
    model = keras.Model(inputs, layers.Dense(4)(inputs))
    with pytest.raises(ValueError, match="'sequence' has the shape"):
        measure_costs(model)
