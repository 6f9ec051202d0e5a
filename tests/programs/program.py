"""Registry of the programs in this folder, and the results that they return."""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable

import numpy as np

# Subjects, which are modules of this package; `hub` is another one if KerasHub is installed.
SUBJECTS = (
    "vision",
    "pairs",
    "generative",
    "text",
    "tabular",
    "sequences",
    "graphs",
    "reinforcement",
    "mechanics",
    "steps",
    "batches",
    "tuning",
)
# Of programs that combine the rows of a batch.
ACROSS_ROWS = {"accumulate": "a micro-step has only some rows of the batch"}
MASKED_MEAN = {"accumulate": "a masked mean divides by the number of words of a micro-batch"}
UPDATED_IN_TURN = {"accumulate": "all networks are updated in the last micro-step only"}
CALLBACKS_PER_CALL = {"groups": "callbacks of a batch run once per call, with its last batch"}
_PROGRAMS: dict[str, "Program"] = {}


@dataclasses.dataclass(frozen=True)
class Program:
    """One program: a function that trains a model, and what is known about it.

    Args:
        name: name of the function.
        main: builds the data and the model, trains, and returns `outcome(...)`.
        subject: module that defines it.
        slow: runs in the slow or the exhaustive tier.
        across: how the program computes across the examples of a batch; empty if it does not.
        differs: reasons why a mode computes something else, by mode; see `modes.py`.
        atol: largest difference from one device.
    """

    name: str
    main: Callable[[], dict]
    subject: str
    slow: bool = False
    across: str = ""
    differs: dict[str, str] = dataclasses.field(default_factory=dict)
    atol: float = 1e-4

    @property
    def title(self):
        """First line of the docstring of `main`, without its period."""
        return self.main.__doc__.strip().split("\n")[0].rstrip(".")


def program(function=None, **known):
    """Registers a function as a program. `known` holds fields of `Program`."""

    def register(main):
        subject = main.__module__.rsplit(".", 1)[-1]
        _PROGRAMS[main.__name__] = Program(main.__name__, main, subject, **known)
        return main

    return register(function) if function else register


def programs():
    """Returns all programs by name; imports their modules, and so TensorFlow."""
    for subject in SUBJECTS:
        importlib.import_module(f"tests.programs.{subject}")
    if importlib.util.find_spec("keras_hub"):
        importlib.import_module("tests.programs.hub")
    return dict(_PROGRAMS)


def outcome(history, *models, **arrays):
    """Returns what is compared: logs, weights, and arrays, as one flat dict of arrays.

    Args:
        history: what `fit` returned, or a dict or list of numbers.
        *models: models whose weights are compared.
        **arrays: predictions and other results; structures of arrays.
    """
    found = {}
    _flatten("log", getattr(history, "history", history), found)
    for number, model in enumerate(models):
        # Workers that divide weights gather them; the models of kdist alone have this attribute.
        state = getattr(model, "training_state", None)
        with contextlib.nullcontext() if state is None else state.whole():
            _flatten(f"weight of model {number}", list(model.get_weights()), found)
    for name, value in arrays.items():
        _flatten(name, value, found)
    return found


def _flatten(name, value, found):
    if isinstance(value, dict):
        for key in value:
            _flatten(f"{name} {key}", value[key], found)
    elif isinstance(value, list | tuple):
        if all(np.ndim(v) == 0 and not isinstance(v, dict) for v in value):
            found[name] = np.asarray([float(v) for v in value])
        else:
            for key, part in enumerate(value):
                _flatten(f"{name} {key}", part, found)
    else:
        found[name] = np.asarray(value)
