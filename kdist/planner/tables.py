"""Tables of hardware, prices and measured rates: CSV files, those of kdist and those of a user.

read_table("machines.csv", {"machine": text, "gpus_per_node": count, "node_gbit_s": maybe(number)})

A row is a dict of the columns asked for; others are left alone. Whatever is wrong with a table is
said at once, with the lines that it stands in.
"""

import csv
import math
import os
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

Reader = Callable[[str], Any]


def text(cell: str) -> str:
    """A cell that says something."""
    if not cell:
        raise ValueError("is empty")
    return cell


def number(cell: str) -> float:
    """A number above zero."""
    value = _parse(float, text(cell), "a number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"is {cell}, where a number above 0 is needed")
    return value


def count(cell: str) -> int:
    """A whole number from 1 on."""
    value = _parse(int, text(cell), "a whole number")
    if value < 1:
        raise ValueError(f"is {cell}, where a whole number from 1 on is needed")
    return value


def maybe(read: Reader) -> Reader:
    """What `read` reads, or None of an empty cell."""
    return lambda cell: read(cell) if cell else None


def read_table(path: str | os.PathLike, columns: Mapping[str, Reader]) -> list[dict[str, Any]]:
    """The rows of a CSV file with a line of column names.

    Args:
        path: of the file.
        columns: those that are needed, and how a cell of each is read: `text`, `number`, `count`,
            or one of them in `maybe`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no table with these columns, it has no rows, or cells are not what they
            have to be; the message has up to ten of them, with their lines.
    """
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8, as a CSV table has to be: {error}") from None
    return _read(content, os.fspath(path), columns)


def read_own_table(name: str, columns: Mapping[str, Reader]) -> list[dict[str, Any]]:
    """The rows of a table that comes with kdist, such as "gpus.csv"."""
    content = resources.files(__package__).joinpath("tables", name).read_text(encoding="utf-8")
    return _read(content, name, columns)


def _read(content, source, columns):
    reader = csv.DictReader(content.splitlines())
    named = reader.fieldnames or []
    missing = [name for name in columns if name not in named]
    if missing:
        raise ValueError(
            f"{source} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has "
            f"{', '.join(named) or 'none'}. Needed are {', '.join(columns)}"
        )
    rows, wrong = [], []
    for cells in reader:
        row = {}
        for name, read in columns.items():
            try:
                row[name] = read((cells[name] or "").strip())
            except ValueError as error:
                wrong.append(f"line {reader.line_num}: {name} {error}")
        rows.append(row)
    if wrong:
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError(f"{source} cannot be used:\n  " + "\n  ".join(wrong[:10]) + more)
    if not rows:
        raise ValueError(f"{source} has column names, but no rows")
    return rows


def _parse(kind, cell, what):
    try:
        return kind(cell)
    except ValueError:
        raise ValueError(f"is {cell!r}, where {what} is needed") from None
