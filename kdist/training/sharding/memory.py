"""Bytes that training state takes on each device, read from the variables themselves."""

from typing import NamedTuple

import keras
import tensorflow as tf

from kdist.training.replica.accumulation import optimizers_of
from kdist.training.sharding.optimizer_state import shards_of


class StateBytes(NamedTuple):
    """Bytes on one device.

    Attributes:
        weights: weights and other state of layers, without metrics.
        optimizer: slots and other variables of optimizers, and the shards of weights.
    """

    weights: int
    optimizer: int


def state_bytes(model: keras.Model) -> dict[str, StateBytes]:
    """Returns the bytes of a model's training state on each device of this process.

    The model is compiled, and its optimizer is built.
    """
    metrics = {id(variable) for variable in model.metrics_variables}
    weights = [variable for variable in model.variables if id(variable) not in metrics]
    slots = []
    for optimizer in optimizers_of(model):
        slots += optimizer.variables
        slots += [shard.variable for shard in shards_of(optimizer) or ()]
    on_weights, on_slots = _bytes_by_device(weights), _bytes_by_device(slots)
    return {
        device: StateBytes(on_weights.get(device, 0), on_slots.get(device, 0))
        for device in sorted({*on_weights, *on_slots})
    }


def _bytes_by_device(variables):
    found: dict[str, int] = {}
    for variable in variables:
        value = variable.value
        copies = value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)
        for copy in copies:
            device = copy.device.rpartition("device:")[2]
            found[device] = found.get(device, 0) + copy.shape.num_elements() * copy.dtype.size
    return found
