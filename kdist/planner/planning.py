"""Planning of a training: from a model and its data to ranked plans.

result = kdist.plan("resnet50", examples=1_281_167, epochs=90, max_usd=100)
print(result)                      # a ranked table, and why the first plan is first
print(result.explain())            # the arithmetic of the first plan
result.write_page("plan.html")
strategy = kdist.create_strategy(result.best)
"""

import dataclasses
import os
import pathlib
import re
import warnings as _warnings
from collections.abc import Iterable, Sequence
from typing import Any

from kdist.planner.cost.setup import InputWork
from kdist.planner.cost.step import Spot
from kdist.planner.measurements import DEFAULT_PATH, Measurements
from kdist.planner.plans import Job, Plan
from kdist.planner.report import listing, page
from kdist.planner.selection.candidates import (
    choices,
    fitting_layouts,
    pareto_front,
    priced_candidates,
    rank_candidates,
    resolve_ranking,
    slowdown_warnings,
    without_slow_splits,
)
from kdist.planner.selection.constraints import (
    Constraints,
    Rejection,
    apply_constraints,
    infeasible_message,
)
from kdist.planner.selection.prediction import Predictor
from kdist.planner.tables.gpus import find_gpu
from kdist.planner.tables.machines import Machine, known_machines
from kdist.planner.tables.prices import Offer, known_offers, prices_text
from kdist.planner.workload.layers import Workload, known_workload


@dataclasses.dataclass(frozen=True)
class RankedPlans:
    """Plans in order, and how to look at them. `kdist.plan` and `kdist.planner.search` return it.

    Example:

        result = kdist.plan("resnet50", examples=1_281_167, epochs=90, max_usd=100)
        print(result.text(5))
        strategy = kdist.create_strategy(result.best)

    Args:
        plans: The best batch of each machine and strategy, best first.
        ranking: `"time"`, `"money"`, or `"both"`: what best means.
        pareto: Plans that no other plan beats in both time and money, the cheapest first.
        rejected: Candidates that constraints exclude.
        warnings: Sentences, such as about more devices that are slower.
        global_batch_limit: Largest number of examples per update among the candidates.
        predictor: `Predictor` that made the plans.
        prices: Date and source of the prices, in a sentence; `""` without prices.
    """

    plans: tuple[Plan, ...]
    ranking: str
    pareto: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]
    warnings: tuple[str, ...]
    global_batch_limit: int
    predictor: Predictor
    prices: str = ""

    @property
    def best(self) -> Plan:
        """The first plan."""
        return self.plans[0]

    @property
    def choices(self) -> dict[str, Plan]:
        """The plans that are `"recommended"`, `"fastest"`, `"cheapest"`, and `"balanced"`.

        The balanced plan has the smallest product of hours and dollars. Without prices there is no
        cheapest and no balanced plan. A plan may have several of these names.
        """
        return choices(self.plans)

    @property
    def found(self) -> "RankedPlans":
        """The result itself. Deprecated."""
        message = "result.found is deprecated: the result has these attributes itself"
        _warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self

    def text(self, number: int = 10) -> str:
        """Returns a table of plans, the reason for the first one, and warnings.

        Args:
            number: Number of plans in the table. Defaults to 10.
        """
        return listing.plans_text(self, number)

    def __str__(self):
        return self.text()

    def explain(self, plan: Plan | None = None) -> str:
        """Returns the arithmetic of a plan, line by line.

        Args:
            plan: One of `plans`. Defaults to the first.
        """
        return listing.arithmetic_text(self.predictor, plan or self.best)

    def write_page(self, path: str | os.PathLike = "plan.html") -> pathlib.Path:
        """Writes a web page with the plans and their plots, and returns its path.

        Args:
            path: File to write. Defaults to `"plan.html"`.

        Raises:
            OSError: If the page cannot be written.
        """
        return page.write(self, path)


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
    preemptions: Spot | None = None,
    **constraints: Any,
) -> RankedPlans:
    """Recommends strategies, machines, and batches for a training, with time, memory, and price.

    Example:

        result = kdist.plan("resnet50", examples=1_281_167, epochs=90, max_usd=100)
        print(result)
        strategy = kdist.create_strategy(result.best)

    Args:
        model: A name of `kdist.planner.known_workloads()`, a built Keras model, or a `Workload`.
        examples: Examples per epoch.
        epochs: Number of epochs. Defaults to 1.
        input_shape: Shape of one example, without the batch. Defaults to the model's own.
        precision: `"float32"`, the default, `"mixed_float16"`, or `"mixed_bfloat16"`.
        optimizer: `"sgd"`, `"momentum"`, the default, `"adam"`, …
        jit_compile: Whether XLA compiles the step. Defaults to `False`.
        input_work: Work of the host for one example. Defaults to decoding and resizing a JPEG of
            ImageNet's size for models of photographs, and to nothing for other models.
        offers: Machines to choose from. Defaults to `known_offers()`.
        ranking: `"time"`, `"money"`, `"both"`, or `"auto"`, see `kdist.planner.search`.
        measurements: The user's table of measured runs; `None` for none. Defaults to
            `~/.kdist/measurements.csv`.
        preemptions: Preemptions of spot VMs, and the rate at which checkpoints are saved. Defaults
            to `kdist.planner.Spot()`.
        **constraints: Fields of `kdist.planner.Constraints`, such as `max_usd`, `max_hours`,
            `max_machines`.

    Returns:
        `RankedPlans`.

    Raises:
        ValueError: If the model's shapes are unknown, an argument is invalid, or no plan meets the
            constraints; the message names the one to relax, and by how much.
    """
    job = Job(
        workload=resolve_workload(model, input_shape),
        examples=examples,
        epochs=epochs,
        precision=precision,
        optimizer=optimizer,
        jit_compile=jit_compile,
        input_work=input_work,
        name=model if isinstance(model, str) else "",
    )
    table = Measurements() if measurements is None else Measurements.read(measurements)
    offers = known_offers() if offers is None else offers
    return search(
        Predictor(job, table, spot=preemptions), offers, Constraints(**constraints), ranking
    )


