"""Reads files of JSON lines into columns, which take less memory than lists of objects."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson


@dataclasses.dataclass(frozen=True)
class Records:
    """Records of a file, as columns of numbers.

    `columns` is field -> float64 of shape (length,), NaN where the record has no finite number. A
    list of numbers becomes one column for each position, such as `replica_busy_seconds/0`.
    `nonfinite` is loss -> position of the first record in which it is NaN or infinite. Such values
    are null in the file, and a record without a loss has no such field.
    """

    columns: Mapping[str, np.ndarray]
    length: int
    nonfinite: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def column(self, name: str) -> np.ndarray:
        """Returns the numbers of a field; all NaN if no record has it."""
        found = self.columns.get(name)
        return np.full(self.length, np.nan) if found is None else found

    def has(self, name: str) -> bool:
        """Returns whether any record has a number in this field."""
        found = self.columns.get(name)
        return found is not None and bool(np.isfinite(found).any())

    def points(self, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns both fields of the records that have both."""
        both = self.column(x), self.column(y)
        known = np.isfinite(both[0]) & np.isfinite(both[1])
        return both[0][known], both[1][known]


LOSSES = ("loss", "val_loss")
NO_RECORDS = Records({}, 0)


def number(value: Any) -> int | float | None:
    """Returns `value` if it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def read_records(
    path: pathlib.Path, group: Sequence[str], notes: list[str]
) -> dict[tuple[str, ...], Records]:
    """Returns the records of a file, grouped by the strings in the fields `group`.

    Records without one of these fields are skipped. `notes` receives notes about missing and
    damaged parts. An incomplete last line is skipped and noted, as a run may be writing it. Raises
    ValueError if another line is not a JSON object, and OSError if the file cannot be read.
    """
    if not path.is_file():
        notes.append(f"{path.name} is missing")
        return {}
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in _objects(path, notes):
        key = tuple([record.get(field) for field in group])
        is_text = {*map(type, key)} == {str}  # a list cannot be a key
        groups.setdefault(key if is_text else (), []).append(record)
    return {key: _in_columns(records, group) for key, records in groups.items() if key}


def _objects(path, notes):
    # Only "\n" ends a record: str.splitlines would also split at characters that JSON allows.
    lines = read_text(path).rstrip("\n").split("\n")
    if not _is_json(lines[-1]) and lines.pop():
        notes.append(f"the last line of {path.name} is incomplete and was skipped")
    return _all_at_once(lines) or [
        parse_object(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line
    ]


def _all_at_once(lines):
    """Parses all lines at once, which is many times faster; returns None if one is unusual."""
    try:
        # orjson is strict; Python's parser handles NaN.
        objects = orjson.loads(f"[{','.join(lines)}]")
    except ValueError:
        return None
    is_one_each = len(objects) == len(lines) and all(type(value) is dict for value in objects)
    return objects if is_one_each else None


def _in_columns(records, left_out):
    names = sorted(set().union(*records))
    columns = {}
    for name in names:
        if name not in left_out:
            columns.update(_columns(name, [record.get(name) for record in records]))
    first = {name: _first_nonfinite(records, name) for name in LOSSES if name in names}
    nonfinite = {name: position for name, position in first.items() if position is not None}
    return Records(columns, len(records), nonfinite)


def _first_nonfinite(records, name):
    values = (record.get(name, 0.0) for record in records)
    numbers = (type(None), int, float)
    found = (i for i, v in enumerate(values) if type(v) in numbers and number(v) is None)
    return next(found, None)


def _columns(name, values):
    types = set(map(type, values))
    if list in types:
        width = max(len(value) for value in values if type(value) is list)
        for i in range(width):
            entries = [v[i] if type(v) is list and i < len(v) else None for v in values]
            yield f"{name}/{i}", _array(entries, set(map(type, entries)))
    elif types & {int, float}:
        yield name, _array(values, types)


def _array(values, types):
    if not types <= {int, float, type(None)}:
        values = [number(value) for value in values]
    try:
        array = np.array(values, dtype=np.float64)
    except OverflowError:  # an integer that is too large for a float
        array = np.array([None if _is_huge(value) else value for value in values], np.float64)
    array[~np.isfinite(array)] = np.nan
    return array


def _is_huge(value):
    try:
        float(value or 0)
    except OverflowError:
        return True
    return False


def read_text(path: pathlib.Path) -> str:
    """Returns the text of a file, with invalid UTF-8 replaced, or raises OSError with a remedy."""
    try:
        # An incomplete line may end within a character, which must not stop the reading.
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise OSError(
            f"cannot read {path} ({error.strerror}); make it readable, or omit this run"
        ) from error


def parse_object(text: str, source: str) -> dict[str, Any]:
    """Returns the JSON object in a text, or raises ValueError with `source`, the file and line."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{source} is not valid JSON ({error}); omit this run, or repair the file"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{source} is not a JSON object; omit this run, or repair the file")
    return value


def _is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
