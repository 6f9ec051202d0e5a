"""A feature of Keras that can be trained in several ways and compared."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from benchmarks.equivalence.verdict import Verdict, from_differences
from kdist.testing import largest_difference

ModelClass = type[keras.Model]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a training.

    Attributes:
        weights: all weights of the model, as from `get_weights()`.
        history: Keras's history: a list with one value per epoch for each log.
        results: other quantities that must be equal: step counters, evaluations, predictions.
    """

    weights: list[np.ndarray]
    history: dict[str, list[float]]
    results: dict[str, np.ndarray]


def same(outcome: Outcome, reference: Outcome, feature: "Feature") -> Verdict:
    """Weights, history and results are those of the reference."""
    tolerance = feature.tolerance
    if [w.shape for w in outcome.weights] != [w.shape for w in reference.weights]:
        return Verdict("wrong", says="other weights than the reference has")
    found = {"weights": (largest_difference(outcome.weights, reference.weights), tolerance)}
    if feature.compares_history:
        for name, values in reference.history.items():
            found[name] = _relative(outcome.history.get(name), values), tolerance
    for name, value in reference.results.items():
        found[name] = _relative(outcome.results.get(name), value), tolerance
    return from_differences(found)


def _relative(values, reference):
    """The largest difference, relative to values above one; infinite for another shape."""
    if np.shape(values) != np.shape(reference) or values is None:
        return float("inf")
    values, reference = np.asarray(values, "float64"), np.asarray(reference, "float64")
    differences = np.abs(values - reference) / np.maximum(1.0, np.abs(reference))
    return float(np.max(differences, initial=0.0))


@dataclasses.dataclass(frozen=True)
class Feature:
    """One row of the table: what is trained, on what, and how equal it has to be.

    Attributes:
        description: short text of the row.
        build: accepts `keras.Model` or `kdist.Model` and returns a compiled model of that class;
            called in the strategy's scope, always with the same initial weights.
        data: what `fit` gets as data, by name; called for each training. All of it is in global
            batches and in a fixed order, so that every layout sees the same steps.
        fit: further arguments of `fit`, such as `epochs`.
        callbacks: makes the callbacks of one `fit`.
        results: further things that must be equal, read from the trained model.
        tolerance: the largest difference allowed of any weight, log or result (relative where
            these are above one).
        compares_history: whether the logs of the reference are to be met.
        compare: the verdict on an outcome, where equality is not what is asked for.
        in_keras: whether plain Keras has such a thing at all.
    """

    description: str
    build: Callable[[ModelClass], keras.Model]
    data: Callable[[], dict[str, Any]]
    fit: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: Callable[[], list[keras.callbacks.Callback]] = list
    results: Callable[[keras.Model], Mapping[str, Any]] = lambda model: {}
    tolerance: float = 1e-5
    compares_history: bool = True
    compare: Callable[[Outcome, Outcome, "Feature"], Verdict] = same
    in_keras: bool = True

    def judge(self, outcome: Outcome, reference: Outcome) -> Verdict:
        """Works, or wrong by how much, next to the reference."""
        return self.compare(outcome, reference, self)
