"""ResNet-18 for small images, as in *Dive into Deep Learning*, section 13.6."""

from collections.abc import Sequence

import keras

from kdist.model import Model
from kdist.models.parts import batch_norm, builder, model, pixels, probabilities

INITIALIZERS = {
    "glorot_uniform": keras.initializers.GlorotUniform,
    "he_normal": keras.initializers.HeNormal,
    "normal_0.01": lambda: keras.initializers.RandomNormal(stddev=0.01),
}


@builder
def resnet18(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 64,
    initializer: str | keras.initializers.Initializer = "glorot_uniform",
    sync_batch_norm: bool = False,
    rescale: float | None = 1 / 255,
    name: str = "resnet18",
) -> Model:
    """Builds ResNet-18: images (B, H, W, C) to class probabilities (B, num_classes).

    The stem is one 3×3 convolution without max pooling. Four stages of two residual blocks have 64,
    128, 256, and 512 channels; all but the first halve height and width, with a 1×1 convolution on
    the shortcut. Convolutions have biases. The model has 11,175,818 trainable parameters for
    28×28×1 and 10 classes, and 176,634 with `width=8`.

    Args:
        input_shape: (H, W, C), at least 8 × 8 pixels; H and W may be None.
        num_classes: number of classes, at least 2.
        width: channels of the stem and of the first stage; each later stage has twice as many as
            the one before. Narrow ones suit CPUs. Defaults to 64.
        initializer: `"glorot_uniform"`, `"he_normal"`, `"normal_0.01"`, or a Keras initializer
            without a seed. Defaults to `"glorot_uniform"`.
        sync_batch_norm, rescale, name, precision: see `kdist.models.create`.

    Returns:
        A `kdist.Model` (with JAX, a `keras.Model`).

    Raises:
        ValueError: the shape, number of classes, width, initializer, or precision is invalid.

    Example:

        model = kdist.models.resnet18(input_shape=(28, 28, 1), num_classes=10)
    """
    if not isinstance(width, int) or width < 1:
        raise ValueError(f"width={width!r}: use a number of channels, such as 8 or 64")
    new_initializer = _initializer_factory(initializer)
    inputs, x = pixels(input_shape, rescale, smallest=8)
    layers = _Layers(new_initializer, sync_batch_norm)
    x = layers.convolution(width, 3, name="stem_conv")(x)
    x = layers.norm_relu(x, "stem")
    for stage in (1, 2, 3, 4):
        filters = width * 2 ** (stage - 1)
        for block in (1, 2):
            halve = stage > 1 and block == 1
            x = layers.residual(x, filters, halve, f"stage{stage}_block{block}")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    outputs = probabilities(x, num_classes, new_initializer())
    return model(inputs, outputs, name=name)


def _initializer_factory(initializer):
    """Returns a function that creates a new initializer in each call."""
    if not isinstance(initializer, keras.initializers.Initializer):
        if initializer in INITIALIZERS:
            return INITIALIZERS[initializer]
        raise ValueError(
            f"initializer={initializer!r}; use one of {', '.join(INITIALIZERS)}, "
            "or an instance of keras.initializers.Initializer"
        )
    config = initializer.get_config()
    if config.get("seed") is not None:
        raise ValueError(
            f"initializer has seed={config['seed']}, so layers of equal shape would get equal "
            "weights; remove the seed and call keras.utils.set_random_seed before building"
        )
    return lambda: type(initializer).from_config(config)


class _Layers:
    """Layer factory with a common initializer and normalization."""

    def __init__(self, new_initializer, sync_batch_norm):
        self._new_initializer = new_initializer
        self._sync_batch_norm = sync_batch_norm

    def convolution(self, filters, size, strides=1, name=None):
        # A shared initializer would give equal weights to layers of equal shape.
        initializer = self._new_initializer()
        return keras.layers.Conv2D(
            filters, size, strides, padding="same", kernel_initializer=initializer, name=name
        )

    def norm_relu(self, x, name):
        x = batch_norm(self._sync_batch_norm, name=f"{name}_norm")(x)
        return keras.layers.ReLU(name=f"{name}_relu")(x)

    def residual(self, x, filters, halve, name):
        strides = 2 if halve else 1
        y = self.convolution(filters, 3, strides, name=f"{name}_conv1")(x)
        y = self.norm_relu(y, f"{name}_1")
        y = self.convolution(filters, 3, name=f"{name}_conv2")(y)
        y = batch_norm(self._sync_batch_norm, name=f"{name}_2_norm")(y)
        if halve:
            x = self.convolution(filters, 1, strides, name=f"{name}_shortcut")(x)
        x = keras.layers.Add(name=f"{name}_add")([x, y])
        return keras.layers.ReLU(name=f"{name}_relu")(x)
