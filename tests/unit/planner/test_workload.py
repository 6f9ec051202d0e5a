"""Workloads: totals, other image sizes, and JSON."""

import dataclasses

import pytest

from kdist.planner import Workload
from tests.unit.planner.example_layer import convolution

CONVOLUTION = convolution()
NORM = dataclasses.replace(
    CONVOLUTION, name="norm", kind="elementwise", parameters=16.0, trainable_parameters=8.0
)
CLASSES = dataclasses.replace(
    CONVOLUTION, name="classes", kind="matmul", trainable_parameters=10.0, spatial=False
)
WORK = Workload(
    "small", (8, 8, 3), (CONVOLUTION, NORM, CLASSES), 768.0, ((1000.0, 0.0), (10.0, 5000.0))
)


def test_layers_add_up():
    assert WORK.parameters == 27 + 16 + 27
    assert WORK.trainable_parameters == 27 + 8 + 10
    assert WORK.forward_flops == 600
    assert WORK.training_flops == 1800
    assert WORK.activation_bytes == 192


def test_gradients_have_the_size_of_the_weights():
    assert WORK.gradient_bytes == 45 * 4
    mixed = dataclasses.replace(WORK, precision="mixed_bfloat16")  # weights stay float32
    assert mixed.gradient_bytes == 45 * 4
    assert dataclasses.replace(WORK, precision="bfloat16").gradient_bytes == 45 * 2


def test_peak_depends_on_the_batch():
    assert WORK.step_bytes(1) == 5010  # the gradients are there, the activations gone
    assert WORK.step_bytes(10) == 10_000  # the other way round


def test_applied_gradients_are_freed():
    work = dataclasses.replace(WORK, peaks_applied=((1000.0, 0.0), (20.0, 3000.0)))
    assert work.step_bytes(1) == 5010
    assert work.step_bytes(1, gradients_stay=False) == 3020
    assert work.at_input_shape((16, 16, 3)).step_bytes(1, gradients_stay=False) == 4000
    assert WORK.step_bytes(1, gradients_stay=False) == 5010  # not known: a bound


def test_gradients_are_ready_from_the_last_layer_on():
    assert WORK.gradients_as_ready() == [("classes", 10.0), ("norm", 8.0), ("conv", 27.0)]


def test_larger_image_makes_spatial_layers_larger():
    large = WORK.at_input_shape((16, 24, 3))
    conv, _, classes = large.layers
    assert (conv.forward_flops, conv.kept_bytes, conv.parameters) == (1200, 384, 27)
    assert classes == CLASSES
    assert (large.input_shape, large.input_bytes) == ((16, 24, 3), 768 * 6)
    assert WORK.at_input_shape([8, 8, 3]) is WORK


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 1), (8,)])
def test_other_shapes_are_rejected(shape):
    with pytest.raises(ValueError, match="only height and width of an image can be changed"):
        WORK.at_input_shape(shape)


@pytest.mark.parametrize("shape", [(None, None, 3), (0, 8, 3), (8, -8, 3), (8.0, 8, 3)])
def test_sizes_are_whole_numbers_from_1_on(shape):
    with pytest.raises(ValueError, match="whole numbers from 1 on"):
        WORK.at_input_shape(shape)


def test_model_with_flattened_image_is_not_resizable():
    flattens = dataclasses.replace(WORK, resizable=False)
    with pytest.raises(ValueError, match="depends on"):
        flattens.at_input_shape((16, 16, 3))


def test_text_and_back():
    work = dataclasses.replace(WORK, peaks_applied=((1000.0, 0.0),))
    assert Workload.from_json(work.to_json()) == work


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": [{"name": "x"}]}'])
def test_invalid_text_is_rejected(text):
    with pytest.raises(ValueError, match="here.json holds no workload"):
        Workload.from_json(text, "here.json")
