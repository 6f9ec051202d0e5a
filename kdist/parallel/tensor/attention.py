"""`MultiHeadAttention` divided by heads."""

import keras
import tensorflow as tf

from kdist.parallel.tensor.shards import DividedVariable, SeedStates, ShardedLayer, saved_as


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
        masks = {"query_mask": query_mask, "value_mask": value_mask, "key_mask": key_mask}
        if any(mask is not None for mask in masks.values()):
            attention_mask = self._compute_attention_mask(
                query, value, attention_mask=attention_mask, **masks
            )
            # Keras attaches masks to tensors, and the first part would detach them.
            query, value, key = (tf.identity(tensor) for tensor in (query, value, key))

        def attend(part):
            masking = {"attention_mask": attention_mask, "use_causal_mask": use_causal_mask}
            options = {"return_attention_scores": return_attention_scores, "training": training}
            return part(query, value, key, **masking, **options)

        outputs = self.shards.map(attend)
        if not return_attention_scores:
            return self._sum(outputs)
        heads = -2 * len(self._attention_axes) - 1
        return self._sum([output for output, _ in outputs]), tf.concat(
            [scores for _, scores in outputs], heads
        )

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
