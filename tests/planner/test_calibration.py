"""Step times from the costs of a calibration, and costs from measured steps."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from kdist.calibrate import PROBES, TimedWorkload, fit_calibration
from kdist.planner.measurements import Calibration, calibrated_step_seconds, work_terms
from kdist.planner.workload.layers import LayerWork, Workload
from kdist.planner.workload.reading import read_workload
from tests.unit.planner.example_layer import convolution

CONVOLUTION = convolution(
    forward_flops=1e6,
    backward_flops=2e6,
    parameters=1e4,
    trainable_parameters=1e4,
    moved_bytes=5e5,
)
NORM = LayerWork("norm", "elementwise", 1e3, 2e3, 256.0, 128.0, 64.0, 8e3, True)
RELU = LayerWork("relu", "elementwise", 0.0, 0.0, 0.0, 0.0, 64.0, 4e3, True)
EMBEDDING = LayerWork("embedding", "elementwise", 0.0, 0.0, 3e5, 3e5, 64.0, 2e3, False)
WORK = Workload("small", (8, 8, 3), (CONVOLUTION, NORM, RELU), 768.0, ((1e3, 0.0),))
COSTS = {
    "step": 1e-3,
    "weights": 1e-9,
    "convolution layers": 1e-4,
    "convolution FLOPs at 1,000 weights": 4e-11,
    "convolution FLOPs at 10,000 weights": 1e-11,
    "convolution FLOPs at 100,000 weights": 2e-11,
    "convolution bytes": 1e-10,
    "convolution weights beyond 100,000": 1e-8,
    "normalisation layers": 1e-5,
    "normalisation FLOPs": 1e-9,
    "normalisation bytes": 2e-9,
    "normalisation weights": 1e-7,
    "elementwise layers": 2e-5,
    "elementwise bytes": 1e-9,
}
HERE = Calibration("a CPU", 2, "float32", COSTS, 0.03, 0.2)


def with_weights(weights):
    layer = dataclasses.replace(CONVOLUTION, parameters=weights, trainable_parameters=weights)
    return dataclasses.replace(WORK, layers=(layer,))


def test_a_step_is_the_sum_of_its_parts():
    step = calibrated_step_seconds(WORK, HERE, local_batch=10, replicas=2)
    assert step.parts == pytest.approx(
        {
            "step": 1e-3,
            "weights": 1e-5,
            "convolution": 1e-4 + 10 * (3e6 * 1e-11 + 5e5 * 1e-10),
            "normalisation": 1e-5 + 10 * (3e3 * 1e-9 + 8e3 * 2e-9) + 128 * 1e-7,
            "elementwise": 2e-5 + 10 * 4e3 * 1e-9,
        }
    )
    assert step.seconds == pytest.approx(sum(step.parts.values()))


def test_overhead_does_not_grow_with_the_batch():
    once, twice, thrice = (
        calibrated_step_seconds(WORK, HERE, batch, 2).seconds for batch in (1, 2, 3)
    )
    assert thrice - twice == pytest.approx(twice - once)
    always = 2 * once - twice
    assert always == pytest.approx(1e-3 + 1e-5 + 1e-4 + 1e-5 + 128 * 1e-7 + 2e-5)


@pytest.mark.parametrize(
    ("weights", "seconds_a_flop"),
    [(100.0, 4e-11), (1e3, 4e-11), (10**3.5, 2.5e-11), (1e4, 1e-11), (10**4.5, 1.5e-11)],
)
def test_rate_of_convolutions_is_interpolated_between_weights(weights, seconds_a_flop):
    work = with_weights(weights)
    step = calibrated_step_seconds(work, HERE, local_batch=1, replicas=2)
    assert step.parts["convolution"] == pytest.approx(1e-4 + 5e-5 + 3e6 * seconds_a_flop)


def test_weights_beyond_the_cache_cost_more():
    step = calibrated_step_seconds(with_weights(1e5), HERE, 1, 2)
    assert step.parts["weights"] == pytest.approx(1e-4)
    terms = work_terms(with_weights(1.5e5), 1)
    assert (terms["weights"], terms["convolution weights beyond 100,000"]) == (1.5e5, 5e4)


def test_embedding_is_no_normalization():
    terms = work_terms(dataclasses.replace(WORK, layers=(EMBEDDING,)), 1)
    assert not any(name.startswith("normalisation") for name in terms)
    assert terms["elementwise weights beyond 100,000"] == 2e5


@pytest.mark.parametrize(
    ("work", "asked", "said"),
    [
        (WORK, {"replicas": 1}, "on 1 replicas in float32: a CPU was calibrated"),
        (WORK, {"precision": "mixed_bfloat16"}, "this precision"),
        (dataclasses.replace(WORK, precision="float64"), {}, "small in float64"),
        (WORK, {"local_batch": 0}, "give at least 1 example"),
        (dataclasses.replace(WORK, uncounted=("While",)), {}, r"\(While\); time its step"),
        (with_weights(5e5), {}, "no cost of 'convolution FLOPs at 1,000,000 weights'"),
    ],
)
def test_layers_without_calibration_are_rejected(work, asked, said):
    with pytest.raises(ValueError, match=said):
        calibrated_step_seconds(work, HERE, **{"local_batch": 8, "replicas": 2, **asked})


def test_text_and_back():
    assert Calibration.from_json(HERE.to_json()) == HERE


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": "x"}'])
def test_invalid_calibrations_are_rejected(text):
    with pytest.raises(ValueError, match=r"here\.json holds no calibration"):
        Calibration.from_json(text, "here.json")


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_impossible_cost_is_rejected(cost):
    fields = dataclasses.asdict(HERE) | {"seconds_per": {"step": 1e-3, "weights": cost}}
    with pytest.raises(ValueError, match=r"'weights' costs .* calibrate the machine again"):
        Calibration.from_json(json.dumps(fields))


def measured_networks():
    """Returns networks of random sizes, with step times from the costs above."""
    generator = np.random.default_rng(0)
    for _ in range(40):
        sizes = 10 ** generator.uniform(-1, 1, (3, 4))
        weights = 10 ** generator.uniform(3, 5)
        layers = [
            dataclasses.replace(
                layer,
                forward_flops=layer.forward_flops * size[0],
                backward_flops=layer.backward_flops * size[0],
                moved_bytes=layer.moved_bytes * size[1],
                trainable_parameters=layer.trainable_parameters * size[2],
            )
            for layer, size in zip((CONVOLUTION, NORM, RELU), sizes, strict=True)
        ]
        layers[0] = dataclasses.replace(layers[0], trainable_parameters=weights)
        kept = [layer for layer in layers if generator.random() < 0.7]
        work = dataclasses.replace(WORK, layers=tuple(kept))
        batch = int(generator.integers(1, 200))
        yield TimedWorkload(work, batch, calibrated_step_seconds(work, HERE, batch, 2).seconds)


def test_costs_are_fitted_to_steps():
    networks = list(measured_networks())
    found = fit_calibration(networks, "a CPU", 2)
    assert found.max_probe_error < 0.01
    seconds = calibrated_step_seconds(WORK, found, 50, 2).seconds
    assert seconds == pytest.approx(calibrated_step_seconds(WORK, HERE, 50, 2).seconds, rel=0.01)


def test_one_outlier_does_not_change_the_costs():
    networks = list(measured_networks())
    networks[3] = dataclasses.replace(networks[3], seconds=3 * networks[3].seconds)
    found = fit_calibration(networks, "a CPU", 2)
    assert found.max_probe_error > 0.5
    assert found.probe_error < 0.02
    seconds = calibrated_step_seconds(WORK, found, 50, 2).seconds
    assert seconds == pytest.approx(calibrated_step_seconds(WORK, HERE, 50, 2).seconds, rel=0.05)


def test_costs_need_several_steps():
    with pytest.raises(ValueError, match="at least 2"):
        fit_calibration(list(measured_networks())[:1], "a CPU", 2)


CALIBRATE = """
from kdist.calibrate import calibrate
from kdist.calibrate import PROBES
print(calibrate(2, rounds=1, probes=PROBES[-10:]).to_json())
"""


@pytest.mark.exhaustive
def test_this_machine_can_be_calibrated():
    process = subprocess.run(
        [sys.executable, "-c", CALIBRATE], capture_output=True, text=True, timeout=300, check=True
    )
    found = Calibration.from_json(process.stdout)
    assert (found.replicas, found.precision) == (2, "float32")
    assert found.machine
    # Of ten steps each cost by itself is anything: FLOPs cost nothing where bytes cost it all.
    dense = PROBES[-6]
    work = read_workload(dense.build())
    flops = sum(layer.forward_flops + layer.backward_flops for layer in work.layers)
    step = calibrated_step_seconds(work, found, dense.local_batch, 2)
    # From 10 MFLOP/s to 100 PFLOP/s.
    assert 1e-17 < step.parts["matmul"] / (dense.local_batch * flops) < 1e-7
    assert 0 < found.probe_error < math.inf
