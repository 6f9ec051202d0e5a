"""Embedding tables on parameter servers: in parts, of which a step moves the rows that it needs.

A variable of a partitioned strategy is no single variable, which Keras asks for, and Keras reads a
whole table to take some rows of it. So under parameter servers an `Embedding` keeps one variable
for each part, and looks rows up where they lie. In a file it is the `Embedding` that it was.
"""

import functools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from kdist.training.keras_internals import save_as

# Shape and dtype of a variable -> into how many parts its axes are cut; TensorFlow's protocol.
Partitioner = Callable[..., Sequence[int]]


def serve_embeddings(strategy: tf.distribute.Strategy, partitioner: Partitioner | None):
    """Embeddings that are built in the scope of `strategy` keep their tables as said above.

    Args:
        strategy: a `ParameterServerStrategy`.
        partitioner: such as `tf.distribute.experimental.partitioners.MinSizePartitioner()`; None
            leaves each table in one part.
    """
    _install()
    strategy.extended._kdist_partitioner = partitioner


@functools.cache
def _install():
    kerass_own = keras.layers.Embedding.build

    @functools.wraps(kerass_own)
    def build(layer, input_shape=None):
        extended = tf.distribute.get_strategy().extended
        if type(layer) is keras.layers.Embedding and hasattr(extended, "_kdist_partitioner"):
            layer.__class__ = ServedEmbedding
            return ServedEmbedding.build(layer, input_shape)
        return kerass_own(layer, input_shape)

    keras.layers.Embedding.build = build


@save_as(keras.layers.Embedding, "keras.layers.Embedding")
class ServedEmbedding(keras.layers.Embedding):
    """An `Embedding` whose table lies on parameter servers, in one or several parts."""

    def build(self, input_shape=None):
        if self.built:
            return
        sizes = self._sizes()
        self._check_can_be_cut(len(sizes))
        ends = np.cumsum(sizes)
        whole = None
        if len(sizes) > 1:
            # The same numbers as on one device, which a part by itself would not draw.
            whole = self.embeddings_initializer(
                (self.input_dim, self.output_dim), dtype=self.variable_dtype
            )
        self._parts = [
            self.add_weight(
                shape=(size, self.output_dim),
                initializer=self.embeddings_initializer
                if whole is None
                else _given(whole[end - size : end]),
                name="embeddings" if len(sizes) == 1 else f"embeddings_{number}",
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
            )
            for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        self._embeddings = self._parts[0]
        self.built = True

    @property
    def embeddings(self):
        """The whole table, (input_dim, output_dim)."""
        return tf.concat([tf.convert_to_tensor(part) for part in self._parts], 0)

    def call(self, inputs):
        """(…) whole numbers to (…, output_dim)."""
        if inputs.dtype not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        parts = [part.value for part in self._parts]
        return keras.ops.cast(tf.nn.embedding_lookup(parts, inputs), self.compute_dtype)

    def save_own_variables(self, store):
        """One table, as Keras's layer has it."""
        store["0"] = np.concatenate([part.numpy() for part in self._parts])

    def load_own_variables(self, store):
        """Of a file with one table."""
        ends = np.cumsum([part.shape[0] for part in self._parts])
        for part, table in zip(self._parts, np.split(store["0"], ends[:-1]), strict=True):
            part.assign(table)

    def _sizes(self):
        """Rows of each part: as equal as can be, the larger ones first."""
        partitioner = tf.distribute.get_strategy().extended._kdist_partitioner
        if partitioner is None:
            return [self.input_dim]
        dtype = tf.as_dtype(self.variable_dtype)
        shape = tf.TensorShape([self.input_dim, self.output_dim])
        number = min(int(partitioner(shape=shape, dtype=dtype)[0]), self.input_dim)
        return [len(rows) for rows in np.array_split(np.empty(self.input_dim), number)]

    def _check_can_be_cut(self, number):
        if self.quantization_mode or self.lora_rank:
            raise ValueError(
                f"{self.name!r}: a quantised embedding, or one with LoRA, cannot lie on parameter "
                "servers; take --strategy=mirrored or multi_worker"
            )
        separable = keras.regularizers.L1 | keras.regularizers.L2 | keras.regularizers.L1L2
        regularizer = self.embeddings_regularizer
        if number > 1 and (
            self.embeddings_constraint is not None
            or not (regularizer is None or isinstance(regularizer, separable))
        ):
            raise ValueError(
                f"{self.name!r} is cut into {number} parts, and its constraint or regulariser "
                "looks at the whole table; leave it out, take L1 or L2, or no partitioner"
            )


def _given(values):
    return lambda shape, dtype=None: tf.cast(values, dtype or values.dtype)


# Files of Keras name what a layer holds after its class.
ServedEmbedding.__name__ = keras.layers.Embedding.__name__
