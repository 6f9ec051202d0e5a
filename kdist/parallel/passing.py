"""What goes through the stages of a pipeline: copies, gradients that are added, what is kept."""

import dataclasses

import tensorflow as tf

from kdist.training.keras_internals import get_keras_mask, set_keras_mask


@dataclasses.dataclass
class Passed:
    """A forward pass of a micro-batch through a stage.

    Attributes:
        taken: what the stage has taken, on its devices.
        gives: what it gives to later ones -> (tensor, number of the device that it is on).
        outputs: of the last stage, the model's.
        loss: of the last stage.
        state: what was written: (variable, its value before).
    """

    taken: dict
    gives: dict = dataclasses.field(default_factory=dict)
    outputs: list = dataclasses.field(default_factory=list)
    loss: tf.Tensor | None = None
    state: list = dataclasses.field(default_factory=list)

    @property
    def ends(self) -> list:
        """What is there when it is done."""
        return [self.loss, *(tensor for tensor, _ in self.gives.values())]


def copied(tensor):
    """A copy on the device of the context, with its mask; of None, None."""
    if tensor is None:
        return None
    copy = tf.nest.map_structure(tf.identity, tensor, expand_composites=True)
    mask = get_keras_mask(tensor) if isinstance(tensor, tf.Tensor) else None
    if mask is not None:
        set_keras_mask(copy, tf.identity(mask))
    return copy


def sum_of(total, gradient):
    """Of two gradients; of two that are for some rows of a table, again one for some rows."""
    if isinstance(total, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([total.values, gradient.values], 0),
            tf.concat([total.indices, gradient.indices], 0),
            total.dense_shape,
        )
    return tf.convert_to_tensor(total) + tf.convert_to_tensor(gradient)
