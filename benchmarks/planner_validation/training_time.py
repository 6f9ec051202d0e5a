"""Predicts the time of a training from the phases in its recipe.

Older software was slower or faster than the software that the constants are fitted to. The ratio
comes from published rates of other trainings with the same GPU, model, and kind of software, in
`tables/software_rates.csv` and `tables/scaling.csv`. They exclude the trainings to predict.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from benchmarks.planner_validation import TABLES
from benchmarks.planner_validation.published import (
    PublishedRate,
    gradients_of,
    input_of,
    known_rates,
    precision_name,
    setup_of,
    specified_micro_step_seconds,
)
from benchmarks.planner_validation.training_recipes import Phase, Recipe, from_zero
from kdist.planner.cost.constants import Constants
from kdist.planner.cost.setup import Gradients, InputWork
from kdist.planner.cost.step import infer_micro_step_seconds, step_seconds
from kdist.planner.tables.gpus import find_gpu
from kdist.planner.tables.machines import Machine, known_machines
from kdist.planner.tables.read import Reader, count, number, read_table, text

IMAGENET_EXAMPLES = 1_281_167

# Mean aspect ratio of ImageNet's images: 500 x 375.
_ASPECT = 4 / 3
# Share of the forward pass in a training step; the backward pass computes twice as much.
_FORWARD_SHARE = 1 / 3
# Largest assumed ratio of a library's time to load images to the predicted time.
_SLOWEST_LOADER = 20.0

_RATE_COLUMNS: Mapping[str, Reader] = {
    "machine": text,
    "framework": text,
    "model": text,
    "n_gpus": count,
    "per_gpu_batch": number,
    "examples_per_s": number,
    "precision": precision_name,
    "data": text,
    "validated": from_zero,
    "source": text,
    "date": text,
}


def training_seconds(
    recipe: Recipe,
    machine: str,
    devices: int,
    machines: Mapping[str, Machine],
    constants: Constants,
) -> float:
    """Returns the duration of a training on ImageNet, including its validation.

    Args:
        recipe: phases of the training.
        machine: a name in `machines`.
        devices: number of devices.
        machines: name -> machine.
        constants: constants of exchange and input.

    Raises:
        ValueError: the machine, or the arithmetic of the model or the GPU, is unknown, or no rate
            of similar software is published.
    """
    first = recipe.phases[0]
    rate = _as_rate(recipe, first, machine, devices)
    kind = _kind_of_computing(setup_of(rate, machines).machine.gpu, recipe.precision)
    slower = _computing_slower(recipe.like, rate.family, kind, constants)
    loader = _loading_slower(recipe.like, rate.family, kind, slower, constants)
    if recipe.whole_cores is not None:
        own = dataclasses.replace(machines[machine], cores_are_vcpus=not recipe.whole_cores)
        machines = {**machines, machine: own}
    return sum(
        phase.epochs
        * _epoch_seconds(
            _as_rate(recipe, phase, machine, devices), phase, machines, constants, slower, loader
        )
        for phase in recipe.phases
    )


def _as_rate(recipe, phase, machine, devices) -> PublishedRate:
    """Returns a phase as a row of the table of rates, whose rate is unknown."""
    return PublishedRate(
        machine=machine,
        model=f"{recipe.model} {phase.pixels}px",
        framework=recipe.framework,
        gpu="",
        devices=devices,
        local_batch=phase.local_batch,
        rate=math.nan,
        precision=recipe.precision,
        data="real",
        note="",
    )


def _epoch_seconds(rate, phase, machines, constants, slower, loader) -> float:
    """Returns the duration of an epoch and the validation after it.

    Args:
        rate: a result of `_as_rate`.
        phase: the phase of the epoch.
        machines: name -> machine.
        constants: constants of exchange and input.
        slower: ratio of the time of computation to the predicted time.
        loader: ratio of the time to load an image to the predicted time.
    """
    setup = setup_of(rate, machines)
    computing = slower * specified_micro_step_seconds(rate, setup)
    work = _loaded(input_of(rate), phase, loader)
    training = step_seconds(setup, gradients_of(rate), work, computing, constants)
    seconds = IMAGENET_EXAMPLES / training.rate
    if phase.validated:
        forward = step_seconds(setup, Gradients(0.0), work, _FORWARD_SHARE * computing, constants)
        seconds += phase.validated / forward.rate
    return seconds


def _loaded(work: InputWork, phase: Phase, loader: float) -> InputWork:
    """Returns the host's work for images of another stored size, loaded by slower software."""
    stored = work.source_megapixels
    if phase.stored_pixels:
        stored = phase.stored_pixels**2 * _ASPECT / 1e6
    return dataclasses.replace(
        work,
        source_megapixels=loader * stored,
        model_megapixels=loader * work.model_megapixels,
        host_bytes=work.bytes_to_device,  # The same as without the ratio.
    )


