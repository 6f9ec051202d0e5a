"""Calibrates this machine: trains small networks on it for about two minutes.

    calibration = calibrate(replicas=2)  # before anything else runs on TensorFlow
    pathlib.Path("machine.json").write_text(calibration.to_json())

The networks (`kdist.planner.probes`) are made for this, each of layers of one kind. They train by
`kdist.Model.fit`, as any model does, so that fused operations, threads and the exchange of
gradients cost what they cost there.
"""

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kdist.planner.calibration import Calibration, work_terms
from kdist.planner.probes import PROBES, Probe
from kdist.planner.workload import Workload

# Of one probe, in each of several rounds.
_SECONDS, _FEWEST_STEPS, _MOST_STEPS = 0.35, 5, 60

# Batches that are in memory and come again and again: reading data is not what is timed.
_BATCHES = 4

_REWEIGHTINGS, _SMALLEST_ERROR = 20, 0.03


@dataclasses.dataclass(frozen=True)
class Measured:
    """A workload, and how long its step took.

    Attributes:
        workload: of a step of one replica.
        local_batch: examples a replica.
        seconds: of a step of all replicas at the same time.
    """

    workload: Workload
    local_batch: int
    seconds: float


def calibrate(
    replicas: int = 1,
    rounds: int = 3,
    probes: Sequence[Probe] = PROBES,
    tell: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measures this machine: under `mirrored` on several devices, `one_device` on one.

    Other programs that compute meanwhile make it slow in what it is told.

    Args:
        replicas: devices, GPUs or logical CPUs.
        rounds: how often each probe is timed; the shortest time counts.
        probes: what is timed.
        tell: gets a line now and then.

    Raises:
        ValueError: `rounds` is less than 1, or there are not as many devices.
        RuntimeError: TensorFlow has started with other devices.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: give at least 1")
    trainings = probe_trainings(strategy_of(replicas), probes, tell)
    time_in_turns(trainings, rounds, tell)
    return calibration_by(trainings)


def strategy_of(replicas: int) -> Any:
    """What a machine is calibrated under: `mirrored` on several devices, `one_device` on one.

    Raises:
        ValueError: there are not as many devices.
        RuntimeError: TensorFlow has started with other devices.
    """
    from kdist.strategies import create_strategy

    return create_strategy("mirrored" if replicas > 1 else "one_device", replicas)


def probe_trainings(
    strategy: Any,
    probes: Sequence[Probe] = PROBES,
    tell: Callable[[str], None] = lambda line: None,
) -> "list[Training]":
    """The networks that a machine is calibrated by, ready to be timed."""
    trainings = []
    for number, probe in enumerate(probes, start=1):
        trainings.append(Training(probe.build, probe.local_batch, strategy))
        if number % 10 == 0 or number == len(probes):
            tell(f"built {number} of {len(probes)} networks")
    return trainings


def time_in_turns(
    trainings: "Sequence[Training]",
    rounds: int,
    tell: Callable[[str], None] = lambda line: None,
):
    """Times each once in a round: what is to be compared meets the machine at the same speed.

    Virtual machines get faster and slower within minutes, by more than a calibration errs.
    """
    for number in range(rounds):
        for training in trainings:
            training.time()
        tell(f"timed them {number + 1} of {rounds} times")


def calibration_by(trainings: "Sequence[Training]") -> Calibration:
    """What `calibrate` gives, of networks that have been timed."""
    strategy = trainings[0].strategy
    measured = [training.measured() for training in trainings]
    return calibration_of(measured, machine_name(strategy), strategy.num_replicas_in_sync)


class Training:
    """A model that has taken its first steps and can be timed, again and again.

    Attributes:
        workload: of the model.
        local_batch: examples a replica and step.
        strategy: that it trains under.
        seconds: the median of a step, of each time that it was timed.

    Args:
        build: makes the model, of image or vector inputs and class probabilities.
        local_batch: examples a replica and step.
        strategy: the same.
    """

    def __init__(self, build: Callable[[], Any], local_batch: int, strategy: Any):
        import keras

        from kdist.planner.reading import read_workload

        self.workload, self.strategy = read_workload(build()), strategy
        self.local_batch = local_batch
        with strategy.scope():
            self._model = build()
            # The update is part of what is measured, and the weights shall stay finite.
            optimizer = keras.optimizers.SGD(1e-5, momentum=0.9)
            self._model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        self._data = _batches(self._model, local_batch * strategy.num_replicas_in_sync)
        self._shortest = min(self._fit(3)[1:])
        self.seconds: list[float] = []

    def time(self, seconds: float = _SECONDS) -> float:
        """Trains for about so many seconds; the median seconds a step."""
        steps = int(min(max(seconds / self._shortest, _FEWEST_STEPS), _MOST_STEPS))
        # The first step of a call begins with an iterator of its own.
        self.seconds.append(statistics.median(self._fit(steps + 1)[1:]))
        return self.seconds[-1]

    def measured(self) -> Measured:
        """By the fastest round: whatever else runs can only make it slower."""
        return Measured(self.workload, self.local_batch, min(self.seconds))

    def _fit(self, steps):
        """Seconds of each step, from its end to the next one's."""
        import keras

        ends = [time.perf_counter()]
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
        )
        self._model.fit(
            self._data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[note]
        )
        return np.diff(ends).tolist()


