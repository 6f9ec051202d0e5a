"""Small networks that show what layers cost; each is of layers of one kind, as far as can be.

PROBES[0].build()   # a kdist.Model, built in the scope of a strategy
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Probe:
    """A network to be timed.

    Attributes:
        build: makes it; imports Keras.
        local_batch: examples a replica and step that take some tens of milliseconds.
    """

    build: Callable[[], Any]
    local_batch: int


def _network(shape, body, stem=0):
    """Inputs, a convolution to `stem` channels if there is one, the body, classes."""
    import keras

    from kdist.model import Model

    layers = keras.layers
    x = inputs = keras.Input(shape)
    if stem:
        x = layers.Conv2D(stem, 3, padding="same", use_bias=False)(x)
    x = body(layers, x)
    if len(x.shape) == 4:
        x = layers.GlobalAveragePooling2D()(x)
    return Model(inputs, layers.Dense(_CLASSES, activation="softmax")(x))


def _convolutions(size, widths, kernel=3, stride=1, norm=False, channels=3):
    def body(layers, x):
        for number, width in enumerate(widths[1:]):
            strides = stride if number == 0 else 1
            x = layers.Conv2D(width, kernel, strides, padding="same", use_bias=not norm)(x)
            if norm:
                x = layers.BatchNormalization()(x)
            x = layers.ReLU()(x)
        return x

    return _network((size, size, channels), body, stem=widths[0])


def _depthwise(size, width, kernel=3, stride=1, depth=3, norm=False):
    def body(layers, x):
        for number in range(depth):
            strides = stride if number == 0 else 1
            x = layers.DepthwiseConv2D(kernel, strides, padding="same", use_bias=False)(x)
            if norm:
                x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
        return x

    return _network((size, size, 3), body, stem=width)


def _elementwise(size, width, of, depth=4):
    def layer(layers, x):
        if of == "norm":
            return layers.ReLU()(layers.BatchNormalization()(x))
        if of == "add":
            return layers.Add()([layers.ReLU()(x), x])
        if of == "join":
            return layers.Concatenate()([layers.ReLU()(x), x])
        if of == "halve":
            return layers.MaxPooling2D(2)(x)
        return layers.MaxPooling2D(3, 1, padding="same")(x)

    def body(layers, x):
        for _ in range(depth):
            x = layer(layers, x)
        return x

    return _network((size, size, 3), body, stem=width)


def _dense(inputs, width, depth):
    def body(layers, x):
        for _ in range(depth):
            x = layers.Dense(width, activation="relu")(x)
        return x

    return _network((inputs,), body)


def _probe(local_batch, build, *args, **options):
    return Probe(functools.partial(build, *args, **options), local_batch)


# Sizes, channels and depths as image models have them, from their first layers to their last.
PROBES = (
    # 3×3, from many pixels and few channels to few pixels and many channels
    _probe(16, _convolutions, 56, [16, 16, 16, 16]),
    _probe(16, _convolutions, 32, [32, 32, 32, 32]),
    _probe(4, _convolutions, 56, [64, 64, 64]),
    _probe(8, _convolutions, 28, [64, 64, 64, 64]),
    _probe(4, _convolutions, 28, [128, 128, 128]),
    _probe(8, _convolutions, 14, [128, 128, 128]),
    _probe(8, _convolutions, 14, [256, 256]),
    _probe(8, _convolutions, 7, [256, 256, 256]),
    _probe(8, _convolutions, 7, [512, 512]),
    _probe(8, _convolutions, 4, [512, 512, 512]),
    _probe(16, _convolutions, 2, [512, 512, 512]),
    _probe(8, _convolutions, 28, [64, 64, 64, 64], norm=True),
    _probe(8, _convolutions, 7, [512, 512], norm=True),
    _probe(16, _convolutions, 56, [16, 16, 16], norm=True),
    # 3×3 that halve the image
    _probe(8, _convolutions, 56, [32, 64], stride=2),
    _probe(16, _convolutions, 28, [64, 128], stride=2),
    _probe(16, _convolutions, 14, [128, 256], stride=2),
    # 5×5 and few channels
    _probe(32, _convolutions, 28, [8, 8, 8], kernel=5, channels=1),
    _probe(32, _convolutions, 20, [5, 10, 20], kernel=5, channels=1),
    _probe(4, _convolutions, 20, [5, 10], kernel=5, channels=1),
    _probe(32, _convolutions, 14, [32, 32, 32], kernel=5),
    # 1×1, wide and narrow in turn
    _probe(8, _convolutions, 48, [24, 144, 24, 144], kernel=1),
    _probe(16, _convolutions, 24, [32, 192, 32, 192], kernel=1),
    _probe(16, _convolutions, 12, [64, 384, 64, 384], kernel=1),
    _probe(16, _convolutions, 6, [160, 960, 160, 960], kernel=1),
    _probe(32, _convolutions, 3, [160, 960, 160, 960], kernel=1),
    _probe(8, _convolutions, 28, [256, 64, 256, 64], kernel=1),
    _probe(8, _convolutions, 14, [512, 128, 512, 128], kernel=1),
    _probe(16, _convolutions, 12, [64, 384, 64, 384], kernel=1, norm=True),
    # depthwise
    _probe(8, _depthwise, 48, 96),
    _probe(16, _depthwise, 24, 144),
    _probe(16, _depthwise, 12, 384),
    _probe(16, _depthwise, 6, 960),
    _probe(32, _depthwise, 3, 960),
    _probe(16, _depthwise, 48, 96, stride=2, depth=1),
    _probe(8, _depthwise, 24, 144, kernel=5),
    _probe(16, _depthwise, 12, 384, norm=True),
    # pixel by pixel
    _probe(16, _elementwise, 56, 32, "norm"),
    _probe(16, _elementwise, 28, 128, "norm"),
    _probe(32, _elementwise, 7, 512, "norm"),
    _probe(16, _elementwise, 4, 64, "norm", depth=16),
    _probe(2, _elementwise, 4, 16, "norm", depth=8),
    _probe(16, _elementwise, 28, 128, "add"),
    _probe(16, _elementwise, 28, 32, "join", depth=3),
    _probe(8, _elementwise, 28, 64, "pool"),
    _probe(16, _elementwise, 32, 64, "halve"),
    # dense layers, and steps in which hardly anything is done
    _probe(32, _dense, 512, 512, 4),
    _probe(32, _dense, 1024, 2048, 3),
    _probe(128, _dense, 1024, 1024, 3),
    _probe(16, _dense, 512, 4096, 2),
    _probe(16, _dense, 128, 128, 10),
    _probe(8, _dense, 64, 32, 1),
    _probe(8, _dense, 64, 32, 5),
    _probe(16, _convolutions, 8, [8, 8], channels=1),
)
