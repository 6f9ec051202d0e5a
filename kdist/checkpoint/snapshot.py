"""What training has made of a model, as arrays: weights, optimizers, metrics, on each replica.

arrays = take(model)      # all workers at the same step
put(model, arrays)        # into a model that is built alike, however it is divided over devices

Of a model whose weights are divided they are those of the plain model, so that a checkpoint can be
gone on from under any layout. What is divided is joined here, on the host, one variable at a time.
A variable that is the same on all replicas is one array. Of what each replica has for itself (the
parts of metrics; slots and weights within a round of local SGD) an array has an axis R in front,
one row a replica of the job.
"""

from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from kdist.checkpoint.files import CheckpointError
from kdist.parallel.tensor import DividedVariable, plain_slots, plain_variables
from kdist.tensorflow_internals import first_replica
from kdist.training.accumulation import optimizers_of
from kdist.training.keras_internals import recompute_constants
from kdist.training.reduction import sums_over_replicas
from kdist.training.step import this_replica
from kdist.training.together import are_several_workers, replicas_here


def take(model: keras.Model) -> dict[str, np.ndarray]:
    """The arrays by names such as "weights/12"; copies, which training does not change.

    With several workers it is collective.
    """
    shared, own = _by_kind(model)
    arrays = {
        name: division.joined([_copies(piece)[0].numpy() for piece in division.pieces])
        for name, division in shared.items()
    }
    pieces = [piece for division in own.values() for piece in division.pieces]
    if are_several_workers(model.distribute_strategy):
        of_pieces = iter(_of_all_workers(model.distribute_strategy, pieces))
    else:
        of_pieces = ([copy.numpy() for copy in _copies(piece)] for piece in pieces)
    for name, division in own.items():
        rows = zip(*(next(of_pieces) for _ in division.pieces), strict=True)
        arrays[name] = np.stack([division.joined(row) for row in rows])
    return arrays


def put(model: keras.Model, arrays: Mapping[str, np.ndarray]):
    """Gives the model what `take` took, also of another number of replicas.

    Then metrics' parts are added up, and of what replicas kept for themselves all get the mean.

    Raises:
        CheckpointError: the arrays are those of another model or optimizer.
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
        of_pieces = zip(*(division.parts(row) for row in rows[first:]), strict=True)
        for piece, parts in zip(division.pieces, of_pieces, strict=True):
            for copy, part in zip(_copies(piece), parts, strict=False):
                copy.assign(part)
    recompute_constants(model)


def _by_kind(model):
    """(variables that are the same everywhere, those that each replica has for itself) by name.

    They are the plain model's, as `DividedVariable`s: of one piece each, where nothing is divided.
    """
    metrics = {id(variable) for variable in model.metrics_variables}
    if model.is_split and model.divisions:
        weights = plain_variables(model)
        slots = [slot for each in optimizers_of(model) for slot in plain_slots(model, each)]
    else:
        weights = _whole(model.variables)
        slots = _whole(slot for each in optimizers_of(model) for slot in each.variables)
    weights = [division for division in weights if id(division.pieces[0]) not in metrics]
    apart = model.local_steps is not None and model.distribute_strategy.num_replicas_in_sync > 1
    same = {**_named("weights", weights), **_named("optimizer", slots)}
    parts = _named("metrics", _whole(model.metrics_variables))
    return ({}, {**same, **parts}) if apart else (same, parts)


def _whole(variables):
    return [DividedVariable([variable]) for variable in variables]


def _named(kind, divisions):
    return {f"{kind}/{number}": division for number, division in enumerate(divisions)}


def _copies(variable):
    """The TensorFlow variables of this process's replicas behind a Keras one."""
    value = variable.value
    return value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)


def _of_all_workers(strategy, variables):
    """For each variable an array (R, …): each replica's part."""
    replicas = strategy.num_replicas_in_sync

    def parts():
        replica = this_replica()
        here = replica % replicas_here(strategy)
        rows = []
        for variable in variables:
            value = tf.identity(_copies(variable)[here])
            zeros = tf.zeros_like(value)
            rows.append(tf.stack([value if r == replica else zeros for r in range(replicas)]))
        return rows

    return sums_over_replicas(strategy, parts)


def _first_replica(strategy):
    return first_replica(strategy) if are_several_workers(strategy) else 0


def _check(arrays, shared, own):
    """Raises a CheckpointError unless each variable has an array of its shape and type."""
    wanted = {**shared, **own}
    if missing := set(wanted) ^ set(arrays):
        raise CheckpointError(
            f"the checkpoint is of another model, optimizer or metrics: {len(arrays)} variables "
            f"are in it, and the model has {len(wanted)} ({min(missing)} is in one of them only). "
            "Build and compile the model as it was, or begin anew (--resume=never, a new --run_dir)"
        )
    for name, division in wanted.items():
        shape = arrays[name].shape[1:] if name in own else arrays[name].shape
        dtype = division.pieces[0].dtype
        if division.shape != shape or dtype != arrays[name].dtype.name:
            raise CheckpointError(
                f"the checkpoint is of another model or optimizer: {division.path} is {dtype} "
                f"{division.shape}, in the checkpoint {arrays[name].dtype.name} {shape}. "
                "Build the model as it was, or begin anew (--resume=never, a new --run_dir)"
            )


def _for_replicas(rows, replicas, is_sum):
    """The rows of so many replicas."""
    if len(rows) == replicas:
        return rows
    if is_sum:
        return np.stack([rows.sum(0), *np.zeros((replicas - 1, *rows.shape[1:]), rows.dtype)])
    return np.stack([rows.mean(0).astype(rows.dtype)] * replicas)
