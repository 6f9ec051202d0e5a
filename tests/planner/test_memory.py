"""Predicted memory against values computed by hand and the peaks of training steps."""

import dataclasses
import os
import shutil

import pytest

from benchmarks import measure_memory
from kdist.planner import Workload, read_workload
from kdist.planner.cost.memory import CUDA_BYTES, OPTIMIZERS, STEP_MARGIN, estimate_memory
from tests.unit.planner.example_layer import convolution

CONVOLUTION = convolution(parameters=110.0, trainable_parameters=100.0)
CLASSES = dataclasses.replace(CONVOLUTION, name="classes", kind="matmul", trainable_parameters=50)
WORK = Workload(
    "small",
    (8, 8, 3),
    (CONVOLUTION, CLASSES),
    768.0,
    peaks=((1000.0, 0.0), (10.0, 5000.0)),
    peaks_applied=((1000.0, 0.0), (20.0, 3000.0)),
)
TRAINED = 150 * 4


def sizes(**arguments):
    return estimate_memory(WORK, **{"local_batch": 10, "optimizer": "sgd", **arguments})


def test_by_hand():
    needed = sizes(optimizer="momentum")
    assert needed.weights == 220 * 4
    assert needed.slots == needed.update == TRAINED
    assert needed.step == 10_000 * STEP_MARGIN
    assert needed.workspace == 3 * 100 * 4  # two copies of a filter's gradient, and one more
    assert needed.accumulated == needed.reduce_buffers == needed.framework == 0
    assert needed.input == 10 * 768
    assert sizes(device="gpu").input == 2 * 10 * 768
    assert needed.total == 880 + 600 + 600 + 7_680 + 10_000 * STEP_MARGIN + 1200


@pytest.mark.parametrize(
    ("optimizer", "slots"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2), ("rmsprop", 1)]
)
def test_slots_of_the_optimizer(optimizer, slots):
    assert sizes(optimizer=optimizer).slots == slots * TRAINED


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_match_keras(name):
    keras = pytest.importorskip("keras")
    layer = keras.layers.Dense(7, use_bias=False)
    layer.build((None, 5))
    classes = {cls.lower(): cls for cls in dir(keras.optimizers)}
    sgd = name in ("momentum", "nesterov")
    make = getattr(keras.optimizers, classes["sgd" if sgd else name])
    optimizer = make(momentum=0.9) if sgd else make()
    optimizer.build(layer.trainable_variables)
    made = sum(variable.shape == (5, 7) for variable in optimizer.variables)
    assert made == OPTIMIZERS[name].slots


def test_gradients_stay_until_all_are_computed():
    assert sizes(local_batch=1).step == 3020 * STEP_MARGIN
    for waiting in ({"devices": 2}, {"accumulate": 2}, {"precision": "mixed_float16"}):
        assert sizes(local_batch=1, **waiting).step >= 5010 * STEP_MARGIN, waiting
    assert sizes(devices=2).reduce_buffers == TRAINED
    assert sizes(accumulate=4).accumulated == TRAINED
    # Keras looks at all gradients of float16 before it computes anything of the update.
    assert sizes(optimizer="momentum", precision="mixed_float16").update == 0


def test_workload_without_applied_peaks_uses_the_others():
    older = dataclasses.replace(WORK, peaks_applied=())
    assert estimate_memory(older, 1).step == 5010 * STEP_MARGIN


def test_temporaries_of_a_large_matrix_outweigh_small_convolutions():
    large = dataclasses.replace(CLASSES, trainable_parameters=1000)
    work = dataclasses.replace(WORK, layers=(CONVOLUTION, large))
    assert estimate_memory(work, 1, optimizer="adam").workspace == 2 * 4000
    assert estimate_memory(work, 1, optimizer="sgd").workspace == 4000


def test_two_large_matrices_are_updated_at_a_time():
    """The gradient and the temporaries of the second matrix are added."""
    second = dataclasses.replace(CLASSES, name="second", trainable_parameters=500)
    first = dataclasses.replace(CLASSES, trainable_parameters=700)
    work = dataclasses.replace(WORK, layers=(CONVOLUTION, second, first))
    assert estimate_memory(work, 1, optimizer="sgd").workspace == 2800 + 2000 + 2000
    assert estimate_memory(work, 1, optimizer="adam").workspace == 2 * 2800 + 2000 + 2 * 2000
    # Where gradients stay, the second one is in the step already.
    assert estimate_memory(work, 1, optimizer="sgd", devices=2).workspace == 2800 + 2000
    # The activations of ten examples need more, at a time when the gradients are gone.
    assert estimate_memory(work, 10, optimizer="sgd").workspace == 2800


def test_buffers_of_two_kernels_on_a_cpu():
    layers = [dataclasses.replace(CONVOLUTION, name=str(n), kernel_bytes=n) for n in (900, 800, 7)]
    work = dataclasses.replace(WORK, layers=tuple(layers))
    assert estimate_memory(work, 1, optimizer="sgd").workspace == 3 * 100 * 4 + 900 + 800
    assert estimate_memory(work, 1, optimizer="sgd", device="gpu").workspace == 3 * 100 * 4 + 2 * 64


