"""The prediction of one layout on one machine: time, memory and money."""

import functools
from collections.abc import Sequence

import numpy as np

from kdist.planner.constants import Constants, known_constants
from kdist.planner.cost.compute import ComputeTime, compute_seconds
from kdist.planner.cost.facts import facts_of, stack
from kdist.planner.cost.memory import Memory, memory
from kdist.planner.cost.step import StepTime, micro_step_seconds_of, step_seconds
from kdist.planner.cost.update import update_seconds
from kdist.planner.gpus import Gpu, find_gpu
from kdist.planner.job import Job
from kdist.planner.machines import Machine
from kdist.planner.measurements import Measurement, Measurements, today
from kdist.planner.money import Spot, on_demand_usd
from kdist.planner.plans import Layout, Plan, Prediction, setup_of
from kdist.planner.prices import Offer


class Predictor:
    """Predicts layouts of one job, and remembers what it has computed.

    Args:
        job: what is to be trained.
        measurements: of the user's own runs. Defaults to none.
        constants: of the scaling model. Defaults to those fitted to published rates.
        spot: how spot VMs behave.
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
        self._measurements = measurements or Measurements()
        self._constants = constants or known_constants()
        self._gradients, self._host_work = job.gradients, job.host_work
        self._steps: dict[tuple, StepTime] = {}
        self._computed: dict[tuple, ComputeTime] = {}
        self._memories: dict[tuple, Memory] = {}

    def plan(self, layout: Layout, offer: Offer, spot: bool = False) -> Plan:
        """The plan of this layout on machines of this offer, on demand or as spot VMs."""
        job = self.job
        return Plan(
            model=job.model,
            input_shape=job.workload.input_shape,
            examples=job.examples,
            epochs=job.epochs,
            precision=job.precision,
            optimizer=job.optimizer,
            jit_compile=job.jit_compile,
            machine=offer.machine,
            layout=layout,
            gradients=self._gradients,
            input_work=self._host_work,
            micro_step_seconds=self.compute(offer.machine.gpu, layout).seconds,
            prediction=self._prediction(layout, offer),
            spot=spot,
            prices_of=offer.as_of,
        )

    def _prediction(self, layout, offer) -> Prediction:
        step = self.step(layout, offer.machine)
        alone = self.step(Layout("one_device", 1, 1, layout.local_batch), offer.machine)
        hours = self.job.trained_examples / step.rate / 3600
        spot_hours = spot_usd = None
        if offer.spot_usd_per_hour is not None:
            spot_hours = self.spot.expected_hours(hours, layout.machines)
            spot_usd = on_demand_usd(spot_hours, offer.spot_usd_per_hour, layout.machines)
        gpu = gpu_of(offer.machine)
        return Prediction(
            step_seconds=step.total,
            terms=step.terms,
            examples_per_second=step.rate,
            efficiency=step.rate / (layout.batch.replicas * alone.rate),
            memory_bytes=self.memory(layout).total,
            device_memory_bytes=gpu.memory_gb * 1e9 if gpu.memory_gb else None,
            hours=hours,
            usd=on_demand_usd(hours, offer.usd_per_hour, layout.machines),
            spot_hours=spot_hours,
            spot_usd=spot_usd,
        )

    def rates(self, layouts: Sequence[tuple[Layout, Machine]]) -> np.ndarray:
        """Examples a second of many layouts at once, in a hundredth of the time of `step`."""
        setups = [setup_of(layout, machine) for layout, machine in layouts]
        facts = stack([facts_of(each, self._gradients, self._host_work) for each in setups])
        micro_steps = [self._micro_step(machine.gpu, layout) for layout, machine in layouts]
        parts = update_seconds(facts, np.array(micro_steps), self._constants)
        return np.array([setup.examples for setup in setups]) / sum(parts.values())

    def step(self, layout: Layout, machine: Machine) -> StepTime:
        """One optimizer update."""
        key = layout, machine
        if key not in self._steps:
            self._steps[key] = step_seconds(
                setup_of(layout, machine),
                self._gradients,
                self._host_work,
                self._micro_step(machine.gpu, layout),
                self._constants,
            )
        return self._steps[key]

    def memory(self, layout: Layout) -> Memory:
        """What one device needs."""
        served = layout.strategy == "parameter_server"
        key = layout.local_batch, layout.accumulate, layout.batch.replicas > 1, served
        if key not in self._memories:
            self._memories[key] = memory(
                self.job.workload,
                layout.local_batch,
                precision=self.job.precision,
                optimizer=self.job.optimizer,
                accumulate=layout.accumulate,
                devices=layout.batch.replicas,
                update="parameter_servers" if served else "all_reduce",
                device="gpu",
            )
        return self._memories[key]

    def _micro_step(self, gpu, layout):
        """What the tables say, corrected by what runs have measured."""
        return self.compute(gpu, layout).seconds * self.correction(gpu)

    def correction(self, gpu: str) -> float:
        """By what runs have shown the computation on this GPU to take longer than predicted."""
        return self._measurements.correction(self.job.model, gpu, self.job.precision)

    def compute(self, gpu: str, layout: Layout) -> ComputeTime:
        """A micro-step on one device, as the tables say."""
        key = gpu, layout.local_batch, layout.accumulate
        if key not in self._computed:
            job = self.job
            self._computed[key] = compute_seconds(
                job.workload,
                _known(gpu),
                layout.local_batch,
                job.precision,
                job.jit_compile,
                accumulate=layout.accumulate,
            )
        return self._computed[key]


def learned(plan: Plan, examples_per_second: float) -> Measurement:
    """The row that a run of `plan`, measured at this rate, adds to the user's table."""
    constants, batch = known_constants(), plan.layout.batch
    known = plan.gradients, plan.input_work
    predicted = step_seconds(plan.setup, *known, plan.micro_step_seconds, constants)
    return Measurement(
        as_of=today(),
        model=plan.model,
        gpu=plan.machine.gpu,
        precision=plan.precision,
        machine=plan.machine.name,
        strategy=plan.layout.strategy,
        replicas=batch.replicas,
        local_batch=batch.local,
        examples_per_second=examples_per_second,
        predicted_examples_per_second=predicted.rate,
        micro_step_seconds=micro_step_seconds_of(
            plan.setup, *known, examples_per_second, constants
        ),
        predicted_micro_step_seconds=plan.micro_step_seconds,
    )


def gpu_of(machine: Machine) -> Gpu:
    """The machine's GPU.

    Raises:
        ValueError: it is not in the table of GPUs.
    """
    return _known(machine.gpu)


@functools.cache
def _known(name) -> Gpu:
    gpu = find_gpu(name)
    if gpu is None:
        raise ValueError(
            f"nothing is known of the GPU {name!r}; name it as its maker does, such as 'V100 SXM2 "
            "16GB' (kdist.planner.known_gpus() lists those known)"
        )
    return gpu
