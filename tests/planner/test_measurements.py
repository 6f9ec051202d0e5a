"""A user's own table of measured runs, and how it corrects predictions."""

import math

import pytest

from kdist.planner.measurements import Measurement, Measurements, add


def row(model="resnet50", gpu="V100", precision="float32", ratio=1.2):
    return Measurement(
        as_of="2026-11-22",
        model=model,
        gpu=gpu,
        precision=precision,
        machine="mine",
        strategy="mirrored",
        replicas=2.0,
        local_batch=32.0,
        examples_per_second=100.0,
        predicted_examples_per_second=120.0,
        micro_step_seconds=0.1 * ratio,
        predicted_micro_step_seconds=0.1,
    )


def test_what_is_added_is_read_again(tmp_path):
    path = tmp_path / "new" / "measurements.csv"
    add(row(), path)
    add(row(ratio=1.5), path)
    assert Measurements.read(path).rows == (row(), row(ratio=1.5))


def test_no_table_corrects_nothing(tmp_path):
    assert Measurements.read(tmp_path / "none.csv").correction("resnet50", "V100", "float32") == 1


def test_the_same_model_says_it_alone():
    table = Measurements((row(ratio=1.2), row(ratio=1.2**3), row("vgg16", ratio=9)))
    assert table.correction("resnet50", "V100", "float32") == pytest.approx(1.2**2)


def test_other_models_on_the_gpu_say_a_part_of_it():
    table = Measurements((row("vgg16", ratio=1.44),))
    assert table.correction("resnet50", "V100", "float32") == pytest.approx(1.2)  # half of it
    table = Measurements((row("vgg16", ratio=1.44), row("lenet", ratio=1.44)))
    assert table.correction("resnet50", "V100", "float32") == pytest.approx(1.44 ** (2 / 3))


def test_other_gpus_say_nothing():
    assert Measurements((row(gpu="A100"),)).correction("resnet50", "V100", "float32") == 1


def test_another_precision_of_the_model_is_another_model():
    table = Measurements((row(precision="mixed_float16", ratio=math.e),))
    corrected = table.correction("resnet50", "V100", "float32")
    assert corrected == pytest.approx(math.exp(0.5))


def test_a_file_that_is_no_such_table_is_not_written_to(tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("name,value\na,1\n")
    with pytest.raises(ValueError, match="lacks the columns"):
        add(row(), path)
    assert path.read_text() == "name,value\na,1\n"
