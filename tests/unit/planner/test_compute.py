"""Compute time from data sheets: its dependence on each cause, and its published error."""

import dataclasses
import math
import pathlib

import pytest

from benchmarks.planner_validation import compute_fitting
from benchmarks.planner_validation.published import read_rates
from benchmarks.planner_validation.published_models import published_compute_seconds
from kdist.planner import Workload, find_gpu
from kdist.planner.cost.compute import (
    compute_seconds,
    extrapolate_seconds,
)
from kdist.planner.cost.constants import known_compute_constants
from kdist.planner.workload.layers import known_workload
from tests.unit.planner.example_layer import convolution

ROOT = pathlib.Path(__file__).parents[3]
SCALING = ROOT / "benchmarks" / "planner_validation" / "tables" / "scaling.csv"
V100, A100, P100, K80 = (find_gpu(name) for name in ("V100 SXM2", "A100 SXM4 40GB", "P100", "K80"))
LAYER = convolution(
    forward_flops=2e9,
    backward_flops=4e9,
    parameters=1e6,
    trainable_parameters=1e6,
    kept_bytes=1e6,
    moved_bytes=1e7,
)


def work(*layers):
    return Workload("small", (224, 224, 3), layers, 6e5, ((1e7, 0.0),))


def seconds(workload, gpu=V100, batch=32, precision="float32", **options):
    return compute_seconds(workload, gpu, batch, precision, **options).seconds


def changed(**constants):
    return dataclasses.replace(known_compute_constants(), **constants)


def test_compute_time_by_hand():
    c = changed(launch_ms_per_layer=1e-9)
    arithmetic = (32 * 6e9 + c.filling_gflop_per_layer * 1e9) / (15.7e12 * c.convolution_float32)
    memory = 32 * 1e7 * c.moved_share / 900e9
    weights = 4 * 1e6 * 9 / 900e9
    time = compute_seconds(work(LAYER), V100, 32, "float32", constants=c)
    assert time.seconds == pytest.approx(arithmetic + memory + weights)
    assert time.flops == 32 * 6e9
    assert time.efficiency == pytest.approx(time.flops / time.seconds / 15.7e12)


def test_terms_add_up_and_have_peak_shares():
    time = compute_seconds(known_workload("resnet50"), V100, 64, "mixed_float16")
    assert sum(term.seconds for term in time.terms) == pytest.approx(time.seconds)
    terms = {term.name: term for term in time.terms}
    assert set(terms) == {"convolution", "matmul", "elementwise", "weights and update", "launching"}
    assert 0.1 < terms["convolution"].peak_share < 1
    assert terms["elementwise"].peak_share is None


@pytest.mark.parametrize("name", ["resnet50", "mobilenetv2", "bert_large_seq128", "lenet"])
def test_larger_batch_takes_longer_but_less_per_example(name):
    model = known_workload(name)
    times = [seconds(model, batch=batch) for batch in (1, 2, 8, 64, 512)]
    assert times == sorted(times)
    rates = [batch / time for batch, time in zip((1, 2, 8, 64, 512), times, strict=True)]
    assert rates == sorted(rates)


def test_more_arithmetic_takes_longer():
    more = dataclasses.replace(LAYER, backward_flops=8e9)
    assert seconds(work(more)) > 1.3 * seconds(work(LAYER))


def test_more_bytes_take_longer():
    more = dataclasses.replace(LAYER, moved_bytes=1e9)
    assert seconds(work(more)) > 1.3 * seconds(work(LAYER))


@pytest.mark.parametrize("name", ["resnet50", "efficientnetb0", "bert_large_seq128"])
def test_16_bits_are_faster_only_with_tensor_cores(name):
    model = known_workload(name)
    for gpu in (V100, A100):
        float32, mixed = (seconds(model, gpu, 256, p) for p in ("float32", "mixed_float16"))
        assert mixed < 0.75 * float32
    for gpu in (P100, K80):
        assert seconds(model, gpu, precision="mixed_float16") == seconds(model, gpu)


def test_bfloat16_needs_hardware_support():
    model = known_workload("resnet50")
    assert seconds(model, A100, precision="mixed_bfloat16") < seconds(model, A100)
    assert seconds(model, V100, precision="mixed_bfloat16") == seconds(model, V100)


def test_xla_saves_memory_traffic_only_between_layers():
    between = dataclasses.replace(LAYER, kind="elementwise", moved_bytes=1e9)
    assert seconds(work(between), xla=True) < seconds(work(between))
    assert seconds(work(LAYER), xla=True) == seconds(work(LAYER))


