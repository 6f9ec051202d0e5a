"""The user's table of measured runs corrects predictions."""

import math

import pytest

from kdist.planner.measurements import Measurement, Measurements, add_measurement


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


def test_added_rows_are_read(tmp_path):
    path = tmp_path / "new" / "measurements.csv"
    add_measurement(row(), path)
    add_measurement(row(ratio=1.5), path)
    assert Measurements.read(path).rows == (row(), row(ratio=1.5))


def test_missing_table_corrects_nothing(tmp_path):
    assert Measurements.read(tmp_path / "none.csv").correction("resnet50", "V100", "float32") == 1


def test_runs_of_the_same_model_count_alone():
    table = Measurements((row(ratio=1.2), row(ratio=1.2**3), row("vgg16", ratio=9)))
    assert table.correction("resnet50", "V100", "float32") == pytest.approx(1.2**2)


def test_other_models_on_the_gpu_count_in_part():
    table = Measurements((row("vgg16", ratio=1.44),))
    assert table.correction("resnet50", "V100", "float32") == pytest.approx(1.2)  # half of it
    table = Measurements((row("vgg16", ratio=1.44), row("lenet", ratio=1.44)))
    assert table.correction("resnet50", "V100", "float32") == pytest.approx(1.44 ** (2 / 3))


def test_other_gpus_do_not_count():
    assert Measurements((row(gpu="A100"),)).correction("resnet50", "V100", "float32") == 1


def test_another_precision_counts_as_another_model():
    table = Measurements((row(precision="mixed_float16", ratio=math.e),))
    corrected = table.correction("resnet50", "V100", "float32")
    assert corrected == pytest.approx(math.exp(0.5))


def test_file_of_another_kind_is_not_changed(tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("name,value\na,1\n")
    with pytest.raises(ValueError, match="lacks the columns"):
        add_measurement(row(), path)
    assert path.read_text() == "name,value\na,1\n"
