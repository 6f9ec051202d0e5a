"""Prediction of time, memory, and price for one layout on one machine."""

import dataclasses
import datetime
import functools
import math
from collections.abc import Sequence

import numpy as np

from kdist.layout import Layout, supported_shards
from kdist.planner.cost import update
from kdist.planner.cost.compute import ComputeTime, compute_seconds, micro_step_time
from kdist.planner.cost.constants import Constants, known_compute_constants, known_constants
from kdist.planner.cost.memory import (
    OPTIMIZERS,
    Memory,
    checkpoint_bytes,
    estimate_memory,
    variable_bytes,
)
from kdist.planner.cost.setup import Gradients, Setup, make_features, stack_features
from kdist.planner.cost.sharding import DividedState, divide_state, undividable_tables
from kdist.planner.cost.split import (
    ModelParts,
    SplitTime,
    activation_share,
    split_memory,
    split_model,
    split_seconds,
)
from kdist.planner.cost.step import (
    Spot,
    StepTime,
    Term,
    infer_micro_step_seconds,
    on_demand_usd,
    step_seconds,
)
from kdist.planner.cost.update import update_seconds
from kdist.planner.measurements import Measurement, Measurements
from kdist.planner.plans import Job, Plan, PredictedCost, make_setup, milliseconds
from kdist.planner.tables.gpus import Gpu, find_gpu
from kdist.planner.tables.machines import Machine
from kdist.planner.tables.prices import Offer
from kdist.planner.workload.layers import Workload


