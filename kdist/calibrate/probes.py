"""Small networks to measure the cost of layers; each has mostly layers of one kind.

PROBES[0].build()   # a kdist.Model, built in the scope of a strategy
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Probe:
    """A network to time, and the local batch for steps of some tens of milliseconds."""

    build: Callable[[], Any]
    local_batch: int


def _network(shape, body, stem=0):
    """Returns a model of an optional convolution to `stem` channels, the body, and classes."""
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


def _probes(build, *sizes, **options):
    """Yields probes of the same kind; each size is the local batch and arguments of `build`."""
    for local_batch, *arguments in sizes:
        yield Probe(functools.partial(build, *arguments, **options), local_batch)


# Sizes, channels, and depths of image models, from their first layers to their last.
PROBES = (
    # 3×3, from many pixels and few channels to few pixels and many channels
    *_probes(_convolutions, (16, 56, [16] * 4), (16, 32, [32] * 4), (4, 56, [64] * 3)),
    *_probes(_convolutions, (8, 28, [64] * 4), (4, 28, [128] * 3), (8, 14, [128] * 3)),
    *_probes(_convolutions, (8, 14, [256] * 2), (8, 7, [256] * 3), (8, 7, [512] * 2)),
    *_probes(_convolutions, (8, 4, [512] * 3), (16, 2, [512] * 3)),
    *_probes(_convolutions, (8, 28, [64] * 4), (8, 7, [512] * 2), (16, 56, [16] * 3), norm=True),
    # 3×3 with stride 2
    *_probes(_convolutions, (8, 56, [32, 64]), (16, 28, [64, 128]), (16, 14, [128, 256]), stride=2),
    # 5×5 and few channels
    *_probes(_convolutions, (32, 28, [8] * 3), (32, 20, [5, 10, 20]), kernel=5, channels=1),
    *_probes(_convolutions, (4, 20, [5, 10]), kernel=5, channels=1),
    *_probes(_convolutions, (32, 14, [32] * 3), kernel=5),
    # 1×1, alternately wide and narrow
    *_probes(_convolutions, (8, 48, [24, 144] * 2), (16, 24, [32, 192] * 2), kernel=1),
    *_probes(_convolutions, (16, 12, [64, 384] * 2), (16, 6, [160, 960] * 2), kernel=1),
    *_probes(_convolutions, (32, 3, [160, 960] * 2), (8, 28, [256, 64] * 2), kernel=1),
    *_probes(_convolutions, (8, 14, [512, 128] * 2), kernel=1),
    *_probes(_convolutions, (16, 12, [64, 384] * 2), kernel=1, norm=True),
    # depthwise
    *_probes(_depthwise, (8, 48, 96), (16, 24, 144), (16, 12, 384), (16, 6, 960), (32, 3, 960)),
    *_probes(_depthwise, (16, 48, 96), stride=2, depth=1),
    *_probes(_depthwise, (8, 24, 144), kernel=5),
    *_probes(_depthwise, (16, 12, 384), norm=True),
    # elementwise
    *_probes(_elementwise, (16, 56, 32, "norm"), (16, 28, 128, "norm"), (32, 7, 512, "norm")),
    *_probes(_elementwise, (16, 4, 64, "norm"), depth=16),
    *_probes(_elementwise, (2, 4, 16, "norm"), depth=8),
    *_probes(_elementwise, (16, 28, 128, "add")),
    *_probes(_elementwise, (16, 28, 32, "join"), depth=3),
    *_probes(_elementwise, (8, 28, 64, "pool"), (16, 32, 64, "halve")),
    # dense layers, and steps with hardly any computation
    *_probes(_dense, (32, 512, 512, 4), (32, 1024, 2048, 3), (128, 1024, 1024, 3)),
    *_probes(_dense, (16, 512, 4096, 2), (16, 128, 128, 10), (8, 64, 32, 1), (8, 64, 32, 5)),
    *_probes(_convolutions, (16, 8, [8, 8]), channels=1),
)