@functools.lru_cache(maxsize=64)
def _computing_slower(like: str, family: str, kind: tuple, constants: Constants) -> float:
    """Returns the geometric mean of published to predicted computation for similar software.

    Raises:
        ValueError: there is no such rate.
    """
    machines = known_machines()
    found = [
        _measured_micro_step(rate, machines, constants)
        / specified_micro_step_seconds(rate, setup_of(rate, machines))
        for rate in [*known_rates(), *_software_rates("synthetic", "real")]
        if _is_like(rate, like, family, kind, machines)
    ]
    if not found:
        raise ValueError(f"no rate of {family} by {like} is published for such a GPU and precision")
    return math.exp(sum(map(math.log, found)) / len(found))


@functools.lru_cache(maxsize=64)
def _loading_slower(
    like: str, family: str, kind: tuple, slower: float, constants: Constants
) -> float:
    """Returns the ratio of the time to load an image to the predicted time, from a whole training.

    Benchmarks of few steps prefetch their examples, but whole trainings load them. The ratio is 1
    if no whole training is published, or if it was as fast as predicted.
    """
    machines = known_machines()
    for rate in _software_rates("training"):
        if not _is_like(rate, like, family, kind, machines):
            continue
        phase = Phase(1, 224, rate.local_batch, None, _validated()[rate])
        published = IMAGENET_EXAMPLES / rate.rate

        def seconds(loader, rate=rate, phase=phase):
            return _epoch_seconds(rate, phase, machines, constants, slower, loader)

        return _where_reached(seconds, published, 1.0, _SLOWEST_LOADER)
    return 1.0


def _is_like(rate, like, family, kind, machines):
    """Returns whether a rate has this software, family, kind of GPU, and precision."""
    gpu = rate.gpu or machines[rate.machine].gpu
    computes = _kind_of_computing(gpu, rate.precision)
    return (rate.framework, rate.family, computes) == (like, family, kind)


def _where_reached(increasing, value: float, least: float, most: float) -> float:
    """Returns where an increasing function reaches a value, by bisection, or the nearest end."""
    if increasing(least) >= value:
        return least
    for _ in range(40):
        middle = math.sqrt(least * most)
        least, most = (middle, most) if increasing(middle) < value else (least, middle)
    return math.sqrt(least * most)


@functools.cache
def _validated() -> dict[PublishedRate, int]:
    """Returns the rows of `tables/software_rates.csv` -> images validated after each epoch."""
    return {
        PublishedRate(
            machine=row["machine"],
            model=row["model"],
            framework=row["framework"],
            gpu="",
            devices=row["n_gpus"],
            local_batch=row["per_gpu_batch"],
            rate=row["examples_per_s"],
            precision=row["precision"],
            # A whole training loads real data.
            data="real" if row["data"] == "training" else row["data"],
            note=row["data"],
            source=row["source"],
        ): row["validated"]
        for row in read_table(TABLES / "software_rates.csv", _RATE_COLUMNS)
    }


def _software_rates(*kinds: str) -> Sequence[PublishedRate]:
    """Returns the rows of `tables/software_rates.csv` with these values of `data`."""
    return [rate for rate in _validated() if rate.note in kinds]


def _measured_micro_step(rate: PublishedRate, machines, constants) -> float:
    """Returns the compute time that a published rate implies."""
    setup = setup_of(rate, machines)
    return infer_micro_step_seconds(setup, gradients_of(rate), input_of(rate), rate.rate, constants)


def _kind_of_computing(gpu: str, precision: str) -> tuple:
    """Returns a key of the compute speed, the same for boards that differ only in memory."""
    found = find_gpu(gpu)
    if found is None:
        raise ValueError(f"the GPU {gpu!r} is unknown")
    half = precision in ("fp16", "amp", "bf16") and found.fp16_tensor_cores
    return found.float32_tflops, found.bandwidth_gb_s, half
