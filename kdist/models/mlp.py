"""Multilayer perceptron for images."""

from collections.abc import Sequence

import keras

from kdist.model import Model
from kdist.models.parts import batch_norm, builder, model, pixels, probabilities


@builder
def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    widths: Sequence[int] = (256,),
    batch_normalization: bool = False,
    sync_batch_norm: bool = False,
    rescale: float | None = 1 / 255,
    name: str = "mlp",
) -> Model:
    """Builds dense layers with ReLU: images (B, H, W, C) to probabilities (B, num_classes).

    Args:
        input_shape: (H, W, C).
        num_classes: number of classes, at least 2.
        widths: units of each hidden layer. Defaults to one layer of 256.
        batch_normalization: whether to normalize after each hidden layer. Defaults to False.
        sync_batch_norm, rescale, name, precision: see `kdist.models.create`.

    Returns:
        A `kdist.Model` (with JAX, a `keras.Model`).

    Raises:
        ValueError: the shape, number of classes, or precision is invalid.

    Example:

        model = kdist.models.mlp((28, 28, 1), num_classes=10, widths=(256, 256))
    """
    inputs, x = pixels(input_shape, rescale, fixed_size=True)
    x = keras.layers.Flatten()(x)
    for width in widths:
        x = keras.layers.Dense(width)(x)
        if batch_normalization:
            x = batch_norm(sync_batch_norm)(x)
        x = keras.layers.ReLU()(x)
    return model(inputs, probabilities(x, num_classes), name=name)
