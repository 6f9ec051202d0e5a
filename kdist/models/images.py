"""Builders of image models: a multilayer perceptron, LeNet-5, ResNet-18, and Inception."""

from collections.abc import Sequence

import keras

from kdist.model import Model
from kdist.models.parts import batch_norm, builder, model, pixels, probabilities

_INITIALIZERS = {
    "glorot_uniform": keras.initializers.GlorotUniform,
    "he_normal": keras.initializers.HeNormal,
    "normal_0.01": lambda: keras.initializers.RandomNormal(stddev=0.01),
}


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

    It has two convolutions and three dense layers, as in *Dive into Deep Learning*, section 7.6;
    61,706 parameters for 28×28×1 and 10 classes.

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
    the shortcut. Convolutions have biases, as in *Dive into Deep Learning*, section 13.6. The model
    has 11,175,818 trainable parameters for 28×28×1 and 10 classes, and 176,634 with `width=8`.

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
    layers = _ResNetLayers(new_initializer, sync_batch_norm)
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
        if initializer in _INITIALIZERS:
            return _INITIALIZERS[initializer]
        raise ValueError(
            f"initializer={initializer!r}; use one of {', '.join(_INITIALIZERS)}, "
            "or an instance of keras.initializers.Initializer"
        )
    config = initializer.get_config()
    if config.get("seed") is not None:
        raise ValueError(
            f"initializer has seed={config['seed']}, so layers of equal shape would get equal "
            "weights; remove the seed and call keras.utils.set_random_seed before building"
        )
    return lambda: type(initializer).from_config(config)


class _ResNetLayers:
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