def test_accumulation_saves_updates():
    large = known_workload("bert_large_seq128")
    saved = seconds(large, batch=32) - seconds(large, batch=32, accumulate=1_000_000)
    assert saved == pytest.approx(6 * 4 * large.parameters / 900e9, rel=0.05)


def test_many_small_layers_wait_for_the_host():
    tiny = dataclasses.replace(LAYER, forward_flops=1e3, backward_flops=2e3, moved_bytes=1e3)
    time = compute_seconds(
        work(*[tiny] * 1000), A100, 1, "float32", constants=changed(filling_gflop_per_layer=1e-6)
    )
    assert time.terms[-1].name == "launching"
    assert time.terms[-1].seconds > 0.9 * time.seconds


def test_detector_with_region_proposals_takes_longer():
    detector = dataclasses.replace(work(LAYER), uncounted=("NonMaxSuppressionV3",))
    more = seconds(detector) - seconds(work(LAYER))
    assert more == pytest.approx(known_compute_constants().regions_ms * 1e-3, rel=1e-6)


def test_measured_time_is_extrapolated_by_predictions():
    model = known_workload("resnet50")
    same = extrapolate_seconds(0.3, model, V100, V100, 64, 64, "float32", "float32")
    assert same == pytest.approx(0.3)
    there = extrapolate_seconds(0.3, model, V100, A100, 64, 128, "float32", "mixed_float16")
    ratio = seconds(model, A100, 128, "mixed_float16") / seconds(model, V100, 64)
    assert there == pytest.approx(0.3 * ratio)
    with pytest.raises(ValueError, match="measured_seconds is above 0, not 0"):
        extrapolate_seconds(0, model, V100, V100, 64, 64, "float32", "float32")


def test_impossible_batches_are_rejected():
    for options in ({"batch": 0}, {"batch": math.nan}, {"accumulate": 0}):
        with pytest.raises(ValueError, match="batch above 0"):
            seconds(work(LAYER), **options)


def test_gpu_of_unknown_bandwidth_is_rejected():
    unknown = dataclasses.replace(V100, bandwidth_gb_s=None)
    with pytest.raises(ValueError, match="bandwidth of the memory of the GPU 'V100 SXM2"):
        seconds(work(LAYER), unknown)


def test_names_of_published_rates():
    found = published_compute_seconds(
        "ResNet-50 v1.5", "A100 SXM4 40GB", "amp", 256, "TF1 Horovod XLA"
    )
    model = known_workload("resnet50_v1_5")
    assert found == seconds(model, A100, 256, "mixed_float16", xla=True)
    small = published_compute_seconds("EfficientNetV2-S", "V100 SXM 32GB", "fp32", 64, "TF2 Keras")
    assert small < seconds(known_workload("EfficientNetV2-S"), batch=64)
    for unknown in (("Nothing", "V100", "fp32"), ("VGG16", "M9", "fp32"), ("VGG16", "V100", "?")):
        assert published_compute_seconds(*unknown, 32, "TF2") is None


def test_constants_are_above_zero():
    with pytest.raises(ValueError, match="xla_share must be a number above 0, not 0"):
        changed(xla_share=0.0)


class TestPublishedRates:
    def test_stored_constants_predict_single_devices(self):
        rates = single_devices()
        assert len(rates) >= 90
        constants = known_compute_constants()
        assert (
            mean_error(rates, [compute_fitting.predicted_rate(rate, constants) for rate in rates])
            < 0.145
        )

    @pytest.mark.slow
    @pytest.mark.parametrize(("key", "bound"), [("machine", 0.165), ("family", 0.185)])
    def test_constants_fitted_elsewhere_predict_as_well(self, key, bound):
        pytest.importorskip("scipy")
        rates = compute_fitting.compute_rates(read_rates(SCALING))
        predicted = compute_fitting.leave_one_out(rates, lambda rate: getattr(rate, key))
        pairs = [(r, p) for r, p in zip(rates, predicted, strict=True) if r.devices == 1]
        assert mean_error(*zip(*pairs, strict=True)) < bound

    def test_no_row_of_few_devices_is_without_a_prediction(self):
        assert len(compute_fitting.compute_rates(read_rates(SCALING))) == 107


def single_devices():
    return [
        rate for rate in compute_fitting.compute_rates(read_rates(SCALING)) if rate.devices == 1
    ]


def mean_error(rates, predicted):
    errors = compute_fitting.relative_errors(rates, predicted)
    return sum(map(abs, errors)) / len(errors)
