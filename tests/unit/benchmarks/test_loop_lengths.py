"""Lengths of loops with `kdist.step`, next to the table of docs/evidence/own_loops.md."""

import pathlib
import re

import pytest

from benchmarks.loop_lengths import PAIRS, count, ours

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "evidence" / "own_loops.md"


def test_each_statement_is_a_line_whatever_its_style():
    source = """
import os
# a comment
def f(
    x,
):
    'docstring'
    if x: return (1 +
        2)
    start = time.time()
for _ in range(3):
    plt.show()
"""
    assert count(source) == 3
    assert count(source, "if x") == 0  # nothing is left of the function


@pytest.mark.parametrize("title", PAIRS)
def test_the_page_has_the_length_of_each_loop_which_is_shorter_than_its_original(title):
    row = re.search(rf"^\| {re.escape(title)} \| (\d+) \| (\d+) \|", PAGE.read_text(), re.M)
    original, own = map(int, row.groups())
    assert own == count(ours(PAIRS[title].ours)) < original
