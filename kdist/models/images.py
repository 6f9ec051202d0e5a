"""Builders of image models: a perceptron, LeNet-5, ResNet-18, Inception, and MobileNetV2."""

import contextlib
import os
import socket
from collections.abc import Sequence

import keras

from kdist.model import Model
from kdist.models.parts import batch_norm, builder, is_synchronized, model, pixels, probabilities

_INITIALIZERS = {
    "glorot_uniform": keras.initializers.GlorotUniform,
    "he_normal": keras.initializers.HeNormal,
    "normal_0.01": lambda: keras.initializers.RandomNormal(stddev=0.01),
}
# Time limit for a server that sends no data during a download.
DOWNLOAD_TIMEOUT_SECONDS = 30


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


@builder
def mobilenet_v2(
    input_shape: Sequence[int] = (224, 224, 3),
    num_classes: int = 2,
    *,
    weights: str | os.PathLike | None = None,
    trainable_extractor: bool = True,
    sync_batch_norm: bool = False,
    rescale: float | None = 1 / 127.5,
    name: str = "mobilenet_v2",
) -> Model:
    """Builds MobileNetV2 with a new classifier: images (B, H, W, 3) to logits or probabilities.

    The classifier is average pooling, Dense 512 with ReLU, Dropout 0.5, and an output layer. For
    two classes the output is one logit (B, 1), for `BinaryCrossentropy(from_logits=True)`; for more
    classes it is probabilities (B, num_classes). With one logit the model has 160 trainable
    variables, or 4 if the extractor is frozen.

    Args:
        input_shape: (H, W, 3), at least 32 × 32 pixels. Defaults to (224, 224, 3).
        num_classes: number of classes; 1 and 2 both build one logit. Defaults to 2.
        weights: weights of the extractor: `"imagenet"` (downloaded by Keras), a weights file of
            `keras.applications.MobileNetV2(include_top=False)` (`.weights.h5`, `.keras`, or
            `.h5`), or None for random weights. Defaults to None.
        trainable_extractor: whether to train the extractor. A frozen extractor runs in inference
            mode with fixed BatchNormalization statistics. Defaults to True.
        rescale: factor that pixels are multiplied by before 1 is subtracted, or None for raw
            pixels. Defaults to 1/127.5, as for the ImageNet weights.
        sync_batch_norm, name, precision: see `kdist.models.create`.

    Returns:
        A `kdist.Model` (with JAX, a `keras.Model`).

    Raises:
        FileNotFoundError: the weights file does not exist.
        ConnectionError: the ImageNet weights cannot be downloaded, or the server sends no data
            for 30 seconds.
        ValueError: the shape, number of classes, or precision is invalid, or the weights file does
            not match the model.

    Example:

        model = kdist.models.mobilenet_v2((160, 160, 3), 2, weights="imagenet")
    """
    inputs, x = pixels(input_shape, rescale, smallest=32, offset=-1.0)
    extractor = _extractor(tuple(input_shape), weights, sync_batch_norm)
    extractor.trainable = trainable_extractor
    # `trainable = False` keeps the BatchNormalization statistics. In Keras 3.15 the mode of the
    # enclosing functional model overrides `training=False`, which only documents the intent.
    x = extractor(x) if trainable_extractor else extractor(x, training=False)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    x = keras.layers.Dense(512, activation="relu", name="features")(x)
    x = keras.layers.Dropout(0.5, name="dropout")(x)
    if num_classes in (1, 2):
        outputs = keras.layers.Dense(1, dtype="float32", name="logit")(x)
    else:
        outputs = probabilities(x, num_classes)
    return model(inputs, outputs, name=name)


def _extractor(input_shape, weights, sync_batch_norm):
    if weights not in (None, "imagenet") and not os.path.exists(weights):
        raise FileNotFoundError(
            f"weights={os.fspath(weights)!r}: no such file; pass a file, 'imagenet', or None"
        )
    if weights == "imagenet":
        extractor = _downloaded(input_shape)
    else:
        extractor = keras.applications.MobileNetV2(input_shape, include_top=False, weights=None)
        if weights is not None:
            _load_backbone(extractor, weights)
    return _with_synchronized_norm(extractor) if is_synchronized(sync_batch_norm) else extractor


def _downloaded(input_shape):
    try:
        with _socket_timeout():
            return keras.applications.MobileNetV2(
                input_shape, include_top=False, weights="imagenet"
            )
    except ValueError:  # Keras refuses the shape
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConnectionError(
            f"the ImageNet weights of MobileNetV2 cannot be downloaded ({reason}); "
            "pass a local file as weights=, or None"
        ) from error


@contextlib.contextmanager
def _socket_timeout():
    """Sets a timeout for sockets opened in this context; Keras's downloader has none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _load_backbone(extractor, weights):
    # Keras, h5py, and zipfile raise different errors for other kinds of files.
    try:
        extractor.load_weights(weights)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"weights={os.fspath(weights)!r} does not match ({reason}); use a file saved "
            "from keras.applications.MobileNetV2(include_top=False), or None"
        ) from error


def _with_synchronized_norm(extractor):
    """Returns a copy of the network with synchronized BatchNormalization."""

    def copy(layer):
        config = layer.get_config()
        if isinstance(layer, keras.layers.BatchNormalization):
            config["synchronized"] = True
        return type(layer).from_config(config)

    twin = keras.models.clone_model(extractor, clone_function=copy)
    twin.set_weights(extractor.get_weights())
    return twin
