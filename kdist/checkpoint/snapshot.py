"""State of a training: arrays of the model and optimizer, callbacks, and random numbers.

arrays = capture(model)   # on all workers, at the same step
restore(model, arrays)    # into an equal model under any layout

Divided weights are merged into those of the plain model, one variable at a time on the host, so
that a checkpoint can be resumed under any layout. A variable that is equal on all replicas is one
array. State of single replicas (partial metrics; slots and weights between the averagings of local
SGD) has a leading axis R with one row per replica of the job.

Keras's stateful callbacks are supported. A custom callback takes part by the methods `get_state()`,
which returns JSON-serializable state, and `set_state(state)`, called after `on_train_begin`.
"""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.checkpoint.files import CheckpointError
from kdist.compat.keras import recompute_constants
from kdist.compat.tensorflow import first_replica
from kdist.parallel.tensor.shards import plain_slots, plain_variables
from kdist.training.divided_variable import DividedVariable, local_copies
from kdist.training.replica.accumulation import optimizers_of
from kdist.training.replica.reduction import sums_over_replicas
from kdist.training.scopes import is_multi_worker, num_local_replicas, this_replica
from kdist.training.sharding.optimizer_state import slots_of
from kdist.training.sharding.weights import as_divided

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


def capture(model: keras.Model, is_kept: bool = True) -> dict[str, np.ndarray]:
    """Returns copies of all arrays, with names such as "weights/12"; a collective call.

    Args:
        model: the model.
        is_kept: whether this worker needs the arrays. If not, it only sends its parts, and returns
            none of the arrays that are equal on all replicas. Defaults to True.
    """
    shared, own = _by_kind(model)
    arrays = {}
    for name, division in shared.items():
        if is_kept or division.is_divided_over_workers:
            array = division.local_value()
            if is_kept:
                arrays[name] = array
    pieces = [piece for division in own.values() for piece in division.pieces]
    if is_multi_worker(model.distribute_strategy):
        values = iter(_per_replica(model.distribute_strategy, pieces))
    else:
        values = ([copy.numpy() for copy in local_copies(piece)] for piece in pieces)
    for name, division in own.items():
        rows = zip(*(next(values) for _ in division.pieces), strict=True)
        arrays[name] = np.stack([division.concatenate(row) for row in rows])
    return arrays


def restore(model: keras.Model, arrays: Mapping[str, np.ndarray]):
    """Assigns the arrays of `capture` to the model's variables.

    If the number of replicas differs, partial metrics are summed, and all replicas get the mean of
    other per-replica state.

    Raises:
        CheckpointError: the arrays belong to another model or optimizer.
    """
    shared, own = _by_kind(model)
    replicas = model.distribute_strategy.num_replicas_in_sync
    _check(arrays, shared, own)
    for name, division in shared.items():
        division.assign_local(arrays[name])
    first = _first_replica(model.distribute_strategy)
    for name, division in own.items():
        rows = _for_replicas(arrays[name], replicas, is_sum=name.startswith("metrics/"))
        values = zip(*(division.parts(row) for row in rows[first:]), strict=True)
        for piece, parts in zip(division.pieces, values, strict=True):
            for copy, part in zip(local_copies(piece), parts, strict=False):
                copy.assign(part)
    recompute_constants(model)


def _by_kind(model):
    """Returns ({name: variable shared by replicas}, {name: per-replica variable}).

    They are `DividedVariable`s of the plain model, with one piece each if nothing is divided.
    """
    metrics = {id(variable) for variable in model.metrics_variables}
    if getattr(model, "divisions", None):
        weights = plain_variables(model)
        slots = [slot for each in optimizers_of(model) for slot in plain_slots(model, each)]
    else:
        weights = [as_divided(variable) for variable in model.variables]
        slots = [slot for each in optimizers_of(model) for slot in slots_of(each)]
    weights = [division for division in weights if id(division.pieces[0]) not in metrics]
    replicas = model.distribute_strategy.num_replicas_in_sync
    is_local = model.training_state.local_steps is not None and replicas > 1
    same = {**_named("weights", weights), **_named("optimizer", slots)}
    parts = _named("metrics", _whole(model.metrics_variables))
    return ({}, {**same, **parts}) if is_local else (same, parts)


def _whole(variables):
    return [DividedVariable([variable]) for variable in variables]


def _named(kind, divisions):
    return {f"{kind}/{number}": division for number, division in enumerate(divisions)}


def _per_replica(strategy, variables):
    """Returns one array (R, …) per variable, with a row per replica of the job."""
    replicas = strategy.num_replicas_in_sync

    def parts():
        replica = this_replica()
        here = replica % num_local_replicas(strategy)
        rows = []
        for variable in variables:
            value = tf.identity(local_copies(variable)[here])
            zeros = tf.zeros_like(value)
            rows.append(tf.stack([value if r == replica else zeros for r in range(replicas)]))
        return rows

    return sums_over_replicas(strategy, parts)


def _first_replica(strategy):
    return first_replica(strategy) if is_multi_worker(strategy) else 0


def _check(arrays, shared, own):
    """Raises a CheckpointError unless each variable has an array of its shape and dtype."""
    wanted = {**shared, **own}
    if missing := set(wanted) ^ set(arrays):
        raise CheckpointError(
            f"the checkpoint is of another model, optimizer, or metrics: it has {len(arrays)} "
            f"variables and the model has {len(wanted)} (only one of them has {min(missing)}). "
            "Build and compile the same model, or start a new run (--resume=never, a new --run_dir)"
        )
    for name, division in wanted.items():
        shape = arrays[name].shape[1:] if name in own else arrays[name].shape
        dtype = division.pieces[0].dtype
        if division.shape != shape or dtype != arrays[name].dtype.name:
            raise CheckpointError(
                f"the checkpoint is of another model or optimizer: {division.path} is {dtype} "
                f"{division.shape}, but {arrays[name].dtype.name} {shape} in the checkpoint. "
                "Build the same model, or start a new run (--resume=never, a new --run_dir)"
            )


def _for_replicas(rows, replicas, is_sum):
    """Returns the rows for `replicas` replicas."""
    if len(rows) == replicas:
        return rows
    if is_sum:
        return np.stack([rows.sum(0), *np.zeros((replicas - 1, *rows.shape[1:]), rows.dtype)])
    return np.stack([rows.mean(0).astype(rows.dtype)] * replicas)


def callback_state(
    callbacks: Iterable[keras.callbacks.Callback],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns (JSON-serializable state, {name: array}) of all stateful callbacks."""
    states, arrays = {}, {}
    for name, callback in _by_class(callbacks):
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
    for name, callback in _by_class(callbacks):
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


def _by_class(callbacks):
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
