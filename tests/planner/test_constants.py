"""Constants come from their table, whole or not at all."""

import csv
import dataclasses
import pathlib

import pytest

from kdist.planner.constants import (
    NAMES,
    known_constants,
    prior_constants,
    priors,
    read_constants,
)
from kdist.planner.fitted import replace_values


def test_priors_have_units_and_meanings():
    assert [prior.name for prior in priors()] == list(NAMES)
    assert prior_constants().network_share == 0.6
    assert len({prior.meaning for prior in priors()}) == len(NAMES)


TABLES = pathlib.Path("kdist/planner/tables")


@pytest.mark.parametrize("name", ["constants.csv", "compute_constants.csv"])
def test_every_prior_says_where_it_is_from(name):
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


def test_a_table_with_a_constant_too_few_or_twice_is_refused(tmp_path):
    path = tmp_path / "constants.csv"
    lines = (TABLES / "constants.csv").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match="missing numpy_feed_ns_per_byte"):
        read_constants(path)
    path.write_text("".join([*lines, lines[1]]))
    with pytest.raises(ValueError, match="28 rows for 27"):
        read_constants(path)
    path.write_text("".join([*lines[:-1], lines[-1].replace("numpy_feed", "other")]))
    with pytest.raises(ValueError, match="not known other_ns_per_byte"):
        read_constants(path)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_constant_is_above_zero(value):
    with pytest.raises(ValueError, match="hop_ms is a number above 0"):
        dataclasses.replace(known_constants(), hop_ms=value)
