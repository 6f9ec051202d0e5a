"""What of the models in tables of published rates matters to exchange and input.

find_model("resnet-50 v2").parameters   # 2.56e7
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from kdist.planner.tables import count, number, read_own_table, text

BYTES_PER_NUMBER = 4  # float32
_SIZE_OF_IMAGES = re.compile(r"\b(\d+) ?px\b")
# Data sets that are loaded as arrays, and the side and channels of their images.
_ARRAYS = re.compile(r"(?:fashion[-_ ]?|[ek])?mnist|cifar[-_ ]?(?:100?)?", re.IGNORECASE)
_MNIST, _CIFAR = (28, 1), (32, 3)


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """What of a model matters to exchange and input.

    Attributes:
        name: in `tables/published_models.csv`.
        parameters: numbers in all weights.
        source_megapixels: 10⁶ pixels of an image of its data; 0 where these are no images.
        model_megapixels: 10⁶ pixels of its input.
        largest_share: of the parameters in the largest tensor.
        layers: with parameters.
        policy: whether it is trained with an augmentation policy.
        masks: whether its data have instance masks.
    """

    name: str
    parameters: float
    source_megapixels: float
    model_megapixels: float
    largest_share: float
    layers: int
    policy: bool = False
    masks: bool = False


UNKNOWN_MODEL = PublishedModel("unknown", 25e6, 0.19, 0.224**2, 0.1, 100)


@functools.cache
def published_models() -> tuple[PublishedModel, ...]:
    """All rows of `tables/published_models.csv`."""
    columns: dict[str, Callable[[str], Any]] = {
        "model": text,
        "parameters_millions": number,
        "source_megapixels": float,
        "input_pixels": float,
        "largest_share": number,
        "layers": count,
        "policy": lambda cell: cell == "yes",
        "masks": lambda cell: cell == "yes",
    }
    rows = [list(row.values()) for row in read_own_table("published_models.csv", columns)]
    return tuple(
        PublishedModel(name, millions * 1e6, source, side * side / 1e6, *others)
        for name, millions, source, side, *others in rows
    )


@functools.cache
def find_model(name: str) -> PublishedModel | None:
    """The model that a table means, such as "ResNet50" or "resnet-50 v1.5"; None if not known.

    A name may go on after that of the model; a number in it may not. Pixels in it ("512px") are
    those of the model's input, and a data set ("CIFAR-10") is passed over.
    """
    pixels = _SIZE_OF_IMAGES.search(name.lower())
    plain = _ARRAYS.sub(" ", _SIZE_OF_IMAGES.sub(" ", name.lower()))
    wanted = re.sub(r"[^a-z0-9 ]", "", plain).strip()
    for model in sorted(published_models(), key=lambda model: -len(model.name)):
        letters = re.sub(r"[^a-z0-9]", "", model.name.lower())
        if re.match(" *".join(letters) + r"(?!\d)", wanted):
            return _at_size(model, pixels)
    return _from_workload(name)


def family_of(name: str) -> str:
    """The model that a table means, whatever it was trained for; the name itself if not known."""
    model = find_model(name)
    return model.name if model else name


def array_shape(words: str) -> tuple[int, int] | None:
    """Side and channels of the images of a data set that is loaded as arrays: MNIST's and CIFAR's.

    Args:
        words: that name it, among others.

    Returns:
        None where they name no such data set.
    """
    named = _ARRAYS.search(words)
    if not named:
        return None
    return _MNIST if "mnist" in named[0].lower() else _CIFAR


def workload_name(model: str, data: str = "") -> str:
    """The name by which `known_workload` finds a model on its data.

    Args:
        model: as a table names it, "ResNet-18 Fashion-MNIST" or "ResNet-50 512px".
        data: as the table names it; of MNIST and CIFAR the size of images follows.
    """
    from kdist.planner.known import known_workload

    shape = array_shape(f"{model} {data}")
    if shape is None:
        return model
    at_size = f"{_ARRAYS.sub(' ', model).strip(' -_')} {shape[0]}px"
    try:  # Some are known by the names of both, as "resnet18_cifar10".
        return known_workload(model).name if array_shape(model) else at_size
    except ValueError:
        return at_size


def _at_size(model, pixels):
    """The model on square images of as many pixels a side as a match says."""
    if not (pixels and model.model_megapixels):
        return model
    return dataclasses.replace(model, model_megapixels=int(pixels[1]) ** 2 / 1e6)


def _from_workload(name):
    """A model of which a workload is known, taken as one of images where its input is one."""
    try:
        from kdist.planner.known import known_workload

        workload = known_workload(workload_name(name))
    except (ImportError, ValueError, KeyError):
        return None
    if workload is None or not workload.trainable_parameters:
        return None
    largest = max(layer.trainable_parameters for layer in workload.layers)
    image = len(workload.input_shape) == 3
    area = workload.input_shape[0] * workload.input_shape[1] / 1e6 if image else 0.0
    return PublishedModel(
        name=name,
        parameters=workload.trainable_parameters,
        source_megapixels=0.19 if image else 0.0,
        model_megapixels=area,
        largest_share=largest / workload.trainable_parameters,
        layers=sum(layer.trainable_parameters > 0 for layer in workload.layers),
    )
