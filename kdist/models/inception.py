"""Small Inception network: blocks of four independent branches."""

from collections.abc import Sequence

import keras

from kdist.model import Model
from kdist.models.parts import batch_norm, builder, model, pixels, probabilities


@builder
def inception(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    blocks: int = 3,
    width: int = 32,
    sync_batch_norm: bool = False,
    rescale: float | None = 1 / 255,
    name: str = "inception",
) -> Model:
    """Builds an Inception network: images (B, H, W, C) to class probabilities (B, num_classes).

    Each block concatenates four branches, as in Szegedy et al. 2014, arXiv:1409.4842: 1×1; 1×1 and
    3×3; 1×1 and 5×5; max pooling and 1×1. The layers of the branches are named `block1_a_…` to
    `block1_d_…`.

    Args:
        input_shape: (H, W, C), at least 8 × 8 pixels; H and W may be None.
        num_classes: number of classes, at least 2.
        blocks: number of blocks. Defaults to 3.
        width: output channels of each branch. Defaults to 32.
        sync_batch_norm, rescale, name, precision: see `kdist.models.create`.

    Returns:
        A `kdist.Model` (with JAX, a `keras.Model`).

    Raises:
        ValueError: the shape, number of classes, or precision is invalid.

    Example:

        model = kdist.models.inception(input_shape=(28, 28, 1), num_classes=10)
    """
    if blocks < 1 or width < 2:
        raise ValueError(f"blocks={blocks}, width={width}; use at least 1 block of width 2")
    inputs, x = pixels(input_shape, rescale, smallest=8)

    def convolution(x, filters, size, name, strides=1):
        x = keras.layers.Conv2D(
            filters, size, strides, padding="same", use_bias=False, name=f"{name}_conv"
        )(x)
        x = batch_norm(sync_batch_norm, name=f"{name}_norm")(x)
        return keras.layers.ReLU(name=f"{name}_relu")(x)

    def block(x, name):
        a = convolution(x, width, 1, f"{name}_a")
        b = convolution(convolution(x, width // 2, 1, f"{name}_b_in"), width, 3, f"{name}_b")
        c = convolution(convolution(x, width // 2, 1, f"{name}_c_in"), width, 5, f"{name}_c")
        d = keras.layers.MaxPooling2D(3, 1, padding="same", name=f"{name}_d_pool")(x)
        d = convolution(d, width, 1, f"{name}_d")
        return keras.layers.Concatenate(name=f"{name}_join")([a, b, c, d])

    x = convolution(x, 2 * width, 3, "stem", strides=2)
    for number in range(1, blocks + 1):
        x = block(x, f"block{number}")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return model(inputs, probabilities(x, num_classes), name=name)
