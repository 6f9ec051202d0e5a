"""Small transformer that classifies sequences of tokens, or predicts the next token of each."""

from collections.abc import Sequence

import keras

from kdist.model import Model
from kdist.models.parts import builder, model, probabilities


@builder
def transformer(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    vocabulary_size: int = 10_000,
    width: int = 64,
    heads: int = 4,
    depth: int = 2,
    dropout: float = 0.1,
    causal: bool = False,
    separator: int | None = None,
    sync_batch_norm: bool = False,
    name: str = "transformer",
) -> Model:
    """Builds a transformer: tokens (B, T) to class probabilities (B, num_classes).

    With `causal`, it is a language model: probabilities (B, T, num_classes) of the token that
    follows each, for data of `kdist.data.from_text`.

    Blocks normalize before attention and before the feed-forward part (Xiong et al. 2020,
    arXiv:2002.04745). Position embeddings are learned. Without `causal`, features are averaged over
    T.

    Args:
        input_shape: (T,), the number of tokens per sequence.
        num_classes: number of classes, at least 2.
        vocabulary_size: number of distinct tokens, which are integers from 0. Defaults to 10,000.
        width: features per token, a multiple of `heads`. Defaults to 64.
        heads: number of attention heads. Defaults to 4.
        depth: number of blocks. Defaults to 2.
        dropout: dropout rate after attention and feed-forward. Defaults to 0.1.
        causal: whether each token attends only to itself and those before it, and has an output of
            its own. Defaults to False.
        separator: token that ends a document, in sequences that hold several. Tokens attend only
            to those of their document. Defaults to None, one document per sequence.
        sync_batch_norm: accepted by all builders; no effect, as there is no BatchNormalization.
        name, precision: see `kdist.models.create`.

    Returns:
        A `kdist.Model` (with JAX, a `keras.Model`).

    Raises:
        ValueError: the shape, a size, the number of classes, or the precision is invalid.

    Example:

        model = kdist.models.transformer(input_shape=(128,), num_classes=2)
    """
    del sync_batch_norm
    if len(input_shape) != 1 or input_shape[0] is None:
        raise ValueError(f"input_shape={tuple(input_shape)} is not a fixed (length,)")
    if heads < 1 or width % heads:
        raise ValueError(
            f"width={width} must be a multiple of heads={heads}, which must be at least 1"
        )
    if min(width, depth, vocabulary_size) < 1:
        raise ValueError(
            f"width={width}, depth={depth}, vocabulary_size={vocabulary_size} must be at least 1"
        )
    tokens = keras.Input(tuple(input_shape), dtype="int32", name="tokens")
    # Built-in operations only, so that the saved model loads without kdist.
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = keras.layers.Embedding(vocabulary_size, width, name="token_embedding")(tokens)
    x += keras.layers.Embedding(input_shape[0], width, name="position_embedding")(positions)
    mask = None if separator is None else _same_document(tokens, separator)
    for number in range(1, depth + 1):
        x = _block(x, width, heads, dropout, f"block{number}", mask, causal)
    x = keras.layers.LayerNormalization(name="norm")(x)
    if not causal:
        x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    return model(tokens, probabilities(x, num_classes), name=name)


def _same_document(tokens, separator):
    """Returns a boolean mask (B, T, T) of the pairs of tokens in one document and its separator."""
    ends = keras.ops.cast(keras.ops.equal(tokens, separator), "int32")
    document = keras.ops.cumsum(ends, axis=1) - ends
    return keras.ops.equal(document[:, :, None], document[:, None, :])


class Perplexity(keras.metrics.SparseCategoricalCrossentropy):
    """Exponential of the mean cross-entropy: the number of equally likely tokens to choose from.

    Args:
        name: name of the metric. Defaults to "perplexity".
        **kwargs: as in `keras.metrics.SparseCategoricalCrossentropy`.

    Example:

        model.compile("adam", "sparse_categorical_crossentropy", metrics=[Perplexity()])
    """

    def __init__(self, name: str = "perplexity", **kwargs):
        super().__init__(name=name, **kwargs)

    def result(self):
        return keras.ops.exp(super().result())


def _block(x, width, heads, dropout, name, mask, causal):
    layers = keras.layers
    y = layers.LayerNormalization(name=f"{name}_attention_norm")(x)
    y = layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")(
        y, y, attention_mask=mask, use_causal_mask=causal
    )
    x = layers.Add(name=f"{name}_attention_add")([x, layers.Dropout(dropout)(y)])
    y = layers.LayerNormalization(name=f"{name}_ffn_norm")(x)
    y = layers.Dense(4 * width, activation="gelu", name=f"{name}_ffn_up")(y)
    y = layers.Dense(width, name=f"{name}_ffn_down")(y)
    return layers.Add(name=f"{name}_ffn_add")([x, layers.Dropout(dropout)(y)])
