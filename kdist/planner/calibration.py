"""The time of a training step on a machine of which nobody has published figures.

    calibration = Calibration.from_json(pathlib.Path("machine.json").read_text())
    calibrated_step_seconds(workload, calibration, local_batch=16, replicas=2).seconds

What a step consists of is counted (`work_terms`), and each term costs what it cost in the small
networks that `kdist.planner.measuring.calibrate` has timed on that machine: a linear model with
coefficients from 0 on. The rate of convolutions and products depends on how many weights a layer
has: narrow layers leave vector units idle. Nothing here imports TensorFlow.
"""

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping

from kdist.planner.workload import LayerWork, Workload

# Between these numbers of weights of a layer, seconds a FLOP are interpolated over the logarithm;
# beyond them they are constant. Kinds that are not named have one rate.
RATES_AT_WEIGHTS = {"convolution": (1e3, 1e4, 1e5, 1e6), "matmul": (1e4, 1e6)}

# Of one layer: more float32 weights than some hundred thousand do not stay in a core's own cache.
CACHED_WEIGHTS = 100_000


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What the parts of a training step cost on one machine.

    Attributes:
        machine: the CPU or GPU, as its maker names it.
        replicas: devices that trained together under `mirrored` when it was measured, and so
            shared the machine's cores and memory; 1 for `one_device`.
        precision: the dtype policy that it was measured under.
        seconds_per: term of a step, as `work_terms` names it -> seconds for one of it, on every
            replica at the same time; exchange and update of the weights are in those of weights.
        probe_error: how far predictions of the measured networks are off, as a fraction of the
            measured time, each from the others alone; their median.
        max_probe_error: the largest of these.
    """

    machine: str
    replicas: int
    precision: str
    seconds_per: Mapping[str, float]
    probe_error: float
    max_probe_error: float

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, source: str | os.PathLike = "this text") -> "Calibration":
        """The calibration that `to_json` wrote.

        Args:
            text: as `to_json` gives it.
            source: what an error names.

        Raises:
            ValueError: `text` is no calibration, or a cost in it is no number from 0 on.
        """
        try:
            calibration = cls(**json.loads(text))
            costs = dict(calibration.seconds_per)
            bad = [name for name, cost in costs.items() if not (0 <= cost < math.inf)]
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{source} holds no calibration ({error!r}); write it with Calibration.to_json()"
            ) from error
        if bad or not costs:
            what = f"{bad[0]!r} costs {costs[bad[0]]!r}" if bad else "nothing costs anything"
            raise ValueError(
                f"{source}: {what}; seconds are numbers from 0 on: calibrate the machine again "
                "with kdist.planner.measuring.calibrate()"
            )
        return calibration


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A predicted training step.

    Attributes:
        seconds: all of it.
        parts: kind of layers, "weights" (exchange and update) or "step" (what is there for any
            model) -> seconds.
    """

    seconds: float
    parts: Mapping[str, float]


def calibrated_step_seconds(
    workload: Workload,
    calibration: Calibration,
    local_batch: int,
    replicas: int = 1,
    precision: str = "float32",
) -> StepTime:
    """How long a training step takes on the machine that was calibrated.

    Input is taken to be there in time, and the update to be that of the calibration, SGD with
    momentum.

    Args:
        workload: of the model.
        calibration: of the machine.
        local_batch: examples a replica and step.
        replicas: as in the calibration.
        precision: as in the calibration and the workload.

    Raises:
        ValueError: `local_batch` is less than 1, the calibration is for other replicas or another
            precision, lacks a cost, or not all that the model does is known.
    """
    if local_batch < 1:
        raise ValueError(f"local_batch={local_batch}: give at least 1 example a replica")
    measured = (calibration.replicas, calibration.precision)
    if measured != (replicas, precision) or workload.precision != precision:
        raise ValueError(
            f"{workload.name} in {workload.precision} is asked for on {replicas} replicas in "
            f"{precision}, but {calibration.machine} was calibrated with {measured[0]} in "
            f"{measured[1]}; calibrate it for what you ask"
        )
    if workload.uncounted:
        raise ValueError(
            f"{workload.name} has operations of which the work is not known "
            f"({', '.join(workload.uncounted)}); time its step itself"
        )
    return _priced(work_terms(workload, local_batch), calibration)


def _priced(terms, calibration):
    missing = terms.keys() - calibration.seconds_per.keys()
    if missing:
        raise ValueError(
            f"the calibration of {calibration.machine} does not know what {min(missing)!r} cost; "
            "calibrate the machine again with this version of kdist"
        )
    parts: dict[str, float] = {}
    for name, amount in terms.items():
        part = name.partition(" ")[0]
        parts[part] = parts.get(part, 0.0) + amount * calibration.seconds_per[name]
    return StepTime(sum(parts.values()), parts)


def work_terms(workload: Workload, local_batch: int) -> dict[str, float]:
    """How much there is of each term in a step of one replica.

    The first word of a term is the kind of the layers, as `LayerWork` has it, "normalisation" for
    elementwise ones that compute with weights; or it is "weights" or "step".
    """
    terms: dict[str, float] = {"step": 1.0}
    for layer in workload.layers:
        for name, amount in _layer_terms(layer, local_batch):
            if amount:
                terms[name] = terms.get(name, 0.0) + amount
    return terms


def _layer_terms(layer: LayerWork, local_batch: int):
    flops = layer.forward_flops + layer.backward_flops
    weights = layer.trainable_parameters
    kind = _kind(layer)
    if flops or layer.moved_bytes:
        yield f"{kind} layers", 1.0
    for at, share in _shares(kind, weights):
        yield f"{kind} FLOPs{at}", local_batch * flops * share
    yield f"{kind} bytes", local_batch * layer.moved_bytes
    if kind == "normalisation":
        yield "normalisation weights", weights
    else:
        yield "weights", weights
        yield f"{kind} weights beyond {CACHED_WEIGHTS:,}", max(weights - CACHED_WEIGHTS, 0.0)


def _kind(layer):
    """Its kind; an embedding has weights as well, but no arithmetic with them."""
    normalises = layer.kind == "elementwise" and layer.parameters and layer.forward_flops
    return "normalisation" if normalises else layer.kind


def _shares(kind, weights):
    """The rates that hold for a layer of so many weights, each with its share."""
    knots = RATES_AT_WEIGHTS.get(kind)
    if knots is None:
        return [("", 1.0)]
    weights = min(max(weights, knots[0]), knots[-1])
    for low, high in itertools.pairwise(knots):
        if weights <= high:
            share = math.log(weights / low) / math.log(high / low)
            break
    return [(f" at {low:,.0f} weights", 1.0 - share), (f" at {high:,.0f} weights", share)]
