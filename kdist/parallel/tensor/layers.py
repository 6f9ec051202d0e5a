"""`Dense`, convolutions and `Embedding`, divided by output features or by input features."""

import keras
import tensorflow as tf

from kdist.parallel.tensor.activations import is_elementwise
from kdist.parallel.tensor.attention import ShardedMultiHeadAttention
from kdist.parallel.tensor.divisibility import CONVOLUTIONS
from kdist.parallel.tensor.shards import DividedVariable, ShardedLayer, Shards, saved_as


def shard_layer(layer, how: str, strategy, first: int, stays_divided: bool) -> ShardedLayer:
    """Returns a built, divided copy of a layer that passes `check_division`. Its weights are zero.

    `first` is the number, within a group of the `GroupStrategy`, of the device of the first part.
    The output is a tuple with one part per device if it `stays_divided`.
    """
    copy = _SHARDED_CLASSES[type(layer)].from_config(layer.get_config())
    copy.shards = Shards(strategy, first, how, stays_divided)
    copy.build_from_config(layer.get_build_config())
    copy.trainable = layer.trainable
    return copy


class _ShardedLinear(ShardedLayer):
    """A layer whose kernel (…, inputs, outputs) is divided over the devices.

    By column, each device has an equal number of outputs with their part of the bias (outputs,). It
    applies the activation to them, unless the activation depends on all outputs. By row, each
    device has an equal number of inputs. Bias and activation are applied once, to the sum.
    """

    outputs: str  # name of the layer's argument for the number of output features

    @property
    def feature_axis(self) -> int:
        """Axis of the features in inputs and outputs."""
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

    def weight_divisions(self):
        parts = self.shards.parts
        axis = -2 if self.is_by_row else -1
        divisions = [DividedVariable([part._kernel for part in parts], axis)]
        if self.use_bias and self.is_by_row:
            divisions.append(DividedVariable([self.bias]))
        elif self.use_bias:
            divisions.append(DividedVariable([part.bias for part in parts], 0))
        return divisions

    def call(self, inputs, training=None):
        axis = self.feature_axis
        if not self.is_by_row:
            outputs = self.shards.map(_call_part, self.replicate(inputs))
            outputs = self.concat_features(outputs, axis)
            return outputs if is_elementwise(self.activation) else self.activation(outputs)
        total = tf.add_n(list(self.shards.map(_call_part, self.split_features(inputs, axis))))
        if self.bias is not None:
            shape = [1] * len(total.shape)
            shape[axis] = -1
            total = keras.ops.add(total, keras.ops.reshape(self.bias, shape))
        return self.activation(total)


@saved_as(keras.layers.Embedding)
class ShardedEmbedding(ShardedLayer, keras.layers.Embedding):
    """An `Embedding` whose table (vocabulary, features) is divided by column or by row.

    By row, each device looks up its own tokens and returns zeros for all others, so that the sum
    over devices is the looked-up row. A token outside of the vocabulary yields zeros.
    """

    def build(self, input_shape=None):
        name = "input_dim" if self.is_by_row else "output_dim"
        # The whole layer computes the mask.
        changes = {name: getattr(self, name) // len(self.shards), "mask_zero": False}
        self.make_parts(keras.layers.Embedding, changes, input_shape)

    def weight_divisions(self):
        tables = [part._embeddings for part in self.shards.parts]
        return [DividedVariable(tables, 0 if self.is_by_row else 1)]

    def call(self, inputs):
        if inputs.dtype not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        if not self.is_by_row:
            return self.concat_features(self.shards.map(_call_part, self.replicate(inputs)))
        firsts = [part.input_dim * number for number, part in enumerate(self.shards.parts)]
        return tf.add_n(list(self.shards.map(_look_up, self.replicate(inputs), firsts)))


def _call_part(part, inputs):
    return part(inputs)


def _look_up(part, tokens, first):
    """Returns the rows of a part whose first token is `first`; zeros for other tokens."""
    own = tokens - first
    is_here = keras.ops.logical_and(own >= 0, own < part.input_dim)
    rows = part(keras.ops.where(is_here, own, 0))
    return keras.ops.where(keras.ops.expand_dims(is_here, -1), rows, 0)


def _sharded_class(linear, outputs):
    """Returns the divided variant of a class of layers."""

    class Sharded(_ShardedLinear, linear):
        pass

    Sharded.outputs = outputs
    return saved_as(linear)(Sharded)


_SHARDED_CLASSES = {
    kind.plain: kind
    for kind in (
        _sharded_class(keras.layers.Dense, "units"),
        *(_sharded_class(convolution, "filters") for convolution in CONVOLUTIONS),
        ShardedEmbedding,
        ShardedMultiHeadAttention,
    )
}
