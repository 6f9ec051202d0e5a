"""Convolutions, by output channels or by input channels."""

import keras

from kdist.parallel.tensor.elementwise import is_elementwise
from kdist.parallel.tensor.shards import Division, ShardedLayer, call_part, stands_for, sum_of


def _sharded(convolution):
    """The divided layer of a class of convolutions."""

    class ShardedConvolution(_ShardedConvolution, convolution):
        pass

    return stands_for(convolution)(ShardedConvolution)


class _ShardedConvolution(ShardedLayer):
    """A convolution of whose kernel (…, inputs, filters) each device has equally many filters.

    Or, by row, equally many input channels of each filter; then the bias is added, and the
    activation applied, once, to the sum.
    """

    def build(self, input_shape):
        count = len(self.shards)
        shape = list(input_shape)
        if self.is_by_row:
            changes = {"use_bias": False, "activation": None}
            shape[self.channel_axis] //= count
        else:
            changes = {"filters": self.filters // count}
            if not is_elementwise(self.activation):
                changes["activation"] = None
        self.make_parts(self.plain, changes, tuple(shape))
        self.bias = None
        if self.is_by_row and self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.filters,),
                initializer="zeros",
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )

    @property
    def channel_axis(self):
        return -1 if self.data_format == "channels_last" else 1

    def divisions(self):
        parts = self.shards.parts
        divisions = [Division([part._kernel for part in parts], -2 if self.is_by_row else -1)]
        if self.use_bias and self.is_by_row:
            divisions.append(Division([self.bias]))
        elif self.use_bias:
            divisions.append(Division([part.bias for part in parts], 0))
        return divisions

    def call(self, inputs):
        if not self.is_by_row:
            parts = self.shards.each(call_part, self.copied(inputs))
            outputs = self.joined(parts, self.channel_axis)
            return outputs if is_elementwise(self.activation) else self.activation(outputs)
        parts = self.shards.each(call_part, self.divided(inputs, self.channel_axis))
        total = sum_of(parts)
        if self.bias is not None:
            shape = [1] * (self.rank + 2)
            shape[self.channel_axis] = self.filters
            total = keras.ops.add(total, keras.ops.reshape(self.bias, shape))
        return total if self.activation is None else self.activation(total)


SHARDED_CONVOLUTIONS = tuple(
    _sharded(convolution)
    for convolution in (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
)