@pytest.mark.parametrize(("side", "gradients"), [(2, 8), (3, 0)])
def test_filters_larger_than_their_image_have_buffers_of_eight_gradients(side, gradients):
    keras = pytest.importorskip("keras")
    inputs = keras.Input((side, side, 4))
    convolution = keras.layers.Conv2D(5, 3, padding="same", use_bias=False)
    work = read_workload(keras.Model(inputs, convolution(inputs)))
    assert sum(layer.kernel_bytes for layer in work.layers) == gradients * 3 * 3 * 4 * 5 * 4


def test_parameter_servers_keep_the_slots():
    needed = sizes(optimizer="adam", update="parameter_servers", devices=4)
    assert needed.slots == needed.update == needed.reduce_buffers == 0


def test_another_precision_is_an_upper_bound():
    """A mixed policy needs no more than float32 and the casts; float32 no more than twice."""
    full = sizes()
    assert sizes(precision="mixed_bfloat16").step == full.step + 2 * 220 + 2 * 150
    mixed = dataclasses.replace(WORK, precision="mixed_bfloat16")
    assert estimate_memory(mixed, 10).step == full.step
    assert estimate_memory(mixed, 10, "float32").step == 2 * full.step
    assert sizes(precision="bfloat16").weights == full.weights / 2


def test_float64_doubles_everything():
    full, double = sizes(optimizer="adam"), sizes(optimizer="adam", precision="float64")
    for name in ("weights", "slots", "step", "workspace"):
        assert getattr(double, name) == 2 * getattr(full, name), name
    there = dataclasses.replace(WORK, precision="float64")  # what was read is as large already
    assert estimate_memory(there, 10).step == full.step
    assert estimate_memory(there, 10).weights == double.weights


def test_gpu_has_a_context_and_cudnn():
    on_cpu, on_gpu = sizes(), sizes(device="gpu")
    assert on_gpu.framework == CUDA_BYTES
    assert on_gpu.workspace == on_cpu.workspace + 2 * 64 * 10
    assert sizes(device="gpu", framework_bytes=5).framework == 5


def test_parts_are_not_empty_and_add_up():
    parts = sizes(devices=2).parts()
    assert [name for name, _ in parts] == [
        "weights",
        "input",
        "step",
        "workspace",
        "reduce_buffers",
    ]
    assert sum(size for _, size in parts) == sizes(devices=2).total


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"local_batch": 0}, "local_batch has to be 1 or more, not 0"),
        ({"accumulate": 0}, "accumulate has to be 1 or more"),
        ({"devices": -1}, "devices has to be 1 or more"),
        ({"optimizer": "adamx"}, "optimizer 'adamx' is not known; known are sgd"),
        ({"update": "gossip"}, "'all_reduce' or 'parameter_servers', not 'gossip'"),
        ({"device": "tpu"}, "'cpu' or 'gpu', not 'tpu'"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        sizes(**arguments)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to build the counting library with: install gcc, libc6-dev")
    if os.uname().sysname != "Linux":
        pytest.skip("the counting library is preloaded as Linux does")
    return measure_memory.compiled(tmp_path_factory.mktemp("library"))


OUTSIDE = {
    "MobileNetV2 64 16 mixed_float16 sgd": "0.78 of what is measured: CPUs have no kernels for "
    "float16, and compute with copies in float32",
    "MobileNetV2 64 16 mixed_bfloat16 sgd": "0.86 of what is measured: without AVX-512, Eigen's "
    "kernels for convolutions' gradients spread images out until they fill the processor's cache: "
    "25 MB each, two at a time",
    "resnet18 28 8 mixed_bfloat16 momentum": "0.97 of what is measured with AVX-512, for which "
    "oneDNN has kernels in bfloat16; within the tenth without it",
    "VGG16": "1.01 of the worst of 100 steps, 1.1 to 1.4 of that of 8: how often two large "
    "updates meet is chance",
    "inception": "0.90 of what is measured: oneDNN's max pooling keeps a byte for each number, and "
    "a thread that follows one branch first leaves the gradient of where they join whole until the "
    "last branch has its part of it",
    "transformer 64 64 float32 sgd": "0.99 of the worst of 100 steps, 1.01 of that of 8",
    "transformer 64 16 mixed_bfloat16 adam": "1.15 of what is measured: the temporaries of the "
    "embedding's update are counted at the peak, which has long passed when it comes",
}


SOME_CASES = (  # in CI
    "lenet 28 64 float32 sgd",
    "mlp 28 64 float32 adam",
)


def _marks(case):
    reason = OUTSIDE.get(case.model) or OUTSIDE.get(str(case))
    yield pytest.mark.slow if str(case) in SOME_CASES else pytest.mark.exhaustive
    if reason:
        yield pytest.mark.xfail(reason=reason)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[*_marks(case)]) for case in measure_memory.CASES],
)
def test_prediction_is_within_a_tenth_above_the_measurement(case, library):
    """Takes the maximum of several runs, as the concurrency of operations is random.

    On cores with other work four of ten runs of ResNet50 miss its fullest moment.
    """
    peak = 0
    for _ in range(6):
        found = measure_memory.measure(case, library)
        peak = max(peak, found["measured"])
        if found["predicted"] <= 1.1 * peak:
            break
    assert 1 <= found["predicted"] / peak <= 1.1, found
