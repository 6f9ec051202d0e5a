"""Every feature of `benchmarks.equivalence` on 2 and 4 replicas, next to plain Keras on one device.

A new feature joins by a row in one of the tables there; `kdist compare` shows the same rows
for plain Keras as well.
"""

import functools

import keras
import pytest

import kdist
from benchmarks.equivalence import trial
from benchmarks.equivalence.features import FEATURES
from tests.tiers import seldom


@functools.cache
def reference(name):
    """Plain Keras on one device without a strategy; trained once for all numbers of replicas."""
    return trial.run(FEATURES[name], keras.Model)


def verdict(name, model_class, strategy):
    feature = FEATURES[name]
    return feature.judge(trial.run(feature, model_class, strategy), reference(name))


ON_FOUR = list(FEATURES)[::36]
REPLICAS = [
    *((name, 2) for name in FEATURES),
    *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ON_FOUR),
    *seldom([(name, 4) for name in FEATURES if name not in ON_FOUR]),
]


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize(("name", "replicas"), REPLICAS)
def test_feature_is_that_of_one_device(name, replicas):
    says = verdict(name, kdist.Model, kdist.create_strategy("mirrored", replicas))
    assert says.kind == "works", f"{name} on {replicas} replicas: {says}"


_FAST = ("Adam", "custom train_step", "synchronised BatchNorm, uneven batch")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [*_FAST, *seldom(FEATURES, other_than=_FAST)])
def test_feature_is_that_of_one_device_with_central_storage(name):
    says = verdict(name, kdist.Model, kdist.create_strategy("central_storage", 2))
    assert says.kind == "works", f"{name}: {says}"


_SHARDED = ("AdamW", "embedding, global_clipnorm", "mixed_float16, overflow", "accumulate")
_SHARDED_WEIGHTS = ("embedding, Adam", "two optimizers in one step", "mixed_float16")
# Refused: the optimizers that a function returns are not known in advance.
_NOT_SHARDED = ("MultiOptimizer",)
_NOT_SHARDED_WEIGHTS = (*_NOT_SHARDED, "jit_compile")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "replicas", "shard"),
    [
        *((name, 2, "optimizer") for name in _SHARDED),
        *((name, 2, "weights") for name in _SHARDED_WEIGHTS),
        pytest.param("accumulate", 4, "gradients", marks=pytest.mark.slow),
        *seldom([(n, 2, "optimizer") for n in FEATURES if n not in (*_SHARDED, *_NOT_SHARDED)]),
        *seldom([(name, 4, "optimizer") for name in FEATURES if name not in _NOT_SHARDED]),
        *seldom(
            [
                (name, replicas, "weights")
                for name in FEATURES
                for replicas in (2, 4)
                if name not in _NOT_SHARDED_WEIGHTS
            ],
            other_than=[(name, 2, "weights") for name in _SHARDED_WEIGHTS],
        ),
    ],
)
def test_feature_is_that_of_one_device_with_sharded_state(name, replicas, shard):
    layout = kdist.Layout(data=replicas, shard=shard, min_shard_bytes=16)
    says = verdict(name, kdist.Model, kdist.create_strategy(layout))
    assert says.kind == "works", f"{name} on {replicas} replicas: {says}"


@pytest.mark.parametrize("name", ["SGD", "dropout", "accumulate", "uneven batch, odd remainder"])
def test_one_replica_is_no_exception(name):
    says = verdict(name, kdist.Model, kdist.create_strategy("one_device"))
    assert says.kind == "works", f"{name} on one replica: {says}"


def test_the_comparison_sees_what_plain_keras_gets_wrong():
    """Keras clips each replica's gradient, and then adds."""
    says = verdict("clipnorm", keras.Model, kdist.create_strategy("mirrored", 2))
    assert says.kind == "wrong"
    assert says.difference > 1e-3


def test_what_is_not_asked_for_is_a_feature_all_the_same():
    from benchmarks.equivalence.cells import _NOT_ASKED
    from benchmarks.equivalence.features import FEATURES

    assert {name for _, name in _NOT_ASKED} <= FEATURES.keys()
