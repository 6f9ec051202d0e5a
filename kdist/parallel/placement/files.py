"""Placements in JSON files: patterns on names of layers or variables.

{"stem.*": "stage(0)", ".*_up": "column(stage=1)", "head": "stage(1)"}
{".*_up/kernel": [null, "model"], ".*_down/kernel": ["model", null]}
"""

import ast
import json
import os
import pathlib
import re
import warnings

import keras

from kdist.compat.keras import is_tensorflow
from kdist.json_text import parse_json
from kdist.layout import Layout
from kdist.parallel import placement as patterns
from kdist.parallel.search import suggest
from kdist.parallel.search.divide import choose_divisions
from kdist.public_names import renamed_argument
from kdist.run_directory import write_text

# Functions that a file may name.
_FUNCTIONS = {
    name: getattr(patterns, name) for name in ("stage", "device", "column", "row", "heads")
}


def split_as(model: keras.Model, layout: Layout, said: str = "auto"):
    """Returns `split(model, resolve_placement(model, layout, said))`. Deprecated."""
    from kdist.parallel.split_model import split

    warnings.warn(
        "kdist.parallel.split_as is deprecated. Use split with resolve_placement",
        DeprecationWarning,
        stacklevel=2,
    )
    return split(model, resolve_placement(model, layout, said))


@renamed_argument("said", "source")
def resolve_placement(
    model: keras.Model, layout: Layout, source: str = "auto"
) -> patterns.Placement:
    """Returns the placement for a program's flag `--split`.

    Args:
        model: built functional or Sequential model.
        layout: layout of the strategy or mesh.
        source: `"auto"` (default) for a placement that `kdist.parallel.suggest` finds, or the path
            of a file.

    Returns:
        A placement for `kdist.parallel.split`; empty if the layout only replicates the model.

    Raises:
        ValueError: if no placement is found.

    Example:
        placement = kdist.parallel.resolve_placement(plain, layout, FLAGS.split)
        model = kdist.parallel.split(plain, placement)
    """
    if source != "auto":
        return read_placement(source)
    if layout.group_size == 1:
        return {}
    if is_tensorflow():
        return suggest(model, layout)
    # Costs of layers are read from TensorFlow's graphs; their sizes are known without.
    divisions = choose_divisions(model, layout.tensor).how
    return {re.escape(name): patterns.Division(how) for name, how in divisions.items()}


def read_placement(path: str | os.PathLike) -> patterns.Placement:
    """Reads a placement from a JSON file.

    Args:
        path: file that `write_placement` wrote, or a person.

    Returns:
        A placement for `kdist.parallel.split`.

    Raises:
        ValueError: if the file is not a JSON object, or a value is not a place.
        OSError: if the file cannot be read.

    Example:
        model = kdist.parallel.split(plain, kdist.parallel.read_placement("placement.json"))
    """
    try:
        entries = parse_json(pathlib.Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f'{path} holds no placement. Write {{"layer.*": "stage(0)", …}}')
    return {pattern: _place(path, pattern, value) for pattern, value in entries.items()}


@renamed_argument("plan", "placement")
def write_placement(placement: patterns.Placement, path: str | os.PathLike):
    """Writes a placement to a JSON file.

    Args:
        placement: placement for `kdist.parallel.split`.
        path: file for `read_placement`. It is overwritten.

    Example:
        placement = kdist.parallel.suggest(plain, layout)
        kdist.parallel.write_placement(placement, "placement.json")
    """
    entries = {pattern: _json_value(where) for pattern, where in placement.items()}
    write_text(path, json.dumps(entries, indent=1) + "\n")


def _json_value(where):
    if isinstance(where, tuple):
        return list(where)
    if isinstance(where, patterns.Division):
        return f"{where.how}({'' if where.stage is None else f'stage={where.stage}'})"
    return f"{type(where).__name__.lower()}({where.number})"


def _place(path, pattern, value):
    """Parses a value such as "stage(1)": a call with literal arguments, which is not evaluated."""
    if isinstance(value, list):
        return tuple(value)
    try:
        call = ast.parse(value, mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError("not a call of a function by its name")
        arguments = [ast.literal_eval(argument) for argument in call.args]
        options = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        return _FUNCTIONS[call.func.id](*arguments, **options)
    except (KeyError, SyntaxError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: {pattern!r} is placed on {value!r}. Use one of {', '.join(_FUNCTIONS)}, "
            'such as "stage(1)"'
        ) from error
