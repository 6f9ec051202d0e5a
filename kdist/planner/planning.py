"""From a model and what it is to be trained on to ranked plans.

found = kdist.plan("resnet50", examples=1_281_167, epochs=90, max_usd=100)
print(found)                       # a ranked table, and why the first is first
print(found.explain())             # the arithmetic of the first
found.write_page("plan.html")
strategy = kdist.create_strategy(found.best)
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from kdist.planner import listing, page
from kdist.planner.cost.setup import InputWork
from kdist.planner.gpus import find_gpu
from kdist.planner.job import Job
from kdist.planner.known import known_workload
from kdist.planner.limits import Limits
from kdist.planner.machines import Machine, known_machines
from kdist.planner.measurements import DEFAULT_PATH, Measurements
from kdist.planner.plans import Plan
from kdist.planner.predicting import Predictor
from kdist.planner.prices import Offer, known_offers
from kdist.planner.searching import Found, search
from kdist.planner.workload import Workload


@dataclasses.dataclass(frozen=True)
class Planned:
    """What `plan` has found, and how to look at it.

    Attributes:
        found: plans, best first, and why others are not among them.
        predictor: what predicted them.
    """

    found: Found
    predictor: Predictor

    @property
    def best(self) -> Plan:
        """The first plan."""
        return self.found.best

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans, best first."""
        return self.found.plans

    def text(self, number: int = 10) -> str:
        """The first `number` plans as a table, why the first is first, and warnings."""
        return listing.text(self.found, number)

    def __str__(self):
        return self.text()

    def explain(self, plan: Plan | None = None) -> str:
        """The arithmetic of a plan, by default of the first, line by line."""
        return listing.explained(self.predictor, plan or self.best)

    def write_page(self, path: str | os.PathLike = "plan.html") -> pathlib.Path:
        """Writes a page with the plans and their plots; gives its path.

        Raises:
            OSError: the page cannot be written.
        """
        return page.write(self.found, self.predictor, path)


def plan(
    model: Any,
    *,
    examples: int,
    epochs: float = 1.0,
    input_shape: Sequence[int] | None = None,
    precision: str = "float32",
    optimizer: str = "momentum",
    jit_compile: bool = False,
    input_work: InputWork | None = None,
    offers: Iterable[Offer] | None = None,
    ranking: str = "auto",
    measurements: str | os.PathLike | None = DEFAULT_PATH,
    **limits: Any,
) -> Planned:
    """Which strategy, which machine, how long, how much memory, how much money.

    Args:
        model: a name that `kdist.planner.known_workloads()` has, a built Keras model, or a
            `Workload`.
        examples: of an epoch.
        epochs: times through them.
        input_shape: of one example, without the batch; by default the model's own.
        precision: "float32", "mixed_float16" or "mixed_bfloat16".
        optimizer: "sgd", "momentum", "adam" …
        jit_compile: whether XLA compiles the step.
        input_work: what the host does for one example. By default a JPEG of ImageNet's size is
            decoded and resized for a model of photographs, and nothing for others.
        offers: machines to choose from. By default all of `known_offers()`.
        ranking: "time", "money", "both" or "auto"; see `kdist.planner.search`.
        measurements: the user's own table of measured runs; None for none.
        **limits: fields of `Limits`, such as max_usd, max_hours, max_machines.

    Raises:
        ValueError: the model's shapes are not known, an argument is not what it has to be, or no
            plan keeps to the limits; the message says which one to loosen, and by how much.
    """
    job = Job(
        workload=workload_of(model, input_shape),
        examples=examples,
        epochs=epochs,
        precision=precision,
        optimizer=optimizer,
        jit_compile=jit_compile,
        input_work=input_work,
        name=model if isinstance(model, str) else "",
    )
    table = Measurements() if measurements is None else Measurements.read(measurements)
    predictor = Predictor(job, table)
    chosen = known_offers() if offers is None else tuple(offers)
    return Planned(search(predictor, chosen, Limits(**limits), ranking), predictor)


def workload_of(model: Any, input_shape: Sequence[int] | None = None) -> Workload:
    """The workload of a known name, of a Keras model, or as it is.

    Raises:
        ValueError: the name is not known, or the model's shapes are not.
    """
    if isinstance(model, str):
        model = known_workload(model)
    if isinstance(model, Workload):
        return model if input_shape is None else model.at_input_shape(input_shape)
    if not hasattr(model, "layers"):
        raise ValueError(
            f"model is a known name, a Keras model or a Workload, not {type(model).__name__}"
        )
    from kdist.planner.reading import read_workload

    return read_workload(model, input_shape)


def own_offers(machines: Iterable[Machine], usd_per_hour: float = 0.0) -> tuple[Offer, ...]:
    """Machines that are not rented, or for a price that is known, as offers.

    Args:
        machines: of the user.
        usd_per_hour: what each of them costs.
    """
    return tuple(
        Offer("own", machine.name, machine, usd_per_hour, None, "", "own machine")
        for machine in machines
    )


def choose(
    offers: Iterable[Offer],
    *,
    gpu: str | None = None,
    cloud: str | None = None,
    machine: str | None = None,
    usd_per_hour: float = 0.0,
    link: str | None = None,
) -> tuple[Offer, ...]:
    """The offers that are asked for.

    Args:
        offers: all of them.
        gpu: a kind of GPU, such as "V100".
        cloud: such as "gcp".
        machine: a part of a machine's name; where no offer has it, of a machine of published
            benchmarks.
        usd_per_hour: what such a machine costs; 0, the default, where that is not known.
        link: what if all GPUs were linked so, such as "nvlink3 nvswitch" or "pcie4"?

    Raises:
        ValueError: nothing is left; the message says what there is.
    """
    offers = list(offers)
    if machine is not None:
        named = [offer.machine.name for offer in offers]
        wanted = machine.lower()
        if not any(wanted in name.lower() for name in named):
            offers += own_offers(known_machines().values(), usd_per_hour)
        offers = _left(offers, _name_of_machine, lambda name: wanted in name.lower(), machine)
    if cloud is not None:
        offers = _left(
            offers, lambda offer: offer.cloud, lambda name: name == cloud.lower(), cloud, "cloud"
        )
    if gpu is not None:
        kind = find_gpu(gpu)
        offers = _left(
            offers,
            lambda offer: offer.machine.gpu,
            lambda name: _is_gpu(name, gpu, kind),
            gpu,
            "GPU",
        )
    if link is not None:
        offers = [
            dataclasses.replace(offer, machine=dataclasses.replace(offer.machine, link=link))
            for offer in offers
        ]
    return tuple(offers)


def _is_gpu(name, gpu, wanted):
    """Whether `name` is a GPU of that kind: "V100" is any V100, "V100 SXM2 32GB" one with 32 GB."""
    if wanted is None:
        return gpu.lower() in name.lower()
    words = re.findall(r"\w+", gpu.lower())
    return all(word in name.lower() for word in words) or find_gpu(name) == wanted


def _name_of_machine(offer):
    return offer.machine.name


def _left(offers, name_of, is_wanted, asked, what="machine"):
    left = [offer for offer in offers if is_wanted(name_of(offer))]
    if not left:
        names = sorted(set(map(name_of, offers)))
        raise ValueError(f"there is no {what} like {asked!r}; there are {', '.join(names)}")
    return left
