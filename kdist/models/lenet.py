"""LeNet-5, as in *Dive into Deep Learning*, section 7.6."""

from collections.abc import Sequence

import keras

from kdist.model import Model
from kdist.models.parts import batch_norm, builder, model, pixels, probabilities


@builder
def lenet(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    activation: str = "relu",
    batch_normalization: bool = False,
    sync_batch_norm: bool = False,
    rescale: float | None = 1 / 255,
    name: str = "lenet",
) -> Model:
    """Builds LeNet-5: images (B, H, W, C) to class probabilities (B, num_classes).

    It has two convolutions and three dense layers; 61,706 parameters for 28×28×1 and 10 classes.

    Args:
        input_shape: (H, W, C), at least 8 × 8 pixels.
        num_classes: number of classes, at least 2.
        activation: activation function; the original uses `"sigmoid"`, but `"relu"` learns
            faster. Defaults to `"relu"`.
        batch_normalization: whether to normalize after each convolution. Defaults to False.
        sync_batch_norm, rescale, name, precision: see `kdist.models.create`.

    Returns:
        A `kdist.Model` (with JAX, a `keras.Model`).

    Raises:
        ValueError: the shape, number of classes, or precision is invalid.

    Example:

        model = kdist.models.lenet(input_shape=(28, 28, 1), num_classes=10)
    """
    inputs, x = pixels(input_shape, rescale, smallest=8, fixed_size=True)
    # The second convolution has no padding, except below 12 pixels, where no output would remain.
    padding = "valid" if min(input_shape[:2]) >= 12 else "same"
    for filters, pad in ((6, "same"), (16, padding)):
        x = keras.layers.Conv2D(filters, 5, padding=pad)(x)
        if batch_normalization:
            x = batch_norm(sync_batch_norm)(x)
        x = keras.layers.Activation(activation)(x)
        x = keras.layers.AveragePooling2D(2)(x)
    x = keras.layers.Flatten()(x)
    for units in (120, 84):
        x = keras.layers.Dense(units, activation=activation)(x)
    return model(inputs, probabilities(x, num_classes), name=name)
