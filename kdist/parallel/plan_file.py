"""Split plans in files: JSON, patterns on names of layers beside where they go.

{"stem.*": "stage(0)", ".*_up": "column(stage=1)", "head": "stage(1)"}
{".*_up/kernel": [null, "model"], ".*_down/kernel": ["model", null]}
"""

import ast
import json
import os
import pathlib
import re

import keras

from kdist.backend import is_tensorflow
from kdist.layout import Layout
from kdist.parallel import split_plan
from kdist.parallel.dividing import chosen_divisions
from kdist.parallel.split_model import SplitModel, split
from kdist.parallel.suggesting import suggest

# What a plan can say: the functions of `split_plan` by their names.
_SAYS = {name: getattr(split_plan, name) for name in ("stage", "device", "column", "row", "heads")}


def split_as(model: keras.Model, layout: Layout, said: str = "auto") -> SplitModel:
    """`model`, split as a program's flag `--split` says.

    Args:
        model: as `split` takes it.
        layout: of the strategy in whose scope this is called.
        said: `"auto"`, a plan that `suggest` finds; or the file of one.
    """
    return split(model, plan_as_said(model, layout, said))


def plan_as_said(model: keras.Model, layout: Layout, said: str = "auto") -> split_plan.SplitPlan:
    """The plan that a program's flag `--split` says.

    Args:
        model: and `layout`, and `said`, as `split_as` takes them.

    Raises:
        ValueError: none is found.
    """
    if said != "auto":
        return read_plan(said)
    if layout.group_size == 1:
        return {}
    if is_tensorflow():
        return suggest(model, layout)
    # What layers cost is read on TensorFlow's graphs; which are large needs none.
    divisions = chosen_divisions(model, layout.tensor).how
    return {re.escape(name): split_plan.Division(how) for name, how in divisions.items()}


def read_plan(path: str | os.PathLike) -> split_plan.SplitPlan:
    """The plan that a file holds, for `kdist.parallel.split`.

    Raises:
        ValueError: it is no JSON object of texts, or says something that is no place.
        OSError: it cannot be read.
    """
    try:
        said = json.loads(pathlib.Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error})") from error
    if not isinstance(said, dict) or not said:
        raise ValueError(f'{path} holds no plan: write {{"layer.*": "stage(0)", …}}')
    return {pattern: _place(path, pattern, text) for pattern, text in said.items()}


def write_plan(plan: split_plan.SplitPlan, path: str | os.PathLike):
    """Writes a file that `read_plan` reads."""
    said = {pattern: _text(where) for pattern, where in plan.items()}
    pathlib.Path(path).write_text(json.dumps(said, indent=1) + "\n")


def _text(where):
    if isinstance(where, tuple):
        return list(where)
    if isinstance(where, split_plan.Division):
        return f"{where.how}({'' if where.stage is None else f'stage={where.stage}'})"
    return f"{type(where).__name__.lower()}({where.number})"


def _place(path, pattern, text):
    """What a text such as "stage(1)" says; no more than a name and numbers is looked at."""
    if isinstance(text, list):
        return tuple(text)
    try:
        call = ast.parse(text, mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError("it is no call of a function by its name")
        arguments = [ast.literal_eval(argument) for argument in call.args]
        options = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        return _SAYS[call.func.id](*arguments, **options)
    except (KeyError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: {pattern!r} goes to {text!r}; say one of {', '.join(_SAYS)}, such as "
            '"stage(1)"'
        ) from error
