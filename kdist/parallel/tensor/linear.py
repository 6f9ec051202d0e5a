"""`Dense` and convolutions, by output features or by input features."""

import keras

from kdist.parallel.tensor.elementwise import is_elementwise
from kdist.parallel.tensor.shards import (
    DividedVariable,
    ShardedLayer,
    call_part,
    stands_for,
    sum_of,
)


class _ShardedLinear(ShardedLayer):
    """A layer with a kernel (…, inputs, outputs), of which each device has a part.

    By column each has equally many outputs, with their part of the bias (outputs,), and applies the
    activation to them, unless that looks at all of them. By row each has equally many inputs; the
    bias is added, and the activation applied, once, to the sum.

    Attributes:
        outputs: what the layer's configuration calls its number of output features.
    """

    outputs: str

    @property
    def feature_axis(self) -> int:
        """The axis of the features, in inputs and outputs."""
        is_first = getattr(self, "data_format", None) == "channels_first"
        return 1 if is_first else -1

    def build(self, input_shape):
        count, shape = len(self.shards), list(input_shape)
        if self.is_by_row:
            changes = {"use_bias": False, "activation": None}
            shape[self.feature_axis] //= count
        else:
            changes = {self.outputs: getattr(self, self.outputs) // count}
            if not is_elementwise(self.activation):
                changes["activation"] = None
        self.make_parts(self.plain, changes, tuple(shape))
        self.bias = None
        if self.is_by_row and self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(getattr(self, self.outputs),),
                initializer="zeros",
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )

    def divisions(self):
        parts = self.shards.parts
        divisions = [
            DividedVariable([part._kernel for part in parts], -2 if self.is_by_row else -1)
        ]
        if self.use_bias and self.is_by_row:
            divisions.append(DividedVariable([self.bias]))
        elif self.use_bias:
            divisions.append(DividedVariable([part.bias for part in parts], 0))
        return divisions

    def call(self, inputs, training=None):
        axis = self.feature_axis
        if not self.is_by_row:
            outputs = self.joined(self.shards.each(call_part, self.copied(inputs)), axis)
            return outputs if is_elementwise(self.activation) else self.activation(outputs)
        total = sum_of(self.shards.each(call_part, self.divided(inputs, axis)))
        if self.bias is not None:
            shape = [1] * len(total.shape)
            shape[axis] = -1
            total = keras.ops.add(total, keras.ops.reshape(self.bias, shape))
        return self.activation(total)


def _sharded(linear, outputs):
    """The divided layer of a class of layers."""

    class Sharded(_ShardedLinear, linear):
        pass

    Sharded.outputs = outputs
    return stands_for(linear)(Sharded)


SHARDED_LINEARS = (
    _sharded(keras.layers.Dense, "units"),
    *(
        _sharded(convolution, "filters")
        for convolution in (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
    ),
)
