"""Verdicts, and the table that holds them; nothing is trained."""

import json

import pytest

from benchmarks.equivalence import table
from benchmarks.equivalence.cells import Column, Description
from benchmarks.equivalence.verdict import Verdict, error, from_differences

COLUMNS = [Column("Keras", 2), Column("kdist", 2)]
ROWS = {
    Description("clipnorm", "a norm", True): dict(
        zip(COLUMNS, [Verdict("wrong", 0.0171), Verdict("works", 1e-8)], strict=True)
    ),
    Description("accumulate", "a | b", False): dict(
        zip(COLUMNS, [Verdict("not there"), Verdict("wrong", float("nan"))], strict=True)
    ),
}


@pytest.mark.parametrize(
    ("differences", "says"),
    [
        ({"weights": (1e-6, 1e-5), "loss": (0.0, 1e-5)}, "works"),
        ({"weights": (2e-5, 1e-5), "loss": (0.5, 1e-5)}, "wrong by 2e-05"),
        ({"weights": (1e-6, 1e-5), "loss": (0.5, 1e-5), "auc": (0.1, 1e-5)}, "wrong by 0.5 (loss)"),
        ({"weights": (float("nan"), 1e-5)}, "wrong by nan"),
        ({}, "works"),
    ],
)
def test_the_largest_difference_decides(differences, says):
    assert str(from_differences(differences)) == says


def test_an_error_is_its_first_telling_line():
    keras_says = (
        "Exception encountered when calling Cond.call().\n\n\x1b[1mno merge_call\x1b[0m\n\nx"
    )
    assert str(error(RuntimeError(keras_says))) == "error: RuntimeError: no merge_call"
    graph = (
        "Graph execution error:\n\nDetected at node while defined at (most recent call last):\n"
        '  File "train.py", line 11, in <module>\n\n2 root error(s) found.\n'
        "  (0) INVALID_ARGUMENT:  You must feed a value\n\t [[{{node while/cond}}]]\n"
    )
    assert str(error(ValueError(graph))) == "error: ValueError: You must feed a value"
    eager = "{{function_node __wrapped__AddN_N_2}} Inputs must have the same size"
    assert str(error(ValueError(eager))) == "error: ValueError: Inputs must have the same size"
    assert str(error(KeyError())) == "error: KeyError: "


def test_text_and_markdown_and_json():
    text = table.as_text(ROWS, COLUMNS).splitlines()
    assert text[0].split() == ["feature", "Keras", "×", "2", "kdist", "×", "2"]
    assert text[2].split("  ")[-1] == "works"
    markdown = table.as_markdown(ROWS, COLUMNS, "Note.").splitlines()
    assert markdown[2] == "| **clipnorm**: a norm | wrong by 0.017 | works |"
    assert markdown[3] == "| **accumulate**: a \\| b | not there | wrong by nan |"
    data = json.loads(json.dumps(table.as_data(ROWS, COLUMNS), allow_nan=False))
    assert [cell["verdict"] for cell in data] == ["wrong", "works", "not there", "wrong"]
    assert data[0]["difference"] == 0.0171
    assert data[3]["difference"] is None


def test_the_table_replaces_what_is_between_its_markers(tmp_path):
    file = tmp_path / "README.md"
    file.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.write_markdown(file, "new")
    assert file.read_text() == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"


def test_a_file_without_markers_is_left_alone(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("mine")
    with pytest.raises(ValueError, match="has no place for the table; put the lines <!-- compare"):
        table.write_markdown(file, "new")
    assert file.read_text() == "mine"
    table.write_markdown(tmp_path / "own.md", "new")
    table.write_markdown(tmp_path / "own.md", "newer")
    assert "newer" in (tmp_path / "own.md").read_text()
