"""What is done to each image, one line each, composed by name.

    kdist.data.load("cats_vs_dogs", batch=batch, operations="resize(160, 160)|random_flip()")
    kdist.data.load("fashion_mnist", batch=batch, operations=(random_crop(28, 28, padding=4),))

An operation maps one image (H, W, C) to one; random ones also take a seed, which follows from the
run's seed, the epoch and the example, so that they give the same in every layout. Images keep
their type: uint8 stays uint8.
"""

import ast
import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Operation:
    """A step of a pipeline.

    Attributes:
        name: how it was written, as `resize(160, 160)`.
        apply: image -> image, or (image, seed) -> image where it is random; a seed is int32 (2,).
        is_random: whether it differs from epoch to epoch; such are left out in evaluation.
        size: the (H, W) that comes out, or None if that of the image.
        smallest: the (H, W) that an image needs at least; (1, 1) where any will do.
    """

    name: str
    apply: Callable
    is_random: bool = False
    size: tuple[int, int] | None = None
    smallest: tuple[int, int] = (1, 1)


def resize(height: int, width: int) -> Operation:
    """Bilinear, with antialiasing where the image shrinks; rounded back to whole pixels."""

    def apply(image):
        resized = tf.image.resize(image, (height, width), antialias=True)
        is_whole = image.dtype.is_integer
        return tf.saturate_cast(tf.round(resized) if is_whole else resized, image.dtype)

    _check_size(height, width)
    return Operation(f"resize({height}, {width})", apply, size=(height, width))


def central_crop(height: int, width: int) -> Operation:
    """The middle of the image; filled up with black where it is smaller."""
    _check_size(height, width)
    return Operation(
        f"central_crop({height}, {width})",
        lambda image: tf.image.resize_with_crop_or_pad(image, height, width),
        size=(height, width),
    )


def random_crop(height: int, width: int, padding: int = 0) -> Operation:
    """A part of the image, anywhere, after adding `padding` black pixels on each side."""

    def apply(image, seed):
        padded = tf.pad(image, [[padding, padding], [padding, padding], [0, 0]])
        size = (height, width, image.shape[-1])
        return tf.image.stateless_random_crop(padded, size, seed)

    _check_size(height, width)
    if padding < 0:
        raise ValueError(f"random_crop: padding={padding} cannot be negative")
    name = f"random_crop({height}, {width}, {padding})"
    smallest = height - 2 * padding, width - 2 * padding
    return Operation(name, apply, is_random=True, size=(height, width), smallest=smallest)


def random_flip() -> Operation:
    """Left and right are exchanged in half of the images."""
    return Operation("random_flip()", tf.image.stateless_random_flip_left_right, True)


BY_NAME = {
    operation.__name__: operation for operation in (resize, central_crop, random_crop, random_flip)
}


def parse(text: str) -> tuple[Operation, ...]:
    """Operations from `"resize(160, 160)|random_flip()"`; none from an empty text.

    Raises:
        ValueError: an unknown name, or arguments that the operation does not take.
    """
    return tuple(_parse_one(part.strip()) for part in text.split("|") if part.strip())


def _parse_one(text):
    usage = f"{text!r} is no operation; there are {', '.join(f'{name}(…)' for name in BY_NAME)}"
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError as error:
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


def check(operations: str | Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations of a text, or these operations themselves if they are such.

    Raises:
        TypeError: something else than operations.
        ValueError: as `parse`.
    """
    if isinstance(operations, str):
        return parse(operations)
    if isinstance(operations, Operation):
        return (operations,)
    for operation in operations:
        if not isinstance(operation, Operation):
            raise TypeError(
                f"{operation!r} is no operation; give a text such as 'random_flip()', or calls of "
                f"kdist.data.operations: {', '.join(f'{name}(…)' for name in BY_NAME)}"
            )
    return tuple(operations)


def _check_size(height, width):
    for name, size in (("height", height), ("width", width)):
        if not isinstance(size, int):
            raise TypeError(f"{name} must be a whole number of pixels, got {size!r}")
        if size < 1:
            raise ValueError(f"{name}={size}: it must be at least 1 pixel")
