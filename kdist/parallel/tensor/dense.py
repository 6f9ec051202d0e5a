"""`Dense`, by output features or by input features."""

import keras

from kdist.parallel.tensor.elementwise import is_elementwise
from kdist.parallel.tensor.shards import Division, ShardedLayer, call_part, stands_for, sum_of


@stands_for(keras.layers.Dense)
class ShardedDense(ShardedLayer, keras.layers.Dense):
    """A `Dense` of whose kernel (inputs, units) each device has equally many columns or rows.

    By column the bias (units,) is divided as well, and each part applies the activation to its
    units, unless that looks at all of them. By row the bias is added, and the activation applied,
    once, to the sum.
    """

    def build(self, input_shape):
        count = len(self.shards)
        if self.is_by_row:
            changes = {"use_bias": False, "activation": None}
            shape = (*input_shape[:-1], input_shape[-1] // count)
        else:
            changes = {"units": self.units // count}
            if not is_elementwise(self.activation):
                changes["activation"] = None
            shape = input_shape
        self.make_parts(keras.layers.Dense, changes, shape)
        self.bias = None
        if self.is_by_row and self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer="zeros",
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )

    def divisions(self):
        parts = self.shards.parts
        divisions = [Division([part._kernel for part in parts], 0 if self.is_by_row else 1)]
        if self.use_bias and self.is_by_row:
            divisions.append(Division([self.bias]))
        elif self.use_bias:
            divisions.append(Division([part.bias for part in parts], 0))
        return divisions

    def call(self, inputs, training=None):
        if not self.is_by_row:
            outputs = self.joined(self.shards.each(call_part, self.copied(inputs)))
            return outputs if is_elementwise(self.activation) else self.activation(outputs)
        total = sum_of(self.shards.each(call_part, self.divided(inputs)))
        if self.bias is not None:
            total = keras.ops.add(total, self.bias)
        return self.activation(total)
