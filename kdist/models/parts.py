"""Common parts of the model builders: precision, input and output layers, normalization."""

import contextlib
import functools
import inspect
from collections.abc import Sequence

import keras

from kdist.compat.keras import is_tensorflow
from kdist.model import JaxFunctional, Model

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float64")


def builder(build):
    """Returns a builder with the argument `precision`, the dtype policy of its layers.

    The global dtype policy is restored when the builder returns or raises. The builder raises
    ValueError unless the precision is one of `PRECISIONS`.
    """

    @functools.wraps(build)
    def build_with_precision(*arguments, precision: str = "float32", **options):
        with _dtype_policy(precision):
            return build(*arguments, **options)

    # `wraps` alone would show the signature without the added argument.
    signature = inspect.signature(build)
    precision = inspect.Parameter(
        "precision", inspect.Parameter.KEYWORD_ONLY, default="float32", annotation=str
    )
    build_with_precision.__signature__ = signature.replace(
        parameters=[*signature.parameters.values(), precision]
    )
    return build_with_precision


@contextlib.contextmanager
def _dtype_policy(precision):
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}; use one of {', '.join(PRECISIONS)}")
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def pixels(
    input_shape: Sequence[int],
    rescale: float | None,
    smallest: int = 1,
    offset: float = 0.0,
    fixed_size: bool = False,
):
    """Returns the input layer of an image model, and the images scaled on the device: (B, H, W, C).

    Pixels are multiplied by `rescale` (None for raw pixels), and `offset` is added. Raises
    ValueError if `input_shape` is not (H, W, C), if height or width is below `smallest`, or if one
    of them is None although the model needs a `fixed_size`, as models do that flatten images.
    """
    if len(input_shape) != 3 or not input_shape[2]:
        raise ValueError(
            f"input_shape={tuple(input_shape)}: images are (height, width, channels), with at "
            "least 1 channel; use for example (28, 28, 1)"
        )
    if fixed_size and None in input_shape:
        raise ValueError(
            f"input_shape={tuple(input_shape)}: this model needs a fixed height and width; "
            "use numbers, or resnet18, inception, or mobilenet_v2"
        )
    if any(size is not None and size < smallest for size in input_shape[:2]):
        raise ValueError(
            f"input_shape={tuple(input_shape)} is too small for this model, which needs at least "
            f"{smallest} × {smallest} pixels; enlarge them with resize({smallest}, {smallest})"
        )
    inputs = keras.Input(tuple(input_shape), dtype="float32", name="pixels")
    if rescale is None:
        return inputs, inputs
    return inputs, keras.layers.Rescaling(rescale, offset, name="rescale")(inputs)


def model(inputs, outputs, name: str) -> keras.Model:
    """Returns a functional model: a `kdist.Model`, or with JAX a `keras.Model`."""
    return (Model if is_tensorflow() else JaxFunctional)(inputs, outputs, name=name)


def probabilities(features, num_classes: int, initializer="glorot_uniform"):
    """Returns class probabilities (B, num_classes) of features (B, F), in float32.

    Keras computes the cross-entropy from the logits before the separate softmax layer, which is
    finite for logits of any size.
    """
    if num_classes < 2:
        raise ValueError(
            f"num_classes={num_classes}: at least 2 classes are required; use num_classes=2 "
            "for a binary classification"
        )
    logits = keras.layers.Dense(
        num_classes, kernel_initializer=initializer, dtype="float32", name="logits"
    )(features)
    return keras.layers.Activation("softmax", dtype="float32", name="probabilities")(logits)


def batch_norm(sync_batch_norm: bool, name: str | None = None):
    """Returns BatchNormalization with PyTorch's defaults: Keras momentum 0.9, epsilon 1e-5.

    With `sync_batch_norm`, mean and variance are computed over all replicas.
    """
    return keras.layers.BatchNormalization(
        momentum=0.9, epsilon=1e-5, synchronized=is_synchronized(sync_batch_norm), name=name
    )


def is_synchronized(sync_batch_norm: bool) -> bool:
    """Returns the value of `synchronized`: with JAX the layer sees the whole batch anyway."""
    return sync_batch_norm and is_tensorflow()
