"""Transfer learning from MobileNetV2."""

import contextlib
import os
import socket
from collections.abc import Sequence

import keras

from kdist.model import Model
from kdist.models.parts import builder, is_synchronized, model, pixels, probabilities

# Time limit for a server that sends no data during a download.
DOWNLOAD_TIMEOUT_SECONDS = 30


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
            _load(extractor, weights)
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


def _load(extractor, weights):
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
