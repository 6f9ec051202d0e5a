"""Padding in the evaluation of plain Keras models."""

import keras
import numpy as np
import pytest

import kdist


@pytest.fixture
def model():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((2, 2, 1))
    x = keras.layers.Dense(3, kernel_regularizer="l2")(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Softmax()(x))


@pytest.mark.slow
def test_padding_has_no_weight(model):
    """Loss, metric, and regularizer of seven examples in two padded batches of four."""
    draw = np.random.default_rng(0)
    x, y = draw.uniform(size=(7, 2, 2, 1)).astype("float32"), draw.integers(0, 3, 7)
    source = kdist.data.from_arrays(x, y)
    test = kdist.data.Pipeline(source, kdist.Batch(4), training=False)
    model.compile(loss="sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    found = model.evaluate(kdist.data.weighted(test), verbose=0)
    assert found == pytest.approx(model.evaluate(x, y, batch_size=7, verbose=0), abs=1e-6)
    plain = model.evaluate(test.dataset(), verbose=0)
    assert plain[0] != pytest.approx(found[0], abs=1e-3)


def test_training_pipeline_is_rejected():
    source = kdist.data.from_arrays(np.zeros((8, 2, 2, 1), "uint8"), np.zeros(8, int))
    with pytest.raises(ValueError, match="padding"):
        kdist.data.weighted(kdist.data.Pipeline(source, kdist.Batch(4)))


def test_the_old_name_warns():
    with pytest.warns(DeprecationWarning, match="weighted"):
        assert kdist.data.weighed is kdist.data.weighted
