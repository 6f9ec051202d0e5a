"""Models to serve, exported once, with examples and correct predictions."""

import os
import pathlib

import numpy as np

from benchmarks.serving.examples import Examples

EXAMPLES = 128
_SEED = 0


def small_resnet(input_shape=(28, 28, 1), num_classes=10):
    """A ResNet of three blocks with 16, 32 and 64 channels: pixels (B, H, W, C) to (B, classes).

    A call with 28×28 pixels takes about a millisecond on two cores.
    """
    import keras

    layers = keras.layers
    inputs = keras.Input(input_shape, name="pixels")
    x = layers.Rescaling(1 / 255)(inputs)
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        shortcut = x if strides == 1 else layers.Conv2D(filters, 1, strides)(x)
        x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.0)(x))
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(momentum=0.0)(x)
        x = layers.ReLU()(layers.add([x, shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.Dense(num_classes, activation="softmax")(x)
    return keras.Model(inputs, outputs, name="small_resnet")


def mobilenet_v2():
    """Keras's MobileNetV2 with random weights: pixels (B, 96, 96, 3) to (B, 1000)."""
    import keras

    inputs = keras.Input((96, 96, 3), name="pixels")
    body = keras.applications.MobileNetV2((96, 96, 3), weights=None, classifier_activation=None)
    for layer in body.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
    outputs = body(keras.layers.Rescaling(1 / 127.5, offset=-1.0)(inputs))
    return keras.Model(inputs, outputs, name="mobilenet_v2")


MODELS = {model.__name__: model for model in (small_resnet, mobilenet_v2)}
INPUT_NAME = "inputs"  # what `export` calls it


def prepared(name: str, directory: str | os.PathLike) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns (directory of a model, file of its examples); creates them if needed.

    BatchNorm statistics are computed from the examples. With those of a new model, a deep model
    would predict the same for every input, and wrong responses would go unnoticed.
    """
    directory = pathlib.Path(directory)
    models, examples = directory / name, directory / f"{name}.npz"
    if examples.exists():
        return models, examples
    import keras

    from kdist.serving.exporting.export import export

    keras.utils.set_random_seed(_SEED)
    model = MODELS[name]()
    inputs = _pictures(model.input_shape[1:])
    model(inputs, training=True)  # momentum 0: these become the statistics
    export(model, models)
    predictions = np.concatenate([model(row[None], training=False) for row in inputs])
    Examples(inputs.astype(np.uint8), predictions).save(examples)
    return models, examples


def _pictures(shape):
    """Returns integer images `(EXAMPLES, …)` from 0 to 255: waves of various lengths and angles."""
    generator = np.random.default_rng(_SEED)
    rows, columns = np.mgrid[0 : shape[0], 0 : shape[1]] / shape[0]
    pictures = np.empty((EXAMPLES, *shape))
    for picture in pictures:
        for channel in range(shape[2]):
            down, right, phase = generator.uniform(-12, 12, 3)
            wave = np.sin(down * rows + right * columns + phase)
            picture[..., channel] = wave * generator.uniform(0.2, 1)
    pictures += generator.normal(0, 0.1, pictures.shape)
    return np.clip(pictures * 127 + 128, 0, 255).astype(np.uint8).astype(np.float32)
