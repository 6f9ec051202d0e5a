"""What training has made of a model, as arrays: weights, optimizers, metrics, on each replica.

arrays = take(model)      # all workers at the same step
put(model, arrays)        # into a model that is built alike

A variable that is the same on all replicas is one array. Of what each replica has for itself (the
parts of metrics; slots and weights within a round of local SGD) an array has an axis R in front,
one row a replica of the job.
"""

from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from kdist.checkpoint.files import CheckpointError
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
    arrays = {name: np.array(_copies(variable)[0].numpy()) for name, variable in shared.items()}
    if are_several_workers(model.distribute_strategy):
        rows = _of_all_workers(model.distribute_strategy, list(own.values()))
    else:
        rows = [np.stack([copy.numpy() for copy in _copies(v)]) for v in own.values()]
    return {**arrays, **dict(zip(own, rows, strict=True))}


def put(model: keras.Model, arrays: Mapping[str, np.ndarray]):
    """Gives the model what `take` took, also of another number of replicas.

    Then metrics' parts are added up, and of what replicas kept for themselves all get the mean.

    Raises:
        CheckpointError: the arrays are those of another model or optimizer.
    """
    shared, own = _by_kind(model)
    replicas = model.distribute_strategy.num_replicas_in_sync
    _check(arrays, shared, own)
    for name, variable in shared.items():
        for copy in _copies(variable):
            copy.assign(arrays[name])
    first = _first_replica(model.distribute_strategy)
    for name, variable in own.items():
        rows = _for_replicas(arrays[name], replicas, is_sum=name.startswith("metrics/"))
        for copy, row in zip(_copies(variable), rows[first:], strict=False):
            copy.assign(row)
    recompute_constants(model)


def _by_kind(model):
    """(variables that are the same everywhere, those that each replica has for itself) by name."""
    metrics = {id(variable) for variable in model.metrics_variables}
    weights = [variable for variable in model.variables if id(variable) not in metrics]
    slots = [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    apart = model.local_steps is not None and model.distribute_strategy.num_replicas_in_sync > 1
    same = {**_named("weights", weights), **_named("optimizer", slots)}
    parts = _named("metrics", model.metrics_variables)
    return ({}, {**same, **parts}) if apart else (same, parts)


def _named(kind, variables):
    return {f"{kind}/{number}": variable for number, variable in enumerate(variables)}


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
    for name, variable in wanted.items():
        shape = arrays[name].shape[1:] if name in own else arrays[name].shape
        if tuple(variable.shape) != shape or variable.dtype != arrays[name].dtype.name:
            raise CheckpointError(
                f"the checkpoint is of another model: {variable.path} is {variable.dtype} "
                f"{tuple(variable.shape)}, in the checkpoint {arrays[name].dtype.name} {shape}. "
                "Build the model as it was, or begin anew (--resume=never, a new --run_dir)"
            )


def _for_replicas(rows, replicas, is_sum):
    """The rows of so many replicas."""
    if len(rows) == replicas:
        return rows
    if is_sum:
        return np.stack([rows.sum(0), *np.zeros((replicas - 1, *rows.shape[1:]), rows.dtype)])
    return np.stack([rows.mean(0).astype(rows.dtype)] * replicas)
