"""Transfer learning from MobileNetV2.

model = kdist.models.mobilenet_v2(input_shape=(160, 160, 3), num_classes=2, weights="imagenet")
"""

import contextlib
import os
import socket
from collections.abc import Sequence

import keras

from kdist.model import Model
from kdist.models.parts import builder, is_synchronized, model, pixels, probabilities

# A server that is reached but stays silent for so long is given up.
DOWNLOAD_SILENCE_SECONDS = 30


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
    """MobileNetV2 without its top, average pooling, Dense 512 ReLU, Dropout 0.5, an output.

    From pixels (B, H, W, 3) to one logit (B, 1) for a yes-or-no question, to be trained with
    `BinaryCrossentropy(from_logits=True)`; for more classes to probabilities (B, num_classes).
    With one logit it has 160 trainable variables, 4 with a frozen extractor.

    Args:
        input_shape: (H, W, 3), at least 32 × 32 pixels. Defaults to (224, 224, 3).
        num_classes: 1 or 2, the default, both for one logit; or more.
        weights: the extractor's: `"imagenet"` (downloaded by Keras), a weights file of
            `keras.applications.MobileNetV2(include_top=False)` (`.weights.h5`, `.keras` or `.h5`),
            or None, the default, for random.
        trainable_extractor: whether the extractor is trained as well. If not, it works in
            inference mode, and its BatchNorm statistics stay as they are for as long as its
            `trainable` is False. Defaults to True.
        sync_batch_norm: statistics over all replicas. Defaults to False.
        rescale: factor for the pixels, after which 1 is subtracted; None for neither. Defaults
            to 1/127.5, which MobileNetV2's own weights are made for.
        name: the model's.
        precision: Keras's dtype policy. Defaults to float32.

    Raises:
        FileNotFoundError: there is no file of that name.
        ConnectionError: the ImageNet weights cannot be downloaded, or their server is silent for
            `DOWNLOAD_SILENCE_SECONDS`.
        ValueError: a shape, number of classes or precision that cannot be, or a weights file that
            does not fit.
    """
    inputs, x = pixels(input_shape, rescale, smallest=32, offset=-1.0)
    extractor = _extractor(tuple(input_shape), weights, sync_batch_norm)
    extractor.trainable = trainable_extractor
    # `trainable = False` is what keeps BatchNorm's statistics: Keras 3.15's functional models put
    # the mode of the model around it over `training=False`, which says what is meant.
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
            f"weights={os.fspath(weights)!r}: no such file; give one, 'imagenet', or None"
        )
    if weights == "imagenet":
        extractor = _downloaded(input_shape)
    else:
        extractor = keras.applications.MobileNetV2(input_shape, include_top=False, weights=None)
        if weights is not None:
            _load(extractor, weights)
    return _synchronised(extractor) if is_synchronized(sync_batch_norm) else extractor


def _downloaded(input_shape):
    try:
        with _limited_silence():
            return keras.applications.MobileNetV2(
                input_shape, include_top=False, weights="imagenet"
            )
    except ValueError:  # Keras refuses the shape
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConnectionError(
            f"the ImageNet weights of MobileNetV2 cannot be downloaded ({reason}); "
            "give weights= a file that you have, or None"
        ) from error


@contextlib.contextmanager
def _limited_silence():
    """Sockets opened meanwhile give up on silence; Keras's downloader has no limit of its own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_SILENCE_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _load(extractor, weights):
    # Keras, h5py and zipfile each have errors of their own for a file that is something else.
    try:
        extractor.load_weights(weights)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"weights={os.fspath(weights)!r} does not fit ({reason}); give a file that was saved "
            "from keras.applications.MobileNetV2(include_top=False), or None"
        ) from error


def _synchronised(extractor):
    """The same network and weights, with BatchNorm over all replicas."""

    def copy(layer):
        config = layer.get_config()
        if isinstance(layer, keras.layers.BatchNormalization):
            config["synchronized"] = True
        return type(layer).from_config(config)

    twin = keras.models.clone_model(extractor, clone_function=copy)
    twin.set_weights(extractor.get_weights())
    return twin
