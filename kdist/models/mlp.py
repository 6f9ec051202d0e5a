"""A multilayer perceptron.

model = kdist.models.mlp(input_shape=(28, 28, 1), num_classes=10, widths=(256, 256))
"""

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
    """Dense layers with ReLU, from pixels (B, H, W, C) to class probabilities (B, num_classes).

    Args:
        input_shape: (H, W, C).
        num_classes: at least 2.
        widths: units of the hidden layers. Defaults to one of 256.
        batch_normalization: a BatchNorm after each hidden layer. Defaults to False.
        sync_batch_norm: statistics over all replicas. Defaults to False.
        rescale: factor for the pixels; None for none. Defaults to 1/255.
        name: the model's.
        precision: Keras's dtype policy. Defaults to float32.

    Raises:
        ValueError: a shape, number of classes or precision that cannot be.
    """
    inputs, x = pixels(input_shape, rescale, fixed_size=True)
    x = keras.layers.Flatten()(x)
    for width in widths:
        x = keras.layers.Dense(width)(x)
        if batch_normalization:
            x = batch_norm(sync_batch_norm)(x)
        x = keras.layers.ReLU()(x)
    return model(inputs, probabilities(x, num_classes), name=name)