class Predictor:
    """Predicts layouts of one job and caches the results.

    Example:

        job = kdist.planner.Job(kdist.planner.known_workload("resnet50"), examples=1_281_167)
        predictor = kdist.planner.Predictor(job)
        machine = kdist.planner.known_machines()["dgx1-v100-32gb"]
        predictor.step(kdist.Layout(data=8), 64, machine).rate     # examples per second

    Args:
        job: The training.
        measurements: `Measurements` of the user's own runs. Defaults to none.
        constants: Constants of the scaling model. Defaults to those fitted to published rates.
        spot: Behavior of spot VMs. Defaults to `Spot()`.

    Attributes:
        checkpoint_bytes: Size of a checkpoint.
        save_hours: Time to save it.
    """

    def __init__(
        self,
        job: Job,
        measurements: Measurements | None = None,
        constants: Constants | None = None,
        spot: Spot | None = None,
    ):
        self.job = job
        self.spot = spot or Spot()
        self.constants = constants or known_constants()
        self._measurements = measurements or Measurements()
        self._gradients, self._input_work = job.gradients, job.host_work
        self.checkpoint_bytes = checkpoint_bytes(job.workload, job.optimizer, job.precision)
        self.save_hours = self.spot.save_hours(self.checkpoint_bytes)
        self._splits: dict[tuple, ModelParts | None] = {}
        self._divided: dict[tuple, DividedState | None] = {}
        self._split_times: dict[tuple, SplitTime] = {}
        self._steps: dict[tuple, StepTime] = {}
        self._compute_times: dict[tuple, ComputeTime] = {}
        self._memories: dict[tuple, Memory] = {}

    def plan(self, layout: Layout, local_batch: int, offer: Offer, spot: bool = False) -> Plan:
        """Returns the plan of a layout on machines of an offer.

        Args:
            layout: Degrees of parallelism.
            local_batch: Examples per replica and micro-step.
            offer: Machine and its prices.
            spot: Whether the plan is for spot VMs. Defaults to `False`.
        """
        job, machine = self.job, offer.machine
        if layout.group_size > 1:
            micro_step = self.split_time(layout, local_batch, machine).total
            gradients, derived = self._gradients, derivation(self.split(layout), layout)
        else:
            micro_step = self.compute(machine.gpu, layout, local_batch).seconds
            gradients = self.exchanged(layout)
            derived = sharding_text(self, layout, local_batch, machine)
        return Plan(
            model=job.model,
            input_shape=job.workload.input_shape,
            examples=job.examples,
            epochs=job.epochs,
            precision=job.precision,
            optimizer=job.optimizer,
            jit_compile=job.jit_compile,
            machine=machine,
            layout=layout,
            local_batch=local_batch,
            gradients=gradients,
            input_work=self._input_work,
            micro_step_seconds=micro_step,
            prediction=self._prediction(layout, local_batch, offer),
            spot=spot,
            prices_of=offer.as_of,
            derivation=derived,
            region=offer.region,
        )

    def _prediction(self, layout, local_batch, offer) -> PredictedCost:
        step = self.step(layout, local_batch, offer.machine)
        one_device = self.step(Layout(), local_batch, offer.machine)
        hours = self.job.trained_examples / step.rate / 3600
        spot_hours = spot_usd = None
        if offer.spot_usd_per_hour is not None:
            spot_hours = self.spot.expected_hours(hours, layout.machines, self.save_hours)
            spot_usd = on_demand_usd(spot_hours, offer.spot_usd_per_hour, layout.machines)
        interval = self.spot.interval_hours(self.save_hours, layout.machines)
        gpu = required_gpu(offer.machine.gpu)
        return PredictedCost(
            step_seconds=step.total,
            terms=step.terms,
            examples_per_second=step.rate,
            efficiency=step.rate / (layout.devices * one_device.rate),
            memory_bytes=self.memory(layout, local_batch).total,
            device_memory_bytes=gpu.memory_gb * 1e9 if gpu.memory_gb else None,
            hours=hours,
            usd=on_demand_usd(hours, offer.usd_per_hour, layout.machines),
            spot_hours=spot_hours,
            spot_usd=spot_usd,
            checkpoint_bytes=self.checkpoint_bytes,
            save_seconds=self.save_hours * 3600,
            preemptions_per_hour=self.spot.preemptions_per_hour * layout.machines,
            checkpoint_seconds=interval and interval * 3600,
        )

    def rates(self, layouts: Sequence[tuple[Layout, int, Machine]]) -> np.ndarray:
        """Returns examples per second of many layouts, a hundred times faster than `step`.

        Args:
            layouts: Layout, local batch, and machine of each.
        """
        setups = [self.setup(*each) for each in layouts]
        features = stack_features(
            [
                make_features(setup, self.exchanged(layout), self._input_work)
                for setup, (layout, *_) in zip(setups, layouts, strict=True)
            ]
        )
        micro_steps = [self.micro_step(*each) for each in layouts]
        terms = update_seconds(features, np.array(micro_steps), self.constants)
        return np.array([setup.examples for setup in setups]) / sum(terms.values())

    def step(self, layout: Layout, local_batch: int, machine: Machine) -> StepTime:
        """Returns the time of one optimizer update."""
        key = layout, local_batch, machine
        if key not in self._steps:
            step = step_seconds(
                self.setup(*key),
                self.exchanged(layout),
                self._input_work,
                self.micro_step(*key),
                self.constants,
            )
            self._steps[key] = step
            if layout.group_size > 1:
                terms = (*self._split_terms(*key), *step.terms[1:])
                self._steps[key] = StepTime(terms, step.examples)
        return self._steps[key]

    def setup(self, layout: Layout, local_batch: int, machine: Machine) -> Setup:
        """Returns the setup of the replicas, each of which is one device or a group of them."""
        if layout.group_size > 1:
            layout = Layout(layout.data, machines=layout.machines, accumulate=layout.accumulate)
        return make_setup(layout, local_batch, machine)

    def exchanged(self, layout: Layout) -> Gradients:
        """Returns the gradients that a device exchanges with those of other replicas.

        Replicas that divide training state also exchange weights. Their bytes are those of
        gradients whose all-reduce moves as much.
        """
        divided = self.divided(layout)
        if divided is not None:
            whole = self._gradients.bytes
            is_within_nodes = layout.num_parts < layout.data
            return dataclasses.replace(
                self._gradients,
                bytes=whole * divided.exchanged_share(layout.accumulate),
                bytes_between_nodes=whole if is_within_nodes else None,
            )
        split = self.split(layout)
        if split is None:
            return self._gradients
        return dataclasses.replace(self._gradients, bytes=split.gradient_bytes)

    def split(self, layout: Layout) -> ModelParts | None:
        """Returns the parts of a split model; None for a whole one, or if it cannot be split."""
        key = layout.tensor, layout.pipeline, layout.branch
        if key not in self._splits:
            self._splits[key] = split_model(self.job.workload, layout)
        return self._splits[key]

    def divided(self, layout: Layout) -> DividedState | None:
        """Returns what a device has of divided training state; None if nothing is divided."""
        if layout.shard is None:
            return None
        key = layout.shard, layout.num_parts, layout.min_shard_bytes
        if key not in self._divided:
            width = variable_bytes(self.job.precision)
            self._divided[key] = divide_state(self.job.workload, layout, width)
        return self._divided[key]

    def shards(self, layout: Layout) -> tuple[str, ...]:
        """Returns what the replicas of a layout can divide.

        On one machine, each takes no less time than the last.

        Args:
            layout: Degrees of parallelism of whole replicas.
        """
        if layout.local_steps is not None or not OPTIMIZERS[self.job.optimizer].is_elementwise:
            return ()
        width = variable_bytes(self.job.precision)
        # A single micro-step adds up no gradients, and XLA would gather all weights at once.
        left_out = {"gradients": layout.accumulate == 1, "weights": self.job.jit_compile}
        return tuple(
            shard
            for shard in supported_shards(layout.strategy)
            if not left_out.get(shard)
            and not undividable_tables(
                self.job.workload, dataclasses.replace(layout, shard=shard), width
            )
        )

    def _parts(self, layout) -> ModelParts:
        parts = self.split(layout)
        if parts is None:
            raise ValueError(
                f"{self.job.model} cannot be split as {layout}, or it is not predicted: use stages "
                "or divided layers (pipeline or tensor), or fewer devices"
            )
        return parts

    def uses_batch_statistics(self) -> bool:
        """Returns whether a layer has statistics of its batches, as BatchNorm has."""
        return any(
            layer.kind == "elementwise" and 0 < layer.trainable_parameters < layer.parameters
            for layer in self.job.workload.layers
        )

    def split_time(self, layout: Layout, local_batch: int, machine: Machine) -> SplitTime:
        """Returns the time of a micro-step on the devices of a group, from data sheets alone."""
        key = layout, local_batch, machine
        if key not in self._split_times:
            split, job = self._parts(layout), self.job
            rows = local_batch / layout.micro_batches
            micro_steps = layout.micro_batches * layout.accumulate
            gpu, constants = required_gpu(machine.gpu), known_compute_constants()
            seconds = [
                micro_step_time(total, gpu, rows, job.precision, False, micro_steps, constants)
                for total in split.totals
            ]
            group = make_setup(Layout(data=layout.group_size), local_batch, machine)
            features = make_features(group, self._gradients, self._input_work)
            self._split_times[key] = split_seconds(
                split,
                layout,
                [each.seconds for each in seconds],
                rows,
                float(update.link_rate(features, self.constants)),
                self.constants.hop_ms * 1e-3,
                activation_share(job.workload, job.precision),
            )
        return self._split_times[key]

    def _split_terms(self, layout, local_batch, machine):
        """Returns the terms of the micro-steps of a group, which `micro_step` adds up."""
        time = self.split_time(layout, local_batch, machine)
        correction = self.correction(machine.gpu)
        terms = {
            "compute": time.compute * correction,
            "pipeline bubble": time.bubble * correction,
            "between stages": time.transfers,
            "divided layers": time.gathering,
        }
        return [
            Term(name, layout.accumulate * seconds)
            for name, seconds in terms.items()
            if seconds or name == "compute"
        ]

    def micro_step(self, layout: Layout, local_batch: int, machine: Machine) -> float:
        """Returns the seconds of a micro-step of one device, or of a group of them."""
        if layout.group_size == 1:
            return self.micro_step_seconds(machine.gpu, layout, local_batch)
        terms = self._split_terms(layout, local_batch, machine)
        return sum(term.seconds for term in terms) / layout.accumulate

    def fullest_part(self, layout: Layout, local_batch: int) -> tuple[Workload, Memory]:
        """Returns the part of a split model that needs the most memory, and its peak."""
        rows, job = local_batch // layout.micro_batches, self.job
        parts = split_memory(self._parts(layout), layout, rows, job.precision, job.optimizer)
        return max(parts, key=lambda part: part[1].total)

    def memory(self, layout: Layout, local_batch: int) -> Memory:
        """Returns the peak memory of one device; of a split model that of the fullest."""
        if layout.group_size > 1:
            key: tuple = layout, local_batch
            if key not in self._memories:
                _, self._memories[key] = self.fullest_part(layout, local_batch)
            return self._memories[key]
        divided = self.divided(layout)
        key = local_batch, layout.accumulate, layout.devices > 1, layout.asynchronous, divided
        if key not in self._memories:
            self._memories[key] = estimate_memory(
                self.job.workload,
                local_batch,
                precision=self.job.precision,
                optimizer=self.job.optimizer,
                accumulate=layout.accumulate,
                devices=layout.devices,
                update="parameter_servers" if layout.asynchronous else "all_reduce",
                device="gpu",
                divided=divided,
            )
        return self._memories[key]

    def micro_step_seconds(self, gpu: str, layout: Layout, local_batch: int) -> float:
        """Returns the compute time of a micro-step, corrected by measured runs."""
        return self.compute(gpu, layout, local_batch).seconds * self.correction(gpu)

    def correction(self, gpu: str) -> float:
        """Returns the ratio of measured to predicted compute time on this GPU."""
        return self._measurements.correction(self.job.model, gpu, self.job.precision)

    def compute(self, gpu: str, layout: Layout, local_batch: int) -> ComputeTime:
        """Returns the compute time of a micro-step on one device, from data sheets alone."""
        divided = self.divided(layout)
        key = gpu, local_batch, layout.accumulate, divided
        if key not in self._compute_times:
            job = self.job
            self._compute_times[key] = compute_seconds(
                job.workload,
                required_gpu(gpu),
                local_batch,
                job.precision,
                job.jit_compile,
                accumulate=layout.accumulate,
                divided=divided,
            )
        return self._compute_times[key]