def search(
    predictor: Predictor,
    offers: Iterable[Offer],
    constraints: Constraints = Constraints(),  # noqa: B008 - frozen
    ranking: str = "auto",
) -> RankedPlans:
    """Enumerates layouts, batches, and machines, and ranks those that meet the constraints.

    Example:

        predictor = kdist.planner.Predictor(job)
        offers = kdist.planner.select_offers(kdist.planner.known_offers(), gpu="V100")
        result = kdist.planner.search(predictor, offers)

    Args:
        predictor: Predictor of the job.
        offers: Machines to choose from.
        constraints: Constraints on a plan. Defaults to `Constraints()`.
        ranking: `"time"`, `"money"`, or `"both"`: time × money, so that half the time is worth
            twice the money. `"auto"`, the default, is time if only money is limited, money if only
            time is limited, else both, and puts plans for one machine before those for several.

    Returns:
        `RankedPlans`.

    Raises:
        ValueError: If no plan meets the constraints; the message names the one to relax, and by how
            much.
    """
    by = resolve_ranking(ranking, constraints)
    offers = list(offers)
    fitting, too_large = fitting_layouts(predictor, offers, constraints)
    candidates = without_slow_splits(priced_candidates(predictor, fitting, constraints.spot))
    kept, excluded = apply_constraints(candidates, constraints)
    if not kept:
        alternatives = priced_candidates(predictor, fitting, not constraints.spot)
        raise ValueError(infeasible_message(candidates, alternatives, too_large, constraints))
    ranked = rank_candidates(kept, by, one_machine_first=ranking == "auto")
    plans = tuple(
        predictor.plan(each.layout, each.local_batch, each.offer, constraints.spot)
        for each in ranked
    )
    return RankedPlans(
        plans=plans,
        ranking=by,
        pareto=pareto_front(plans),
        rejected=(*too_large, *excluded),
        warnings=tuple(slowdown_warnings(predictor, plans, offers)),
        global_batch_limit=constraints.largest_global_batch(predictor.job.examples),
        predictor=predictor,
        prices=prices_text(each.offer for each in ranked),
    )


