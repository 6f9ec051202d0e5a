"""Dollars of published trainings, given their epochs."""

import csv
import dataclasses

import pytest

from benchmarks.planner_validation import TABLES
from benchmarks.planner_validation.time_to_accuracy import (
    Trained,
    check_trainings,
    dollars_error,
    trainings_text,
)
from benchmarks.planner_validation.training_recipes import (
    COLUMNS,
    Phase,
    Recipe,
    known_recipes,
    recipes_of,
)
from benchmarks.planner_validation.training_time import IMAGENET_EXAMPLES, training_seconds
from kdist.planner.cost.constants import known_constants
from kdist.planner.tables.machines import known_machines
from kdist.planner.tables.read import read_table

TABLE = TABLES / "time_to_accuracy.csv"
RECIPES = TABLES / "training_recipes.csv"


def test_dollars_are_hours_times_price():
    trained = [Trained("a", 2.0, 3.0, 10.0), Trained("b", 4.0, 3.0, 1.0), Trained("c", 1, 9, None)]
    assert dollars_error(trained) == pytest.approx((0.5 + 0.25) / 2)
    text = trainings_text(trained)
    assert "$20.00" in text
    assert "$30.00" in text
    assert "9.000 h" in text
    assert text.splitlines()[-1] == "dollars: 37.5 % off on average"


def test_own_entries_are_all_predicted():
    trained = check_trainings(TABLE, known_machines())
    assert len(trained) == 7
    # Today's figures, with a small margin. AIACC's exchange is slower here than it was, and the
    # TensorFlow 1.11 of GE Healthcare faster.
    errors = sorted(abs(one.error) for one in trained)
    assert errors[4] < 0.17
    assert errors[6] < 0.26
    assert dollars_error(trained) < 0.14
    assert all(one.images for one in trained)


def test_image_sizes_are_listed():
    told = trainings_text(check_trainings(TABLE, known_machines())).splitlines()
    (azure,) = (line for line in told if "Azure" in line)
    assert azure.endswith(" %  13 of 128 px, 12 of 224 px, 2 of 288 px")


def without(tmp_path, *columns, **changed):
    with open(TABLE, newline="") as file:
        rows = list(csv.DictReader(file))
    path = tmp_path / "published.csv"
    with path.open("w", newline="") as file:
        names = [name for name in rows[0] if name not in columns]
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, **changed} for row in rows)
    return path


def test_absent_columns_come_from_kdists_own_table(tmp_path):
    path = without(tmp_path, "machine", "local_batch", "precision", "pixels", "assumed")
    assert check_trainings(path, known_machines()) == check_trainings(TABLE, known_machines())


def test_absent_columns_of_other_entries_are_named(tmp_path):
    path = without(tmp_path, "machine", "precision", hardware="1x other")
    said = "lacks the columns machine, precision, and .* for .*, 1x other; add these columns"
    with pytest.raises(ValueError, match=said):
        check_trainings(path, known_machines())


def test_smaller_images_take_less_time(tmp_path):
    with open(TABLE) as file:
        lines = file.read().splitlines()
    small = tmp_path / "small.csv"
    small.write_text("\n".join([lines[0], lines[4], lines[4].replace("fp16,,", "fp16,128,")]))
    full, smaller = check_trainings(small, known_machines())
    assert smaller.predicted_hours < 0.8 * full.predicted_hours
    assert smaller.images == ""  # What the table itself says goes before a recipe.


def test_a_machine_that_is_not_known_is_named(tmp_path):
    machines = {"other": dataclasses.replace(known_machines()["dgx1-p100"], name="other")}
    with pytest.raises(ValueError, match="machine 'alibaba-gn6e-8xv100' is not known"):
        check_trainings(TABLE, machines)


