"""All features, in the order of the table: name -> Feature."""

from benchmarks.equivalence import (
    dropout,
    execution,
    inputs,
    layers,
    losses,
    metrics,
    optimizers,
    regularization,
    steps,
)
from benchmarks.equivalence.feature import Feature

FEATURES: dict[str, Feature] = {
    **optimizers.FEATURES,
    **regularization.FEATURES,
    **losses.FEATURES,
    **steps.FEATURES,
    **layers.FEATURES,
    **dropout.FEATURES,
    **metrics.FEATURES,
    **inputs.FEATURES,
    **execution.FEATURES,
}
