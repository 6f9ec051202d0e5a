"""What the builders share: precision, input and output layers, BatchNorm."""

import contextlib
import functools
import inspect
from collections.abc import Sequence

import keras

from kdist.backend import is_tensorflow
from kdist.model import JaxFunctional, Model

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float64")


def builder(build):
    """Decorator: the builder's layers get the dtype policy of its argument `precision`.

    The global policy is as before when the builder returns or raises.

    Raises:
        ValueError: a precision that is none of `PRECISIONS`.
    """

    @functools.wraps(build)
    def build_with_precision(*arguments, precision: str = "float32", **options):
        with _dtype_policy(precision):
            return build(*arguments, **options)

    # `wraps` alone would show the builder's own signature, without the argument added here.
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
        raise ValueError(f"precision={precision!r}; take one of {', '.join(PRECISIONS)}")
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
    """The input layer for images, and the images scaled on the device.

    Args:
        input_shape: (H, W, C).
        rescale: the factor for pixels from 0 to 255; None takes them as they are.
        smallest: the smallest height and width that the model can take.
        offset: is added after scaling.
        fixed_size: whether height and width must be given, as a model that flattens images needs;
            otherwise they may be None, for images of any size.

    Returns:
        The input, and the tensor to go on with, both (B, H, W, C).

    Raises:
        ValueError: `input_shape` is not (H, W, C), or smaller than `smallest`, or not fixed.
    """
    if len(input_shape) != 3 or not input_shape[2]:
        raise ValueError(
            f"input_shape={tuple(input_shape)}: images are (height, width, channels), with at "
            "least 1 channel; give for example (28, 28, 1)"
        )
    if fixed_size and None in input_shape:
        raise ValueError(
            f"input_shape={tuple(input_shape)}: this model needs a fixed height and width; "
            "give numbers, or take resnet18, inception or mobilenet_v2"
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
    """A functional model: a `kdist.Model`; a `keras.Model` where Keras computes with JAX."""
    return (Model if is_tensorflow() else JaxFunctional)(inputs, outputs, name=name)


def probabilities(features, num_classes: int, initializer="glorot_uniform"):
    """Class probabilities (B, num_classes) from features (B, F), in float32.

    The softmax is a layer of its own, so that Keras finds the logits before it and computes the
    cross-entropy from them, which stays finite for logits of any size.
    """
    if num_classes < 2:
        raise ValueError(
            f"num_classes={num_classes}: there must be at least 2 classes; give num_classes=2 for "
            "a yes-or-no question"
        )
    logits = keras.layers.Dense(
        num_classes, kernel_initializer=initializer, dtype="float32", name="logits"
    )(features)
    return keras.layers.Activation("softmax", dtype="float32", name="probabilities")(logits)


def batch_norm(sync_batch_norm: bool, name: str | None = None):
    """BatchNormalization as PyTorch and d2l have it: momentum 0.9 in Keras's sense, epsilon 1e-5.

    Args:
        sync_batch_norm: whether mean and variance are taken over all replicas.
        name: the layer's.
    """
    return keras.layers.BatchNormalization(
        momentum=0.9, epsilon=1e-5, synchronized=is_synchronized(sync_batch_norm), name=name
    )


def is_synchronized(sync_batch_norm: bool) -> bool:
    """What a BatchNormalization is told; on JAX it has the whole batch, and must not be asked."""
    return sync_batch_norm and is_tensorflow()