def derivation(split: ModelParts | None, layout: Layout) -> str:
    """Returns how the numbers of a split model's plan follow from those of the whole model.

    The text is empty for a whole model.
    """
    if split is None or layout.group_size == 1:
        return ""
    if layout.tensor > 1:
        how = (
            f"{split.divided} layers of convolutions and matrix products are divided over "
            f"{layout.tensor} devices, if {layout.tensor} divides their widths; a device keeps all "
            "activations and moves the inputs and outputs of these layers"
        )
    else:
        how = (
            f"{layout.pipeline} stages of consecutive layers of about equal time; "
            f"{layout.micro_batches} micro-batches take the sum of the stages and "
            f"{layout.micro_batches - 1} × the longest; a stage holds the activations of the "
            "micro-batches in flight" + ", recomputed from its inputs" * layout.recompute
        )
    return f"Predicted from the layers of the model, without measured runs of split models: {how}."


def sharding_text(predictor: Predictor, layout: Layout, local_batch: int, machine: Machine) -> str:
    """Returns why replicas divide training state, with the arithmetic; "" if they do not."""
    divided = predictor.divided(layout)
    if divided is None:
        return ""
    job = predictor.job
    whole = Layout(layout.data, machines=layout.machines, accumulate=layout.accumulate)
    before, after = (predictor.memory(each, local_batch) for each in (whole, layout))
    steps = [predictor.step(each, local_batch, machine).total for each in (whole, layout)]
    per_parameter = (2 + OPTIMIZERS[job.optimizer].slots) * variable_bytes(job.precision)
    changes = [
        f"{old / 1e9:.2f} GB of {name} become {new / 1e9:.2f} GB"
        for name in ("weights", "slots", "accumulated gradients")
        for old, new in [[getattr(each, name.partition(" ")[0]) for each in (before, after)]]
        if old != new
    ]
    if after.gathered:
        changes.append(f"{after.gathered / 1e9:.2f} GB of gathered weights are added")
    available = (required_gpu(machine.gpu).memory_gb or math.inf) * 1e9
    if before.total > available:
        whole_text = f"more than the {available / 1e9:g} GB of a {machine.gpu}"
    else:
        whole_text = f"which fits, but a step takes {milliseconds(steps[0])}"
    return (
        f"{job.optimizer} needs {per_parameter} bytes per trained parameter (weight, gradient, "
        f"slots): {per_parameter * divided.trained / 1e9:.2f} GB. With a local batch of "
        f"{local_batch}, a device needs {before.total / 1e9:.2f} GB in all, {whole_text}. With "
        f"shard={layout.shard} on {layout.num_parts} devices, {', '.join(changes)}: "
        f"{after.total / 1e9:.2f} GB in all, and a step takes {milliseconds(steps[1])}."
    )


