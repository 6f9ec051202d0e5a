"""Operations on single images, composed by name or by call.

    kdist.data.load("cats_vs_dogs", batch=batch, operations="resize(160, 160)|random_flip()")
    kdist.data.load("fashion_mnist", batch=batch, operations=(random_crop(28, 28, padding=4),))

An operation maps one image (H, W, C) to another of the same dtype. A random operation also receives
a seed that depends only on the run's seed, the epoch, and the example, so that its results are the
same in every layout.

The text of operations is parsed without TensorFlow, which only applying them imports.
"""

import ast
import dataclasses
from collections.abc import Callable, Sequence

# Largest side of an image, in pixels. Such an image takes a gigabyte.
_MAX_SIDE = 16_384


@dataclasses.dataclass(frozen=True)
class ImageOperation:
    """One step of an input pipeline."""

    name: str  # the call that creates it, such as `resize(160, 160)`
    # Function image -> image, or (image, seed) -> image for a random operation. The seed is int32
    # (2,).
    apply: Callable
    is_random: bool = False  # the result differs between epochs; evaluation skips it
    # (H, W) of the result, or None if it equals that of the input
    size: tuple[int, int] | None = None
    min_size: tuple[int, int] = (1, 1)  # smallest (H, W) of an input


def resize(height: int, width: int) -> ImageOperation:
    """Returns a bilinear resize, with antialiasing; integer pixels are rounded."""

    def apply(image):
        import tensorflow as tf

        resized = tf.image.resize(image, (height, width), antialias=True)
        is_whole = image.dtype.is_integer
        return tf.saturate_cast(tf.round(resized) if is_whole else resized, image.dtype)

    _check_size(height, width)
    return ImageOperation(f"resize({height}, {width})", apply, size=(height, width))


def central_crop(height: int, width: int) -> ImageOperation:
    """Returns a crop of the center, which pads smaller images with black pixels."""

    def apply(image):
        import tensorflow as tf

        return tf.image.resize_with_crop_or_pad(image, height, width)

    _check_size(height, width)
    return ImageOperation(f"central_crop({height}, {width})", apply, size=(height, width))


def random_crop(height: int, width: int, padding: int = 0) -> ImageOperation:
    """Returns a crop at a random position, after adding `padding` black pixels on each side."""

    def apply(image, seed):
        import tensorflow as tf

        padded = tf.pad(image, [[padding, padding], [padding, padding], [0, 0]])
        size = (height, width, image.shape[-1])
        return tf.image.stateless_random_crop(padded, size, seed)

    _check_size(height, width)
    _check_pixels("padding", padding, 0)
    name = f"random_crop({height}, {width}, {padding})"
    min_size = height - 2 * padding, width - 2 * padding
    return ImageOperation(name, apply, is_random=True, size=(height, width), min_size=min_size)


def random_flip() -> ImageOperation:
    """Returns a horizontal flip with a probability of one half."""

    def apply(image, seed):
        import tensorflow as tf

        return tf.image.stateless_random_flip_left_right(image, seed)

    return ImageOperation("random_flip()", apply, is_random=True)


BY_NAME = {
    operation.__name__: operation for operation in (resize, central_crop, random_crop, random_flip)
}
_CALLS = ", ".join(f"{name}(…)" for name in BY_NAME)


def as_operations(operations: str | Sequence[ImageOperation]) -> tuple[ImageOperation, ...]:
    """Returns operations from text such as `"resize(160, 160)|random_flip()"`, or unchanged.

    Raises TypeError if an item is not an `ImageOperation`, and ValueError if the text names an
    unknown operation or has invalid arguments.
    """
    if isinstance(operations, str):
        return tuple(_parse_one(part.strip()) for part in operations.split("|") if part.strip())
    if isinstance(operations, ImageOperation):
        return (operations,)
    for operation in operations:
        if not isinstance(operation, ImageOperation):
            raise TypeError(
                f"{operation!r} is not an operation; pass text such as 'random_flip()', or calls "
                f"of kdist.data.operations: {_CALLS}"
            )
    return tuple(operations)


def _parse_one(text):
    usage = f"{text!r} is not an operation; available are {_CALLS}"
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(usage) from error
    if not isinstance(call, ast.Call) or getattr(call.func, "id", None) not in BY_NAME:
        raise ValueError(usage)
    try:
        arguments = [ast.literal_eval(argument) for argument in call.args]
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return BY_NAME[call.func.id](*arguments, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{text!r}: {error}; arguments are numbers, as in resize(160, 160)"
        ) from error


def _check_size(height, width):
    _check_pixels("height", height, 1)
    _check_pixels("width", width, 1)


def _check_pixels(name, number, lower_bound):
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{name} must be an integer number of pixels, got {number!r}")
    if not lower_bound <= number <= _MAX_SIDE:
        raise ValueError(f"{name}={number} must be from {lower_bound} to {_MAX_SIDE} pixels")
