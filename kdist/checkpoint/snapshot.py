"""Arrays of a model's training state: weights, optimizer slots, and metrics of all replicas.

arrays = capture(model)   # on all workers, at the same step
restore(model, arrays)    # into an equal model under any layout

Divided weights are merged into those of the plain model, one variable at a time on the host, so
that a checkpoint can be resumed under any layout. A variable that is equal on all replicas is one
array. State of single replicas (partial metrics; slots and weights between the averagings of local
SGD) has a leading axis R with one row per replica of the job.
"""

from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from kdist.checkpoint.files import CheckpointError
from kdist.compat.keras import recompute_constants
from kdist.compat.tensorflow import first_replica
from kdist.parallel.tensor.shards import plain_slots, plain_variables
from kdist.training.divided_variable import DividedVariable
from kdist.training.replica.accumulation import optimizers_of
from kdist.training.replica.reduction import sums_over_replicas
from kdist.training.scopes import is_multi_worker, num_local_replicas, this_replica
from kdist.training.sharding.optimizer_state import slots_of
from kdist.training.sharding.weights import as_divided


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
            array = division.concatenate([_copies(piece)[0].numpy() for piece in division.pieces])
            if is_kept:
                arrays[name] = array
    pieces = [piece for division in own.values() for piece in division.pieces]
    if is_multi_worker(model.distribute_strategy):
        values = iter(_per_replica(model.distribute_strategy, pieces))
    else:
        values = ([copy.numpy() for copy in _copies(piece)] for piece in pieces)
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
        for piece, part in zip(division.pieces, division.parts(arrays[name]), strict=True):
            for copy in _copies(piece):
                copy.assign(part)
    first = _first_replica(model.distribute_strategy)
    for name, division in own.items():
        rows = _for_replicas(arrays[name], replicas, is_sum=name.startswith("metrics/"))
        values = zip(*(division.parts(row) for row in rows[first:]), strict=True)
        for piece, parts in zip(division.pieces, values, strict=True):
            for copy, part in zip(_copies(piece), parts, strict=False):
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


def _copies(variable):
    """Returns the TensorFlow variables of this process's replicas of a Keras variable."""
    value = variable.value
    return value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)


def _per_replica(strategy, variables):
    """Returns one array (R, …) per variable, with a row per replica of the job."""
    replicas = strategy.num_replicas_in_sync

    def parts():
        replica = this_replica()
        here = replica % num_local_replicas(strategy)
        rows = []
        for variable in variables:
            value = tf.identity(_copies(variable)[here])
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
