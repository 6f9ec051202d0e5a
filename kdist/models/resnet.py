"""ResNet-18 for small images, as in *Dive into Deep Learning*, section 13.6.

model = kdist.models.resnet18(input_shape=(28, 28, 1), num_classes=10)
"""

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
    initializer: str | keras.initializers.Initializer = "glorot_uniform",
    sync_batch_norm: bool = False,
    rescale: float | None = 1 / 255,
    name: str = "resnet18",
) -> Model:
    """Four stages of two residual blocks: pixels (B, H, W, C) to (B, num_classes).

    The stem is one 3×3 convolution without max pooling; stages have 64, 128, 256, 512 channels,
    and all but the first begin by halving height and width, with a 1×1 convolution on the
    shortcut. Convolutions have biases. At 28×28×1 and 10 classes it has 11,175,818 trainable
    parameters.

    Args:
        input_shape: (H, W, C), at least 8 × 8 pixels; H and W may be None.
        num_classes: at least 2.
        initializer: of convolutions and dense layer: `"glorot_uniform"` (Keras's, the default),
            `"he_normal"`, `"normal_0.01"` as in d2l, or a Keras initializer without a seed.
        sync_batch_norm: statistics over all replicas. Defaults to False.
        rescale: factor for the pixels; None for none. Defaults to 1/255.
        name: the model's.
        precision: Keras's dtype policy. Defaults to float32.

    Raises:
        ValueError: a shape, number of classes, initializer or precision that cannot be.
    """
    new_initializer = _initializer_factory(initializer)
    inputs, x = pixels(input_shape, rescale, smallest=8)
    layers = _Layers(new_initializer, sync_batch_norm)
    x = layers.convolution(64, 3, name="stem_conv")(x)
    x = layers.norm_relu(x, "stem")
    for stage, filters in enumerate((64, 128, 256, 512), start=1):
        for block in (1, 2):
            halve = stage > 1 and block == 1
            x = layers.residual(x, filters, halve, f"stage{stage}_block{block}")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    outputs = probabilities(x, num_classes, new_initializer())
    return model(inputs, outputs, name=name)


def _initializer_factory(initializer):
    """A function that makes a new initializer at each call."""
    if not isinstance(initializer, keras.initializers.Initializer):
        if initializer in INITIALIZERS:
            return INITIALIZERS[initializer]
        raise ValueError(
            f"initializer={initializer!r}; take one of {', '.join(INITIALIZERS)}, "
            "or an instance of keras.initializers.Initializer"
        )
    config = initializer.get_config()
    if config.get("seed") is not None:
        raise ValueError(
            f"initializer has seed={config['seed']}, which gives layers of equal shape equal "
            "weights; leave the seed out and call keras.utils.set_random_seed before building"
        )
    return lambda: type(initializer).from_config(config)


class _Layers:
    """Layers of one network: all initialised and normalised alike."""

    def __init__(self, new_initializer, sync_batch_norm):
        self._new_initializer = new_initializer
        self._sync_batch_norm = sync_batch_norm

    def convolution(self, filters, size, strides=1, name=None):
        # A new initializer each: one that is shared gives equal weights to layers of equal shape.
        return keras.layers.Conv2D(
            filters,
            size,
            strides,
            padding="same",
            kernel_initializer=self._new_initializer(),
            name=name,
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
