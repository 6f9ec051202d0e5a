"""Reads files of one JSON object a line into columns, as long runs make lists of objects heavy.

notes = []
records = read_records(path, ("kind",), notes)
records[("epoch",)].column("val_loss")   # an array, NaN where a record has no number
"""

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
    """Records in their order, as columns of numbers.

    Attributes:
        columns: field -> float64 of shape (R,), NaN where the record has no finite number. A list
            of numbers becomes a column for each place: `replica_busy_seconds/0`.
        length: R, the number of records.
    """

    columns: Mapping[str, np.ndarray]
    length: int

    def column(self, name: str) -> np.ndarray:
        """The numbers of a field; all NaN if no record has it."""
        found = self.columns.get(name)
        return np.full(self.length, np.nan) if found is None else found

    def has(self, name: str) -> bool:
        """Whether a record has a number in this field."""
        found = self.columns.get(name)
        return found is not None and bool(np.isfinite(found).any())

    def points(self, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
        """Both fields, of the records that have both."""
        both = self.column(x), self.column(y)
        known = np.isfinite(both[0]) & np.isfinite(both[1])
        return both[0][known], both[1][known]


NO_RECORDS = Records({}, 0)


def number(value: Any) -> int | float | None:
    """`value` if it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def read_records(
    path: pathlib.Path, group: Sequence[str], notes: list[str]
) -> dict[tuple[str, ...], Records]:
    """The records of a file, apart by the texts that they have in the fields `group`.

    A last line that is cut short is left out and noted, as a run may be writing it.

    Args:
        path: the file.
        group: fields such as ("kind",); a record without one of them is left out.
        notes: where what is missing or damaged is noted, in words.

    Raises:
        ValueError: another line is no JSON object.
        OSError: the file cannot be read.
    """
    if not path.is_file():
        notes.append(f"{path.name} is missing")
        return {}
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in _objects(path, notes):
        key = tuple([record.get(field) for field in group])
        # A list in the place of a name could not be looked up.
        groups.setdefault(key if _are_texts(key) else (), []).append(record)
    return {key: _in_columns(records, group) for key, records in groups.items() if key}


def _are_texts(values):
    return {*map(type, values)} == {str}


def _objects(path, notes):
    # Only "\n" ends a record: str.splitlines would also split at characters that JSON allows.
    lines = read_text(path).rstrip("\n").split("\n")
    if not _is_json(lines[-1]) and lines.pop():
        notes.append(f"the last line of {path.name} is cut short and was left out")
    return _all_at_once(lines) or [
        parse_object(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line
    ]


def _all_at_once(lines):
    """The objects of these lines, many times faster than line by line; None if one is odd."""
    try:
        # Strict: what only Python takes for JSON (NaN) is left to its own parser.
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
    return Records(columns, len(records))


def _columns(name, values):
    types = set(map(type, values))
    if list in types:
        width = max(len(value) for value in values if type(value) is list)
        for place in range(width):
            entries = [v[place] if type(v) is list and place < len(v) else None for v in values]
            yield f"{name}/{place}", _array(entries, set(map(type, entries)))
    elif types & {int, float}:
        yield name, _array(values, types)


def _array(values, types):
    if not types <= {int, float, type(None)}:
        values = [number(value) for value in values]
    try:
        array = np.array(values, dtype=np.float64)
    except OverflowError:  # an integer that no float holds
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
    """The text of a file; what is no UTF-8 in it is replaced.

    Raises:
        OSError: it cannot be read; says which file.
    """
    try:
        # A line cut within a character is as torn as any other; it must not stop the reading.
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise OSError(
            f"cannot read {path} ({error.strerror}); make it readable, or leave this run out"
        ) from error


def parse_object(text: str, place: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: the text is none; says at which place it was found.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON ({error}); leave this run out, or mend it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place} holds no JSON object; leave this run out, or mend it")
    return value


def _is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
