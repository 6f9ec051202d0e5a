"""Estimates of the gradient noise scale, from random gradients of known covariance."""

import doctest
import math

import numpy as np
import pytest

from kdist.tuning import noise_scale
from kdist.tuning.noise_scale import estimate

DIMENSIONS = 50


def squares(gradient, deviations, *, batches, parts, part_examples, seed):
    """Returns the squared norms of means of random gradients: of parts, and of whole batches."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((batches, parts, DIMENSIONS)) * deviations
    means = gradient + noise / math.sqrt(part_examples)
    return (means**2).sum(-1), (means.mean(1) ** 2).sum(-1)


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("part_examples", [1, 16])
def test_estimates_are_unbiased(parts, part_examples):
    gradient = np.linspace(-0.2, 0.3, DIMENSIONS)
    deviations = np.linspace(0.05, 0.5, DIMENSIONS)
    sizes = {"batches": 2000, "parts": parts, "part_examples": part_examples}
    found = estimate(*squares(gradient, deviations, **sizes, seed=0), part_examples)
    assert found.trace == pytest.approx((deviations**2).sum(), rel=0.05)
    assert found.squared_norm == pytest.approx((gradient**2).sum(), rel=0.15)
    assert found.batch == found.trace / found.squared_norm


def test_the_interval_contains_the_true_scale():
    gradient, deviations = np.full(DIMENSIONS, 0.1), np.ones(DIMENSIONS)
    contained = 0
    for seed in range(100):
        norms = squares(gradient, deviations, batches=40, parts=4, part_examples=32, seed=seed)
        low, high = estimate(*norms, 32).interval
        contained += low <= 100 <= high  # 50 · 1 / (50 · 0.01)
    assert contained >= 88


def test_a_gradient_that_noise_hides_has_an_infinite_scale():
    norms = squares(0.0, np.ones(DIMENSIONS), batches=10, parts=2, part_examples=4, seed=3)
    found = estimate(*norms, 4)
    assert found.interval[1] == math.inf
    assert estimate(np.array([[1.0, 1.0]] * 2), np.array([0.4] * 2), 4).batch == math.inf


def test_without_noise_the_scale_is_zero():
    assert estimate(np.full((3, 2), 4.0), np.full(3, 4.0), 8).batch == 0.0


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_too_few_gradients_are_an_error(shape):
    with pytest.raises(ValueError, match="two of both"):
        estimate(np.ones(shape), np.ones(shape[0]), 8)


def test_examples():
    assert doctest.testmod(noise_scale).failed == 0
