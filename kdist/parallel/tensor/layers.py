"""`Dense`, convolutions, `Embedding`, and `MultiHeadAttention`, divided over devices.

The first three are divided by output features or by input features, attention by heads."""

import keras
import tensorflow as tf

from kdist.compat.keras import get_keras_mask, set_keras_mask
from kdist.parallel.tensor.activations import is_elementwise
from kdist.parallel.tensor.divisibility import CONVOLUTIONS
from kdist.parallel.tensor.shards import SeedStates, ShardedLayer, Shards, saved_as
from kdist.training.divided_variable import DividedVariable


@saved_as(keras.layers.MultiHeadAttention)
class ShardedMultiHeadAttention(ShardedLayer, keras.layers.MultiHeadAttention):
    """A `MultiHeadAttention` whose heads are divided equally over the devices.

    The query, key and value projections are divided by column, the output projection by row. Each
    device computes its heads from end to end. The devices communicate once, for the sum, and the
    output's bias is added once.
    """

    def build(self, query_shape, value_shape, key_shape=None):
        own_heads = {"num_heads": self.num_heads // len(self.shards)}
        self.make_parts(_Heads, own_heads, query_shape, value_shape, key_shape)
        first = self.shards.parts[0]
        self._attention_axes = first._attention_axes
        self._output_bias = None
        if self.use_bias:
            self._output_bias = self.add_weight(
                name="bias",
                shape=tuple(self._output_shape or (query_shape[-1],)),
                initializer="zeros",
                regularizer=self._bias_regularizer,
                constraint=self._bias_constraint,
            )
        # The names and the order are those of the plain layer in files and in get_weights.
        self._query_dense = _Projection(self._projection_divisions("_query_dense"))
        self._key_dense = _Projection(self._projection_divisions("_key_dense"))
        if self._use_gate:
            self._gate_dense = _Projection(self._projection_divisions("_gate_dense"))
        self._value_dense = _Projection(self._projection_divisions("_value_dense"))
        self._softmax, self._dropout_layer = first._softmax, first._dropout_layer
        self._output_dense = _Projection(self._output_divisions())
        for states in self._seed_states():  # different parts drop different elements
            states.assign(states.whole())

    def _projection_divisions(self, name):
        parts = [getattr(part, name) for part in self.shards.parts]
        divisions = [DividedVariable([part._kernel for part in parts], 1)]
        if self.use_bias:
            divisions.append(DividedVariable([part.bias for part in parts], 0))
        return divisions

    def _output_divisions(self):
        kernels = [part._output_dense._kernel for part in self.shards.parts]
        bias = [] if self._output_bias is None else [DividedVariable([self._output_bias])]
        return [DividedVariable(kernels, 0), *bias]

    def _seed_states(self):
        layers = [part._dropout_layer for part in self.shards.parts]
        states = [layer.seed_generator.state for layer in layers if layer.rate > 0]
        return [SeedStates(states)] if states else []

    def weight_divisions(self):
        return [*self._input_divisions(), *self._output_dense.hidden.divisions]

    def variable_divisions(self):
        output = self._output_dense.hidden.divisions
        return [*self._input_divisions(), *self._seed_states(), *output]

    def _input_divisions(self):
        gate = [self._gate_dense] if self._use_gate else []
        projections = [self._query_dense, self._key_dense, *gate, self._value_dense]
        return [division for projection in projections for division in projection.hidden.divisions]

    def save_own_variables(self, store):
        """Saves nothing: as in the plain layer, the projections own the variables."""

    def load_own_variables(self, store):
        """Loads nothing: as in the plain layer, the projections own the variables."""

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
    ):
        key = value if key is None else key
        query_mask = get_keras_mask(query)  # like the plain layer, for the attention and the output
        for tensor in (query, value, key):
            set_keras_mask(tensor, None)
        masks = {"query_mask": query_mask, "value_mask": value_mask, "key_mask": key_mask}
        if any(mask is not None for mask in masks.values()):
            attention_mask = self._compute_attention_mask(
                query, value, attention_mask=attention_mask, **masks
            )

        def attend(part):
            masking = {"attention_mask": attention_mask, "use_causal_mask": use_causal_mask}
            options = {"return_attention_scores": return_attention_scores, "training": training}
            return part(query, value, key, **masking, **options)

        outputs = self.shards.map(attend)
        partial_sums = [output for output, _ in outputs] if return_attention_scores else outputs
        total = self._sum(partial_sums)
        if query_mask is not None:
            set_keras_mask(total, query_mask)
        if not return_attention_scores:
            return total
        heads = -2 * len(self._attention_axes) - 1
        return total, tf.concat([scores for _, scores in outputs], heads)

    def _sum(self, partial_sums):
        total = tf.add_n(list(partial_sums))
        return total if self._output_bias is None else keras.ops.add(total, self._output_bias)


class _Heads(keras.layers.MultiHeadAttention):
    """Some of the heads. The output's bias is added to the sum over all heads."""

    def _make_output_dense(self, query_shape, common_kwargs, name=None):
        dense = super()._make_output_dense(query_shape, common_kwargs, name)
        dense.bias_axes = None
        return dense


class _Hidden:
    """Hides divisions from Keras's tracking, since the parts own their variables."""

    def __init__(self, divisions):
        self.divisions = divisions


class _Projection(keras.layers.Layer):
    """Stand-in for one of the plain layer's projections in files."""

    def __init__(self, divisions):
        super().__init__()
        self.hidden = _Hidden(divisions)
        self.built = True

    def save_own_variables(self, store):
        for number, division in enumerate(self.hidden.divisions):
            store[str(number)] = division.whole()

    def load_own_variables(self, store):
        for number, division in enumerate(self.hidden.divisions):
            division.assign(store[str(number)])


def shard_layer(layer, how: str, strategy, first: int) -> ShardedLayer:
    """Returns a built, divided copy of a layer that passes `check_division`. Its weights are zero.

    `first` is the number, within a group of the `GroupStrategy`, of the device of the first part.
    """
    copy = _SHARDED_CLASSES[type(layer)].from_config(layer.get_config())
    copy.shards = Shards(strategy, first, how)
    copy.build_from_config(layer.get_build_config())
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