def make_measurement(plan: Plan, examples_per_second: float) -> Measurement:
    """Makes a row for the table of measured runs from a planned run.

    Example:

        row = kdist.planner.make_measurement(plan, examples_per_second=812.0)
        predictor = kdist.planner.Predictor(job, kdist.planner.Measurements((row,)))

    Args:
        plan: Plan of the run.
        examples_per_second: Measured rate of all replicas together.

    Returns:
        The `Measurement`.

    Raises:
        ValueError: If the rate is not above 0, or higher than exchange and input allow.
    """
    constants, batch = known_constants(), plan.batch
    known = plan.gradients, plan.input_work
    predicted = step_seconds(plan.setup, *known, plan.micro_step_seconds, constants)
    measured = infer_micro_step_seconds(plan.setup, *known, examples_per_second, constants)
    return Measurement(
        as_of=datetime.date.today().isoformat(),
        model=plan.model,
        gpu=plan.machine.gpu,
        precision=plan.precision,
        machine=plan.machine.name,
        strategy=plan.layout.strategy,
        replicas=batch.replicas,
        local_batch=batch.local,
        examples_per_second=examples_per_second,
        predicted_examples_per_second=predicted.rate,
        micro_step_seconds=measured,
        predicted_micro_step_seconds=plan.micro_step_seconds,
    )


@functools.cache
def required_gpu(name: str) -> Gpu:
    """Returns `find_gpu(name)`, or raises a ValueError if the GPU is not known."""
    gpu = find_gpu(name)
    if gpu is None:
        raise ValueError(
            f"the GPU {name!r} is not known; name it as its maker does, such as 'V100 SXM2 16GB' "
            "(kdist.planner.known_gpus() lists all)"
        )
    return gpu
