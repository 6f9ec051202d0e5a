"""Dollars of published trainings, given their epochs."""

import csv
import dataclasses

import pytest

from kdist.planner.machines import known_machines
from kdist.planner.time_to_accuracy import (
    Trained,
    check_trainings,
    dollars_error,
    trainings_text,
)

TABLE = "kdist/planner/tables/time_to_accuracy.csv"


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
    by_name = {one.name: one for one in trained}
    tensorflow = by_name["ResNet-50, TF1.11 Horovod, 1x p3.16xlarge"]
    assert abs(tensorflow.error) < 0.2
    # Today's figures; the second is far above the goal of 15 %, see the module.
    assert sorted(abs(one.error) for one in trained)[3] < 0.30
    assert dollars_error(trained) < 0.638


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


def test_what_a_table_lacks_is_taken_from_kdists_own(tmp_path):
    path = without(tmp_path, "machine", "local_batch", "precision", "pixels", "assumed")
    assert check_trainings(path, known_machines()) == check_trainings(TABLE, known_machines())


def test_what_a_table_lacks_of_other_entries_is_named(tmp_path):
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


def test_a_machine_that_is_not_known_is_named(tmp_path):
    machines = {"other": dataclasses.replace(known_machines()["dgx1-p100"], name="other")}
    with pytest.raises(ValueError, match="machine 'alibaba-gn6e-8xv100' is not known"):
        check_trainings(TABLE, machines)
