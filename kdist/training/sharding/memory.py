"""Bytes that training state takes on each device, read from the variables themselves."""

import math
from typing import NamedTuple

import keras
import tensorflow as tf

from kdist.training.divided_variable import local_copies
from kdist.training.replica.accumulation import optimizers_of
from kdist.training.sharding.optimizer_state import shards_of
from kdist.training.sharding.sizes import gathered_bytes
from kdist.training.sharding.weights import sharded_weights, stored


class StateBytes(NamedTuple):
    """Bytes on one device.

    Attributes:
        weights: weights and other state of layers, without metrics.
        optimizer: slots and other variables of optimizers, and the shards of weights that the
            devices also hold as a whole.
        gathered: weights that a step gathers and holds at a time: the two largest, and all biases
            and scales.
    """

    weights: int
    optimizer: int
    gathered: int


def state_bytes(model: keras.Model) -> dict[str, StateBytes]:
    """Returns the bytes of a model's training state on each device of this process.

    The model is compiled, and its optimizer is built.
    """
    metrics = {id(variable) for variable in model.metrics_variables}
    weights = [variable for variable in model.variables if id(variable) not in metrics]
    slots = []
    for optimizer in optimizers_of(model):
        slots += optimizer.variables
        shards = shards_of(optimizer) or ()
        updated = [shard for shard in shards if shard.variable is not stored(shard.weight)]
        slots += [shard.variable for shard in updated]
    on_weights, on_slots = _bytes_by_device(map(stored, weights)), _bytes_by_device(slots)
    gathered = gathered_bytes(
        (weight.shape, tf.as_dtype(weight.dtype).size) for weight in sharded_weights(model)
    )
    return {
        device: StateBytes(on_weights.get(device, 0), on_slots.get(device, 0), gathered)
        for device in sorted({*on_weights, *on_slots})
    }


def whole_bytes(variable: keras.Variable) -> int:
    """Returns the bytes of a variable that is not divided."""
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _bytes_by_device(variables):
    found: dict[str, int] = {}
    for variable in variables:
        for copy in local_copies(variable):
            device = copy.device.rpartition("device:")[2]
            found[device] = found.get(device, 0) + copy.shape.num_elements() * copy.dtype.size
    return found
