"""How long a training takes whose epochs are known one by one, as of `training_recipes`.

Software of years ago was slower than the software that the constants are fitted to, or faster. How
much, `tables/software_rates.csv` and `tables/scaling.csv` tell: by rates that others published of
other trainings with the same GPU, model and kind of software. No published time of a training that
is predicted is among them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from kdist.planner.constants import Constants
from kdist.planner.cost.setup import Gradients, InputWork
from kdist.planner.cost.step import micro_step_seconds_of, step_seconds
from kdist.planner.gpus import find_gpu
from kdist.planner.machines import Machine, known_machines
from kdist.planner.published import (
    PublishedRate,
    gradients_of,
    input_of,
    known_rates,
    precision_name,
    setup_of,
    specified_micro_step_seconds,
)
from kdist.planner.tables import Reader, count, number, read_own_table, text
from kdist.planner.training_recipes import Phase, Recipe, from_zero

IMAGENET_EXAMPLES = 1_281_167

# An image of ImageNet is a third wider than high on average: 500 x 375.
_ASPECT = 4 / 3
# Of the operations of a training step; the backward pass has two products for each of the forward.
_FORWARD_SHARE = 1 / 3
# How many times slower than the constants say a library is taken to load images at most.
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
    """All epochs of a training on ImageNet, with what it validates.

    Args:
        recipe: what it does.
        machine: by name, one of `machines`.
        devices: how many.
        machines: by name.
        constants: of exchange and input.

    Raises:
        ValueError: the machine is not known, nothing is known of the model's or the GPU's
            arithmetic, or no rate is published of software like this.
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
    """What a phase is trained on, as a row of the table of rates would say it; its rate is open."""
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
    """An epoch and the validation after it.

    Args:
        rate: of `_as_rate`.
        phase: what is trained on.
        machines: by name.
        constants: of exchange and input.
        slower: seconds of computation over those predicted.
        loader: seconds of loading an image over those predicted.
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
    """The host's work for an image that is stored at another size, or loaded by slower software."""
    stored = work.source_megapixels
    if phase.stored_pixels:
        stored = phase.stored_pixels**2 * _ASPECT / 1e6
    return dataclasses.replace(
        work,
        source_megapixels=loader * stored,
        model_megapixels=loader * work.model_megapixels,
        host_bytes=work.bytes_to_device,  # As many as without the factor.
    )


@functools.lru_cache(maxsize=64)
def _computing_slower(like: str, family: str, kind: tuple, constants: Constants) -> float:
    """Published over predicted computation of all rates of such software; a geometric mean.

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
    """Seconds of loading an image over those predicted, as a whole training of many epochs tells.

    Benchmarks of few steps have their examples ready beforehand; trainings have to load them. 1
    where no whole training is published, or the constants make it no faster than it was.
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
    """Whether a rate is of that software and family of models, on such a GPU and precision."""
    gpu = rate.gpu or machines[rate.machine].gpu
    computes = _kind_of_computing(gpu, rate.precision)
    return (rate.framework, rate.family, computes) == (like, family, kind)


def _where_reached(rising, value: float, least: float, most: float) -> float:
    """Where a function that rises reaches a value, by bisection; the nearer end where nowhere."""
    if rising(least) >= value:
        return least
    for _ in range(40):
        middle = math.sqrt(least * most)
        least, most = (middle, most) if rising(middle) < value else (least, middle)
    return math.sqrt(least * most)


@functools.cache
def _validated() -> dict[PublishedRate, int]:
    """The rows of `tables/software_rates.csv`, and the images they validate after each epoch."""
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
            # What a whole training loads is real.
            data="real" if row["data"] == "training" else row["data"],
            note=row["data"],
            source=row["source"],
        ): row["validated"]
        for row in read_own_table("software_rates.csv", _RATE_COLUMNS)
    }


def _software_rates(*kinds: str) -> Sequence[PublishedRate]:
    """Rows of `tables/software_rates.csv` whose column `data` is one of `kinds`."""
    return [rate for rate in _validated() if rate.note in kinds]


def _measured_micro_step(rate: PublishedRate, machines, constants) -> float:
    """Seconds of computation that a published rate leaves to it."""
    setup = setup_of(rate, machines)
    return micro_step_seconds_of(setup, gradients_of(rate), input_of(rate), rate.rate, constants)


def _kind_of_computing(gpu: str, precision: str) -> tuple:
    """The same where computation takes the same: boards of more memory, 16 bits on plain cores."""
    found = find_gpu(gpu)
    if found is None:
        raise ValueError(f"nothing is known of the GPU {gpu!r}")
    half = precision in ("fp16", "amp", "bf16") and found.fp16_tensor_cores
    return found.float32_tflops, found.bandwidth_gb_s, half
