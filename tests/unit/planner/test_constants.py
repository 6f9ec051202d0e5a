"""Tables of constants are complete or rejected."""

import csv
import dataclasses
import importlib.resources

import pytest

from benchmarks.planner_validation.least_squares import replace_values
from benchmarks.planner_validation.priors import names_of, prior_constants, priors
from kdist.planner.cost.constants import (
    COLUMNS,
    Constants,
    known_constants,
    make_constants,
)
from kdist.planner.tables.read import read_table


def test_priors_have_units_and_meanings():
    assert [prior.name for prior in priors()] == names_of(Constants)
    assert prior_constants().network_share == 0.6
    assert len({prior.meaning for prior in priors()}) == len(names_of(Constants))


TABLES = importlib.resources.files("kdist.planner.tables")


@pytest.mark.parametrize("name", ["constants.csv", "compute_constants.csv"])
def test_every_prior_has_a_source(name):
    with (TABLES / name).open(newline="") as file:
        sources = {row["source"] for row in csv.DictReader(file)}
    in_view = "chosen with the published rates in view"
    assert in_view in sources
    assert sources <= {"specification", "general knowledge", in_view}


def test_a_fit_replaces_values_and_nothing_else(tmp_path):
    path = tmp_path / "constants.csv"
    own = (TABLES / "constants.csv").read_text()
    path.write_text(own)
    replace_values(known_constants(), path)
    assert path.read_text() == own
    replace_values(dataclasses.replace(known_constants(), horovod_ms=0.25), path)
    (old,) = (line for line in own.splitlines() if line.startswith("horovod_ms,"))
    new = ",".join(["horovod_ms", "0.25", *old.split(",")[2:]])
    assert path.read_text() == own.replace(old, new)


def test_table_with_a_missing_or_repeated_constant_is_rejected(tmp_path):
    path = tmp_path / "constants.csv"
    lines = (TABLES / "constants.csv").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match="missing numpy_feed_ns_per_byte"):
        make_constants(Constants, read_table(path, COLUMNS), "own.csv")
    path.write_text("".join([*lines, lines[1]]))
    with pytest.raises(ValueError, match="28 rows for 27"):
        make_constants(Constants, read_table(path, COLUMNS), "own.csv")
    path.write_text("".join([*lines[:-1], lines[-1].replace("numpy_feed", "other")]))
    with pytest.raises(ValueError, match="not known other_ns_per_byte"):
        make_constants(Constants, read_table(path, COLUMNS), "own.csv")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_constant_is_above_zero(value):
    with pytest.raises(ValueError, match="hop_ms must be a number above 0"):
        dataclasses.replace(known_constants(), hop_ms=value)
