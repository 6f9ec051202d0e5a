"""Reads CSV tables of hardware, prices, and measured rates, of kdist and of users.

read_table("machines.csv", {"machine": text, "gpus_per_node": count, "node_gbit_s": maybe(number)})

A row is a dict of the requested columns; other columns are ignored, or rejected on request. An
error message lists all invalid cells with their lines.
"""

import csv
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

Reader = Callable[[str], Any]


def text(cell: str) -> str:
    """Returns a cell that is not empty."""
    if not cell:
        raise ValueError("is empty")
    return cell


def number(cell: str) -> float:
    """Returns a number above 0."""
    value = _parse(float, text(cell), "a number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"is {cell}, but must be a number above 0")
    return value


def price(cell: str) -> float:
    """Returns a number of at least 0."""
    value = _parse(float, text(cell), "a number")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"is {cell}, but must be a number of at least 0")
    return value


def count(cell: str) -> int:
    """Returns an integer of at least 1."""
    value = _parse(int, text(cell), "an integer")
    if value < 1:
        raise ValueError(f"is {cell}, but must be an integer of at least 1")
    return value


def maybe(read: Reader) -> Reader:
    """Returns a reader like `read` that returns None for empty cells."""
    return lambda cell: read(cell) if cell else None


def check_above_zero(constants: Any) -> None:
    """Raises a ValueError for the first attribute of a dataclass that is not above zero."""
    for name, value in dataclasses.asdict(constants).items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the constant {name} must be a number above 0, not {value}")


def read_table(
    path: str | os.PathLike, columns: Mapping[str, Reader], strict: bool = False
) -> list[dict[str, Any]]:
    """Returns the rows of a CSV file with a header.

    `columns` maps each required column to the reader of its cells: `text`, `number`, `count`, or
    one of them in `maybe`. With `strict`, other columns and cells beyond the header are invalid.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a column is missing, there are no rows, or cells are invalid; the message lists
            up to ten of them.
    """
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text, but must be a CSV table: {error}") from None
    return _read(content, os.fspath(path), columns, strict)


def read_own_table(name: str, columns: Mapping[str, Reader]) -> list[dict[str, Any]]:
    """Returns the rows of a table of kdist, such as "gpus.csv"."""
    content = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return _read(content, name, columns)


def _read(content, source, columns, strict=False):
    reader = csv.DictReader(content.splitlines())
    named = reader.fieldnames or []
    missing = [name for name in columns if name not in named]
    if missing:
        raise ValueError(
            f"{source} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has "
            f"{', '.join(named) or 'none'}. Required are {', '.join(columns)}"
        )
    rows, wrong = [], []
    if strict and (unknown := [repr(name) for name in named if name not in columns]):
        wrong.append(f"line 1: {', '.join(unknown)} is unknown; known are {', '.join(columns)}")
    for cells in reader:
        row = {}
        if strict and None in cells:
            wrong.append(f"line {reader.line_num}: has more cells than the header")
        for name, read in columns.items():
            try:
                row[name] = read((cells[name] or "").strip())
            except ValueError as error:
                wrong.append(f"line {reader.line_num}: {name} {error}")
        rows.append(row)
    if wrong:
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError(f"{source} has invalid cells:\n  " + "\n  ".join(wrong[:10]) + more)
    if not rows:
        raise ValueError(f"{source} has a header but no rows")
    return rows


def _parse(kind, cell, what):
    try:
        return kind(cell)
    except ValueError:
        raise ValueError(f"is {cell!r}, but must be {what}") from None