def seconds(*phases, like="TF 19.02 Horovod", cores=64, **other):
    recipe = Recipe("ResNet-50", "TF1 Horovod", like, "fp16", phases, **other)
    machine = dataclasses.replace(known_machines()["ec2-p3.16xlarge"], cpu_cores=cores)
    return training_seconds(recipe, machine.name, 8, {machine.name: machine}, known_constants())


def test_half_the_pixels_in_half_of_the_epochs_take_three_quarters_of_the_time():
    full, half = Phase(5, 224, 256), Phase(5, 158, 512)
    whole = seconds(dataclasses.replace(full, epochs=10), cores=10_000)
    mixed = seconds(full, half, cores=10_000)
    assert mixed == pytest.approx(
        seconds(full, cores=10_000) + seconds(half, cores=10_000), rel=1e-9
    )
    # 158 x 158 is half of 224 x 224. As many pixels in a step take as long, update and exchange
    # included, where loading the images, whose stored size stays, takes next to nothing.
    assert mixed / whole == pytest.approx(0.75, abs=0.005)


def test_validating_takes_a_third_of_training_where_loading_takes_nothing():
    plain, checked = Phase(1, 224, 256), Phase(1, 224, 256, validated=IMAGENET_EXAMPLES)
    without_loading = seconds(checked, cores=10_000) / seconds(plain, cores=10_000)
    assert without_loading == pytest.approx(4 / 3, abs=0.02)  # Horovod's cycle is in both.
    assert seconds(checked) / seconds(plain) > without_loading


def test_large_stored_images_take_longer_to_load():
    small, large = Phase(1, 128, 512, stored_pixels=160), Phase(1, 128, 512, stored_pixels=800)
    assert seconds(large) > 1.3 * seconds(small)
    # Torchvision's loader is slower than tf.data, by a training published with each.
    slower, faster = (
        seconds(large, like=like) / seconds(small, like=like)
        for like in ("PyTorch 18.09", "TF 19.02 Horovod")
    )
    assert slower > faster


def test_whole_cores_load_faster_than_hyperthreads():
    phase = Phase(1, 128, 512)
    assert seconds(phase, whole_cores=True) < seconds(phase, whole_cores=False)
    assert seconds(phase, whole_cores=False) == seconds(phase)


def test_software_without_published_rates_is_named():
    with pytest.raises(ValueError, match="no rate of ResNet-50 by Theano is published"):
        seconds(Phase(1, 224, 256), like="Theano")


def test_recipes_have_the_epochs_of_their_entries():
    for key, recipe in known_recipes().items():
        assert recipe.epochs - key[3] in (0, 1)  # Some entries count them from 0.


def recipes(tmp_path, change):
    with open(RECIPES, newline="") as file:
        rows = list(csv.DictReader(file))
    change(rows)
    path = tmp_path / "recipes.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_recipes(path):
    return recipes_of(read_table(path, COLUMNS), path)


def set_cell(line, name, value):
    return lambda rows: rows[line].update({name: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[0].pop("pixels"), "lacks the column pixels"),
        (set_cell(1, "pixels", "large"), "line 3: pixels is 'large', but must be an integer"),
        (set_cell(0, "first_epoch", "-1"), "line 2: first_epoch is '-1', but must be an integer"),
        (set_cell(2, "precision", "fp12"), "line 4: precision is 'fp12'"),
        (
            set_cell(0, "whole_cores", "perhaps"),
            "line 2: whole_cores is 'perhaps', but must be yes or no",
        ),
        (set_cell(1, "source", ""), "line 3: source is empty"),
        (set_cell(1, "epochs", "10"), "begins at epoch 24, where the one before ends with 23"),
        (set_cell(1, "like", "Theano"), "like is TF 19.07 Horovod XLA in one line, Theano in an"),
    ],
)
def test_invalid_recipes_are_refused(tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        read_recipes(recipes(tmp_path, change))


def test_own_recipes_are_read_as_those_of_a_file():
    assert read_recipes(RECIPES) == known_recipes()
