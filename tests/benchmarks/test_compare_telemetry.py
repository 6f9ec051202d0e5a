"""The program as a user runs it, with so few steps that its figures mean nothing."""

import functools

import pytest

from tests.benchmarks import programs

compare = functools.partial(programs.run, "compare_telemetry")


@pytest.mark.exhaustive
def test_a_row_for_each_variant_beside_none(tmp_path):
    process = compare(
        *("--models=lenet", "--variants=run,refusing", "--steps=4", "--turns=6"),
        *("--save", f"--results_dir={tmp_path}"),
    )
    assert process.returncode == 0, process.stderr[-3000:]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in process.stdout.splitlines()
        if line.startswith("|")
    ][2:]
    assert [row[0] for row in rows] == ["no telemetry", "run directory", "W&B, server refusing"]
    assert all(float(row[1]) > 0 and float(row[3]) > 0 for row in rows)
    assert rows[0][3] == "1.000"
    (saved,) = tmp_path.iterdir()
    assert saved.read_text().startswith("# Telemetry compared")
