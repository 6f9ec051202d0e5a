"""Every feature of `kdist.equivalence` on 1, 2 and 4 replicas, next to plain Keras on one device.

A new feature joins by a row in one of the tables there; `scripts/compare.py` shows the same rows
for plain Keras as well.
"""

import functools

import keras
import pytest

import kdist
from kdist.equivalence import trial
from kdist.equivalence.features import FEATURES


@functools.cache
def reference(name):
    """Plain Keras on one device without a strategy; trained once for all numbers of replicas."""
    return trial.run(FEATURES[name], keras.Model)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("name", FEATURES)
def test_feature_is_that_of_one_device(name, replicas):
    feature = FEATURES[name]
    strategy = kdist.create_strategy("one_device" if replicas == 1 else "mirrored", replicas)
    verdict = feature.judge(trial.run(feature, kdist.Model, strategy), reference(name))
    assert verdict.kind == "works", f"{name} on {replicas} replicas: {verdict}"
