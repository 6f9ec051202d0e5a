"""Sizes of published models: their gradients and their input.

find_model("resnet-50 v2").parameters   # 2.56e7
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from benchmarks.planner_validation import TABLES
from kdist.planner.cost.compute import micro_step_time, work_totals
from kdist.planner.cost.constants import ComputeConstants, known_compute_constants
from kdist.planner.tables.gpus import find_gpu
from kdist.planner.tables.read import count, number, read_table, text
from kdist.planner.workload.layers import known_workload

BYTES_PER_NUMBER = 4  # float32
_SIZE_OF_IMAGES = re.compile(r"\b(\d+) ?px\b")
# Data sets that are loaded as arrays, and the side length and channels of their images.
_ARRAYS = re.compile(r"(?:fashion[-_ ]?|[ek])?mnist|cifar[-_ ]?(?:100?)?", re.IGNORECASE)
_MNIST, _CIFAR = (28, 1), (32, 3)


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """Sizes of a published model's gradients and input.

    Attributes:
        name: name in `tables/published_models.csv`.
        parameters: number of parameters.
        source_megapixels: 10⁶ pixels of a stored image; 0 if the data is not images.
        model_megapixels: 10⁶ pixels of the model's input.
        largest_share: share of the parameters in the largest tensor.
        layers: number of layers with parameters.
        policy: whether training uses an augmentation policy.
        masks: whether the data has instance masks.
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
    """Returns all rows of `tables/published_models.csv`."""
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
    rows = [list(row.values()) for row in read_table(TABLES / "published_models.csv", columns)]
    return tuple(
        PublishedModel(name, millions * 1e6, source, side * side / 1e6, *others)
        for name, millions, source, side, *others in rows
    )


@functools.cache
def find_model(name: str) -> PublishedModel | None:
    """Returns the model of a name such as "ResNet50" or "resnet-50 v1.5"; None if unknown.

    Text may follow the model's name, but its number must end there. Pixels in the name ("512px")
    set the size of the input; data sets ("CIFAR-10") are ignored.
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
    """Returns the name of the model without its data set; the name itself if unknown."""
    model = find_model(name)
    return model.name if model else name


def array_shape(words: str) -> tuple[int, int] | None:
    """Returns (side, channels) of images that are loaded as arrays, of MNIST or CIFAR.

    Args:
        words: text that may contain the name of the data set.

    Returns:
        None if the text names no such data set.
    """
    named = _ARRAYS.search(words)
    if not named:
        return None
    return _MNIST if "mnist" in named[0].lower() else _CIFAR


def workload_name(model: str, data: str = "") -> str:
    """Returns the name of a model and its image size for `known_workload`.

    Args:
        model: name in a table, such as "ResNet-18 Fashion-MNIST" or "ResNet-50 512px".
        data: name of the data in a table; MNIST and CIFAR determine the size of images.
    """
    shape = array_shape(f"{model} {data}")
    if shape is None:
        return model
    at_size = f"{_ARRAYS.sub(' ', model).strip(' -_')} {shape[0]}px"
    try:  # Some workloads have both in their names, such as "resnet18_cifar10".
        return known_workload(model).name if array_shape(model) else at_size
    except ValueError:
        return at_size


def _at_size(model, pixels):
    """Returns the model with square images of the matched side length."""
    if not (pixels and model.model_megapixels):
        return model
    return dataclasses.replace(model, model_megapixels=int(pixels[1]) ** 2 / 1e6)


def _from_workload(name):
    """Returns a model from its known workload; inputs with three dimensions are images."""
    try:
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


_POLICIES = {
    "fp32": "float32",
    "tf32": "float32",
    "amp": "mixed_float16",
    "fp16": "mixed_float16",
    "bf16": "mixed_bfloat16",
}
# Published rates name only the model: NVIDIA trains EfficientNetV2-S on smaller images than it
# evaluates.
_TRAINING_WORKLOADS = {"EfficientNetV2-S": "EfficientNetV2-S 300px"}


def published_compute_seconds(
    model: str,
    gpu: str,
    precision: str,
    local_batch: float,
    framework: str,
    *,
    accumulate: int = 1,
    constants: ComputeConstants | None = None,
) -> float | None:
    """Returns `compute_seconds` for names as in tables of published rates.

    Args:
        model: Such as `"ResNet-50 v1.5"`, see `known_workload`.
        gpu: Such as `"V100 SXM2 32GB"`, see `find_gpu`.
        precision: `"fp32"` or `"tf32"`, both TF32 if the GPU has it; `"amp"`, `"fp16"`, `"bf16"`.
        local_batch: Examples of the micro-step.
        framework: Such as `"TF2 Keras Horovod XLA"`, of which only XLA counts.
        accumulate: Micro-steps that share an update. Defaults to 1.
        constants: Defaults to `known_compute_constants()`.

    Returns:
        Seconds; `None` if the model, the GPU or its bandwidth, or the precision is unknown.
    """
    policy = _POLICIES.get(precision.lower())
    found = _find(model, gpu)
    if policy is None or found is None:
        return None
    constants = constants or known_compute_constants()
    xla = "xla" in framework.lower()
    work, device = found
    return micro_step_time(work, device, local_batch, policy, xla, accumulate, constants).seconds


@functools.lru_cache(maxsize=1024)
def _find(model, gpu):
    """Returns the totals of a model and a GPU by name; `None` if one of them is unknown."""
    found = find_gpu(gpu)
    if found is None or not found.bandwidth_gb_s or not found.float32_tflops:
        return None
    try:
        workload = known_workload(_TRAINING_WORKLOADS.get(model, model))
    except ValueError:
        return None
    return work_totals(workload), found
