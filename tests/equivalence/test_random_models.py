"""Random models on several devices have the numbers of plain Keras on one device, or are refused.

`make fuzz CASES=3000` runs more of them. A case that fails is printed, and belongs into `FIXED`.
"""

import os
import pathlib
import traceback

import hypothesis
import keras
import numpy as np
import pytest

import kdist
from tests.equivalence import random_models
from tests.tiers import seldom

CASES = int(os.environ.get("KDIST_FUZZ_CASES", 0))
SHARDS = int(os.environ.get("KDIST_FUZZ_SHARDS", 1))
TOLERANCE = 1e-7

SIMPLE = {
    "kind": "vector",
    "layers": [],
    "masked": False,
    "reducer": None,
    "loss": "mse",
    "reduction": "sum_over_batch_size",
    "second_output": False,
    "loss_weights": False,
    "frozen": False,
    "metric": "mae",
    "step": None,
    "data": "arrays",
    "validates": False,
    "shares_trace": False,
    "shard": None,
    "optimizer": "sgd",
    "optimizer_options": {},
    "weights": None,
    "rows": 7,
    "batch": 4,
    "accumulate": 1,
    "steps_per_execution": 1,
    "eager": True,
    "devices": 2,
}
# The simple case itself, cases that failed, and two with many parts, as changes to it.
FIXED: dict[str, dict] = {
    "simple": {},
    "positions without a graph": {
        "kind": "sequence",
        "layers": ["positions"],
        "reducer": 0,
        "optimizer": "adam",
    },
    "masked statistics": {
        "kind": "sequence",
        "layers": ["batch_norm", "dense"],
        "masked": True,
        "devices": 4,
        "eager": False,
    },
    "two updates, sharded": {
        "kind": "tokens",
        "layers": ["add", "dense"],
        "reducer": 1,
        "loss": "binary",
        "reduction": "sum",
        "step": "twice",
        "shard": "gradients",
        "optimizer": "adamw",
        "optimizer_options": {"use_ema": True, "ema_momentum": 0.7},
        "weights": "sample",
        "devices": 3,
        "eager": False,
    },
    "whole weights, sharded": {
        "kind": "tokens",
        "layers": ["attention", "dense"],
        "reducer": 0,
        "step": "persistent",
        "validates": True,
        "shares_trace": True,
        "shard": "weights",
        "optimizer": "muon",
        "optimizer_options": {"global_clipnorm": 0.5},
        "devices": 3,
        "eager": False,
    },
}

LONG = ["two updates, sharded"]


@pytest.fixture(autouse=True)
def _float64():
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


def check(case) -> str:
    """Checks a case; returns "equal", "refused", or "invalid" if Keras itself rejects it."""
    # Keras broadcasts the weights of rows over time steps if their numbers happen to be equal.
    if case["weights"] == "sample" and case["kind"] == "sequence" and case["reducer"] is None:
        return "invalid"
    try:
        expected = random_models.results_of(case)
    except Exception as error:
        return f"invalid: {type(error).__name__}"
    shards = {"shard": case["shard"], "min_shard_bytes": 1} if case["shard"] else {}
    strategy = kdist.create_strategy(kdist.Layout(data=case["devices"], **shards))
    try:
        results = random_models.results_of(case, strategy)
    except ValueError as error:
        last = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not last.is_relative_to(pathlib.Path(kdist.__file__).parent):
            raise
        return "refused"
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            results[name], value, TOLERANCE, TOLERANCE, err_msg=f"{name} of {case}"
        )
    return "equal"


def check_random(case):
    outcome = check(case)
    hypothesis.event(f"{case['kind']}: {outcome}")
    hypothesis.assume(not outcome.startswith("invalid"))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [n for n in FIXED if n not in LONG] + seldom(LONG))
def test_fixed(name):
    assert check(SIMPLE | FIXED[name]) == "equal"


if CASES:

    @pytest.mark.slow
    @pytest.mark.timeout(60 + 20 * CASES)
    @pytest.mark.parametrize("shard", range(SHARDS))
    def test_random(shard):
        settings = hypothesis.settings(
            max_examples=max(1, CASES // SHARDS),
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            report_multiple_bugs=False,
        )
        settings(hypothesis.given(random_models.cases())(check_random))()
