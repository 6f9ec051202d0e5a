"""What training depends on besides the model: callbacks that decide, and generators of numbers.

state, arrays = of_callbacks(callbacks)     # state is JSON
to_callbacks(callbacks, state, arrays)      # after their on_train_begin

Of Keras's callbacks those are known that remember something. A callback of one's own joins by two
methods: `get_state()` gives what JSON can hold, `set_state(state)` takes it, after
`on_train_begin`.
"""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

# Of each, the attributes that change in training.
_REMEMBERED = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "_batches_seen_since_last_saving",
    ),
    keras.callbacks.History: ("history", "epoch"),
}


def of_callbacks(callbacks: Iterable[keras.callbacks.Callback]):
    """(what they remember, for JSON; the arrays that belong to it, by name)."""
    states, arrays = {}, {}
    for name, callback in _named(callbacks):
        if hasattr(callback, "get_state"):
            states[name] = callback.get_state()
            continue
        states[name] = {}
        for attribute in _remembered(callback):
            value: Any = getattr(callback, attribute, None)
            if _are_arrays(value):
                arrays.update({f"{name}/{attribute}/{i}": np.array(v) for i, v in enumerate(value)})
                states[name][attribute] = {"arrays": len(value)}
            else:
                states[name][attribute] = _plain(value)
    return states, arrays


def to_callbacks(
    callbacks: Iterable[keras.callbacks.Callback],
    states: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
):
    """Gives callbacks what `of_callbacks` took; one that was not there before stays as it is."""
    for name, callback in _named(callbacks):
        state = states.get(name)
        if state is None:
            continue
        if hasattr(callback, "set_state"):
            callback.set_state(state)
            continue
        for attribute, value in state.items():
            if attribute in _remembered(callback):
                if isinstance(value, dict) and value.keys() == {"arrays"}:
                    value = [arrays[f"{name}/{attribute}/{i}"] for i in range(value["arrays"])]
                setattr(callback, attribute, value)


def of_generators() -> dict[str, Any]:
    """The state of Python's and NumPy's generators, for JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(key) for key in keys], position, has_gauss, cached],
    }


def to_generators(state: Mapping[str, Any]):
    """Lets Python's and NumPy's generators go on from there."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    keys = np.array(keys, np.uint32)
    np.random.set_state((kind, keys, position, has_gauss, cached))  # noqa: NPY002


def _named(callbacks):
    """(a name, callback) of those that remember something; the second of a class is told apart."""
    seen: dict[str, int] = {}
    for callback in callbacks:
        if not (hasattr(callback, "get_state") or _remembered(callback)):
            continue
        kind = type(callback).__name__
        number = seen[kind] = seen.get(kind, -1) + 1
        yield f"callback/{kind}/{number}", callback


def _remembered(callback):
    kinds = (kind for kind in _REMEMBERED if isinstance(callback, kind))
    return [attribute for kind in kinds for attribute in _REMEMBERED[kind]]


def _are_arrays(value):
    return isinstance(value, list) and bool(value) and all(isinstance(v, np.ndarray) for v in value)


def _plain(value):
    """The same of Python's own numbers."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, np.generic | np.ndarray) else value
