"""Dropout: each replica draws its own masks, reproducibly; one replica draws Keras's masks.

Masks cannot equal a reference: one device draws one mask for the whole batch, and several devices
draw several. So the masks themselves are compared. They can be read from the weights: the loss is
linear, and each weight is multiplied by one element of one example's mask, so its gradient is that
element.
"""

import keras
import numpy as np

from benchmarks.equivalence import trial
from benchmarks.equivalence.feature import Feature, Outcome
from benchmarks.equivalence.verdict import Verdict

BATCH, WIDTH, STEPS = 8, 64, 3
RATE = 0.5


def linear(y_true, y_pred):
    """The mean of the outputs: its gradient is the same everywhere."""
    return keras.ops.mean(y_pred)


def _masks_as_gradients(model_class):
    """`sum(W[example] * dropout(1))` for each example; `W` begins with zeros."""
    keras.utils.set_random_seed(trial.SEED)
    example = keras.Input((BATCH * STEPS,))
    ones = keras.Input((WIDTH,))
    rows = keras.layers.Dense(WIDTH, use_bias=False, kernel_initializer="zeros")(example)
    mask = keras.layers.Dropout(RATE)(ones)
    model = model_class([example, ones], keras.layers.Dot(axes=1)([rows, mask]))
    model.compile(keras.optimizers.SGD(1.0), loss=linear)
    return model


def _examples():
    number = BATCH * STEPS
    return {
        "x": [np.eye(number, dtype="float32"), np.ones((number, WIDTH), "float32")],
        "y": np.zeros((number, 1), "float32"),
        "batch_size": BATCH,
    }


def _again(model):
    """The replicas, and the weights of a second training from the same seed."""
    model_class = type(model)
    with model.distribute_strategy.scope():
        second = _masks_as_gradients(model_class)
    second.fit(**_examples(), shuffle=False, verbose=0)
    return {
        "replicas": model.distribute_strategy.num_replicas_in_sync,
        "again": second.get_weights()[0],
    }


def independent_masks(outcome: Outcome, reference: Outcome, feature: Feature) -> Verdict:
    """Masks of the right rate, different on each replica and in each step, and reproducible."""
    del feature
    weights, replicas = outcome.weights[0], int(outcome.results["replicas"])
    if replicas == 1 and not np.array_equal(weights, reference.weights[0]):
        return Verdict("wrong", says="one replica does not draw Keras's masks")
    kept = weights != 0
    if abs(kept.mean() - (1 - RATE)) > 0.06:
        return Verdict("wrong", says=f"{kept.mean():.0%} kept, not {1 - RATE:.0%}")
    shares = kept.reshape(STEPS, replicas, -1)
    for step in shares:
        if len({share.tobytes() for share in step}) < replicas:
            return Verdict("wrong", says="replicas draw the same mask")
    if len({step.tobytes() for step in shares}) < STEPS:
        return Verdict("wrong", says="every step draws the same mask")
    if not np.array_equal(weights, outcome.results["again"]):
        return Verdict("wrong", says="the same seed gives other masks")
    return Verdict("works", 0.0)


FEATURES = {
    "dropout": Feature(
        "masks of each replica's own, reproducible; one replica draws Keras's",
        _masks_as_gradients,
        _examples,
        results=_again,
        compare=independent_masks,
    ),
}
