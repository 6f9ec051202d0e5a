"""Losses that layers add to the loss of the data."""

import keras

from benchmarks.equivalence.examples import classifier, compiled, hidden_layers, uneven, whole
from benchmarks.equivalence.feature import Feature

TWO_EPOCHS = {"epochs": 2}


@keras.saving.register_keras_serializable("kdist_equivalence")
class MeanActivation(keras.layers.Layer):
    """Hands its input on and adds the mean of its squares to the loss."""

    def call(self, inputs):
        self.add_loss(0.5 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def _with_added_loss(model_class):
    inputs = keras.Input((64,))
    x = keras.layers.Dense(32, activation="relu")(inputs)
    outputs = hidden_layers(MeanActivation()(x))
    return compiled(model_class(inputs, outputs))


_L2 = classifier(layer=lambda: {"kernel_regularizer": keras.regularizers.L2(0.02)})
_ACTIVITY = classifier(layer=lambda: {"activity_regularizer": keras.regularizers.L1(0.02)})

FEATURES = {
    "L2 regulariser": Feature("penalty on weights", _L2, whole, TWO_EPOCHS),
    "L2 regulariser, uneven batch": Feature(
        "the penalty counts once, whatever the batch", _L2, uneven(5), TWO_EPOCHS
    ),
    "activity regulariser": Feature("penalty on activations", _ACTIVITY, whole, TWO_EPOCHS),
    "activity regulariser, uneven batch": Feature(
        "the penalty is a mean over examples", _ACTIVITY, uneven(5), TWO_EPOCHS
    ),
    "add_loss": Feature(
        "a layer adds a mean of its activations", _with_added_loss, whole, TWO_EPOCHS
    ),
    "add_loss, uneven batch": Feature(
        "the same with a last batch of 5", _with_added_loss, uneven(5), TWO_EPOCHS
    ),
}