def _batches(model, global_batch):
    import tensorflow as tf

    generator = np.random.default_rng(0)
    shape = (_BATCHES, global_batch)
    x = generator.integers(0, 256, (*shape, *model.input_shape[1:]))
    x = x.astype("uint8" if len(model.input_shape) == 4 else "float32")
    y = generator.integers(0, model.output_shape[-1], shape).astype("int32")
    return tf.data.Dataset.from_tensor_slices((x, y)).cache().repeat()


def machine_name(strategy: Any) -> str:
    """The first device that the strategy computes on, as its maker names it."""
    import tensorflow as tf

    if "GPU" in strategy.extended.worker_devices[0].upper():
        details = tf.config.experimental.get_device_details(
            tf.config.list_physical_devices("GPU")[0]
        )
        return details.get("device_name", "GPU")
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:  # not Linux
        names = []
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or "CPU"


def calibration_of(measured: Sequence[Measured], machine: str, replicas: int) -> Calibration:
    """What costs explain these times best; each has to be close as a fraction of itself.

    Raises:
        ValueError: fewer than two were measured.
    """
    if len(measured) < 2:
        raise ValueError(f"{len(measured)} measured; there have to be at least 2")
    terms = [work_terms(each.workload, each.local_batch) for each in measured]
    names = sorted({name for each in terms for name in each})
    amounts = np.array([[each.get(name, 0.0) for name in names] for each in terms])
    shares = amounts / np.array([each.seconds for each in measured])[:, None]
    errors = [_error_alone(shares, number) for number in range(len(measured))]
    return Calibration(
        machine=machine,
        replicas=replicas,
        precision=measured[0].workload.precision,
        seconds_per=dict(zip(names, _costs(shares).tolist(), strict=True)),
        probe_error=statistics.median(errors),
        max_probe_error=max(errors),
    )


def _error_alone(shares, number):
    """How far one is off, predicted from all others."""
    return abs(float(shares[number] @ _costs(np.delete(shares, number, axis=0))) - 1)


def _costs(shares):
    """Costs from 0 on by which each row comes close to 1.

    Squares of errors would follow what the model cannot explain; the weights of iteratively
    reweighted least squares make them absolute errors (Holland and Welsch 1977).
    """
    from scipy.optimize import nnls

    sizes = np.maximum(shares.max(axis=0), 1e-30)
    weights = np.ones(len(shares))
    for _ in range(_REWEIGHTINGS):
        costs = nnls(shares / sizes * weights[:, None], weights)[0] / sizes
        errors = np.abs(shares @ costs - 1)
        weights = 1 / np.sqrt(np.maximum(errors, _SMALLEST_ERROR))
    return costs
