"""Training state outside of the model: callbacks and random number generators.

Keras's stateful callbacks are supported. A custom callback takes part by the methods `get_state()`,
which returns JSON-serializable state, and `set_state(state)`, called after `on_train_begin`.
"""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from kdist.checkpoint.files import CheckpointError

# Callback class -> attributes that change during training.
_STATE_ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "_batches_seen_since_last_saving",
    ),
    keras.callbacks.History: ("history", "epoch"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
}


def callback_state(
    callbacks: Iterable[keras.callbacks.Callback],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns (JSON-serializable state, {name: array}) of all stateful callbacks."""
    states, arrays = {}, {}
    for name, callback in _named(callbacks):
        if hasattr(callback, "get_state"):
            states[name] = callback.get_state()
            continue
        states[name] = {}
        for attribute in _state_attributes(callback):
            value: Any = getattr(callback, attribute, None)
            if _are_arrays(value):
                arrays.update({f"{name}/{attribute}/{i}": np.array(v) for i, v in enumerate(value)})
                states[name][attribute] = {"arrays": len(value)}
            else:
                states[name][attribute] = _plain(value)
    return states, arrays


def restore_callbacks(
    callbacks: Iterable[keras.callbacks.Callback],
    states: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
):
    """Restores the result of `callback_state`; callbacks without saved state are unchanged.

    Raises:
        CheckpointError: an array is missing.
    """
    for name, callback in _named(callbacks):
        state = states.get(name)
        if state is None:
            continue
        if hasattr(callback, "set_state"):
            callback.set_state(state)
            continue
        for attribute, value in state.items():
            if attribute in _state_attributes(callback):
                if isinstance(value, dict) and value.keys() == {"arrays"}:
                    value = _arrays(arrays, f"{name}/{attribute}", value["arrays"])
                setattr(callback, attribute, value)


def _arrays(arrays, prefix, count):
    names = [f"{prefix}/{i}" for i in range(count)]
    if missing := [name for name in names if name not in arrays]:
        raise CheckpointError(
            f"the checkpoint lacks {missing[0]}, so kdist did not write it as it is; resume from "
            "another one, or start a new run (--resume=never)"
        )
    return [arrays[name] for name in names]


def rng_state() -> dict[str, Any]:
    """Returns the JSON-serializable state of Python's and NumPy's global generators."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(key) for key in keys], position, has_gauss, cached],
    }


def restore_rng(state: Mapping[str, Any]):
    """Restores the result of `rng_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    keys = np.array(keys, np.uint32)
    np.random.set_state((kind, keys, position, has_gauss, cached))  # noqa: NPY002


def _named(callbacks):
    """Yields (unique name, callback) of all stateful callbacks."""
    seen: dict[str, int] = {}
    for callback in callbacks:
        if not (hasattr(callback, "get_state") or _state_attributes(callback)):
            continue
        kind = type(callback).__name__
        number = seen[kind] = seen.get(kind, -1) + 1
        yield f"callback/{kind}/{number}", callback


def _state_attributes(callback):
    kinds = (kind for kind in _STATE_ATTRIBUTES if isinstance(callback, kind))
    return [attribute for kind in kinds for attribute in _STATE_ATTRIBUTES[kind]]


def _are_arrays(value):
    return isinstance(value, list) and bool(value) and all(isinstance(v, np.ndarray) for v in value)


def _plain(value):
    """Returns the value with NumPy numbers converted to Python numbers."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, np.generic | np.ndarray) else value
