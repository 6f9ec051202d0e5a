"""LeNet-5, as in *Dive into Deep Learning*, section 7.6.

model = kdist.models.lenet(input_shape=(28, 28, 1), num_classes=10)
"""

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
    """Two convolutions and three dense layers: pixels (B, H, W, C) to (B, num_classes).

    At 28×28×1 and 10 classes it has 61,706 parameters.

    Args:
        input_shape: (H, W, C), at least 8 × 8 pixels.
        num_classes: at least 2.
        activation: `"sigmoid"` as in 1998 and in d2l, or `"relu"`, the default, which learns
            faster.
        batch_normalization: a BatchNorm after each convolution. Defaults to False.
        sync_batch_norm: statistics over all replicas. Defaults to False.
        rescale: factor for the pixels; None for none. Defaults to 1/255.
        name: the model's.
        precision: Keras's dtype policy. Defaults to float32.

    Raises:
        ValueError: a shape, number of classes or precision that cannot be.
    """
    inputs, x = pixels(input_shape, rescale, smallest=8, fixed_size=True)
    # At 28 × 28 the second convolution is without padding; below 12 it would leave nothing.
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
