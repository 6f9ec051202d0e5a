"""`Embedding`, by features or by vocabulary."""

import keras

from kdist.parallel.tensor.shards import (
    DividedVariable,
    ShardedLayer,
    call_part,
    stands_for,
    sum_of,
)


@stands_for(keras.layers.Embedding)
class ShardedEmbedding(ShardedLayer, keras.layers.Embedding):
    """An `Embedding` of whose table (vocabulary, features) each device has some columns or rows.

    By row each device looks up the tokens that it has, and has zeros for the others; the sum is
    the row of the one device that has it. A token outside of the vocabulary has zeros.
    """

    def build(self, input_shape=None):
        count = len(self.shards)
        changes = (
            {"input_dim": self.input_dim // count}
            if self.is_by_row
            else {"output_dim": self.output_dim // count}
        )
        # The mask is that of the whole layer's tokens.
        self.make_parts(keras.layers.Embedding, {**changes, "mask_zero": False}, input_shape)

    def divisions(self):
        tables = [part._embeddings for part in self.shards.parts]
        return [DividedVariable(tables, 0 if self.is_by_row else 1)]

    def call(self, inputs):
        if inputs.dtype not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        if not self.is_by_row:
            return self.joined(self.shards.each(call_part, self.copied(inputs)))
        firsts = [part.input_dim * number for number, part in enumerate(self.shards.parts)]
        return sum_of(self.shards.each(_look_up, self.copied(inputs), firsts))


def _look_up(part, tokens, first):
    """The rows of the tokens that a part has, which begin with the token `first`; else zeros."""
    own = tokens - first
    is_here = keras.ops.logical_and(own >= 0, own < part.input_dim)
    rows = part(keras.ops.where(is_here, own, 0))
    return keras.ops.where(keras.ops.expand_dims(is_here, -1), rows, 0)