def resolve_workload(model: Any, input_shape: Sequence[int] | None = None) -> Workload:
    """Returns the workload of a model given in any form.

    Example:

        kdist.planner.resolve_workload("resnet50", input_shape=(160, 160, 3))

    Args:
        model: A known name, a built Keras model, or a `Workload`.
        input_shape: Shape of one example, without the batch. Defaults to the model's own.

    Returns:
        The `Workload`.

    Raises:
        ValueError: If the name or the model's shapes are unknown.
    """
    if isinstance(model, str):
        model = known_workload(model)
    if isinstance(model, Workload):
        return model if input_shape is None else model.at_input_shape(input_shape)
    if not hasattr(model, "layers"):
        raise ValueError(
            f"model is a known name, a Keras model or a Workload, not {type(model).__name__}"
        )
    from kdist.planner.workload.reading import read_workload

    return read_workload(model, input_shape)


def make_offers(machines: Iterable[Machine], usd_per_hour: float = 0.0) -> tuple[Offer, ...]:
    """Makes offers of machines that are owned or have a known price.

    Example:

        machines = kdist.planner.read_machines("machines.csv").values()
        offers = kdist.planner.make_offers(machines, usd_per_hour=1.5)

    Args:
        machines: The user's machines.
        usd_per_hour: Price of each machine per hour in US dollars. Defaults to 0.

    Returns:
        One `Offer` per machine.
    """
    return tuple(
        Offer("own", machine.name, machine, usd_per_hour, None, "", "own machine")
        for machine in machines
    )


def select_offers(
    offers: Iterable[Offer],
    *,
    gpu: str | None = None,
    cloud: str | None = None,
    machine: str | None = None,
    usd_per_hour: float = 0.0,
    link: str | None = None,
) -> tuple[Offer, ...]:
    """Selects offers by GPU, cloud, and machine.

    Example:

        kdist.planner.select_offers(kdist.planner.known_offers(), gpu="V100", cloud="gcp")

    Args:
        offers: All offers.
        gpu: Kind of GPU, such as `"V100"`. Defaults to any.
        cloud: Cloud, such as `"gcp"`. Defaults to any.
        machine: Part of a machine's name. Without such an offer, machines of published benchmarks
            are searched. Defaults to any.
        usd_per_hour: Price of a machine of a published benchmark. Defaults to 0, unknown.
        link: Replaces the link between all GPUs, such as `"nvlink3 nvswitch"` or `"pcie4"`.
            Defaults to the machine's own.

    Returns:
        The selected offers.

    Raises:
        ValueError: If nothing is left; the message lists what is available.
    """
    offers = list(offers)
    if machine is not None:
        wanted = machine.lower()
        if not any(wanted in offer.machine.name.lower() for offer in offers):
            offers += make_offers(known_machines().values(), usd_per_hour)
        offers = _filter(
            offers, lambda offer: offer.machine.name, lambda name: wanted in name.lower(), machine
        )
    if cloud is not None:
        offers = _filter(
            offers, lambda offer: offer.cloud, lambda name: name == cloud.lower(), cloud, "cloud"
        )
    if gpu is not None:
        kind = find_gpu(gpu)
        offers = _filter(
            offers,
            lambda offer: offer.machine.gpu,
            lambda name: _matches_gpu(name, gpu, kind),
            gpu,
            "GPU",
        )
    if link is not None:
        offers = [
            dataclasses.replace(offer, machine=dataclasses.replace(offer.machine, link=link))
            for offer in offers
        ]
    return tuple(offers)


def _matches_gpu(name, gpu, kind):
    """Returns whether `name` is such a GPU: "V100" is any V100, "V100 SXM2 32GB" has 32 GB."""
    if kind is None:
        return gpu.lower() in name.lower()
    words = re.findall(r"\w+", gpu.lower())
    return all(word in name.lower() for word in words) or find_gpu(name) == kind


def _filter(offers, name_of, matches, wanted, what="machine"):
    selected = [offer for offer in offers if matches(name_of(offer))]
    if not selected:
        names = sorted(set(map(name_of, offers)))
        raise ValueError(f"there is no {what} like {wanted!r}; there are {', '.join(names)}")
    return selected
