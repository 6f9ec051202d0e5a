"""Calibrates this machine by training small networks for about two minutes.

    calibration = calibrate(replicas=2)  # before TensorFlow runs anything else
    pathlib.Path("machine.json").write_text(calibration.to_json())

Each network in `kdist.calibrate.probes` has layers of one kind. They train with `kdist.Model.fit`,
like any model, so that fused operations, threads, and the exchange of gradients cost the same.
"""

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kdist.calibrate.probes import PROBES, Probe
from kdist.planner.measurements import Calibration, work_terms
from kdist.planner.workload.layers import Workload
from kdist.program import check_installed

# Duration and steps of one probe in each round.
_SECONDS, _MIN_STEPS, _MAX_STEPS = 0.35, 5, 60

# Batches in memory that repeat, as reading data is not timed.
_BATCHES = 4

# Iterations of the fit, and the error below which a row gets no more weight.
_REWEIGHTINGS, _MIN_ERROR = 20, 0.03


@dataclasses.dataclass(frozen=True)
class TimedWorkload:
    """A workload of one replica, its local batch, and its step time with all replicas running."""

    workload: Workload
    local_batch: int
    seconds: float


def calibrate(
    replicas: int = 1,
    rounds: int = 3,
    probes: Sequence[Probe] = PROBES,
    tell: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Returns a calibration of this machine under `mirrored`, or `one_device` for one replica.

    Other programs that run at the same time distort the result. Each of `probes` is timed `rounds`
    times, of which the shortest counts. `tell` receives lines about the progress.

    Raises:
        ValueError: `rounds` is less than 1, or the machine has fewer devices.
        RuntimeError: TensorFlow has started with other devices.
        ImportError: SciPy, which fits the costs, is not installed (`pip install kdist[calibrate]`).
    """
    check_installed("scipy", "calibrate")
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    trainings = probe_trainings(strategy_of(replicas), probes, tell)
    time_in_turns(trainings, rounds, tell)
    return calibration_from_trainings(trainings)


def strategy_of(replicas: int) -> Any:
    """Returns the strategy of a calibration: `mirrored`, or `one_device` for one replica."""
    from kdist.strategies import create_strategy

    return create_strategy("mirrored" if replicas > 1 else "one_device", replicas)


def probe_trainings(
    strategy: Any,
    probes: Sequence[Probe] = PROBES,
    tell: Callable[[str], None] = lambda line: None,
) -> "list[Training]":
    """Returns the probe networks, ready to be timed."""
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
    """Times each network once per round, so that all of them see the same speed of the machine.

    The speed of virtual machines varies within minutes by more than the error of a calibration.
    """
    for number in range(rounds):
        for training in trainings:
            training.time()
        tell(f"timed them {number + 1} of {rounds} times")


def calibration_from_trainings(trainings: "Sequence[Training]") -> Calibration:
    """Returns the calibration from networks that have been timed."""
    strategy = trainings[0].strategy
    timed = [training.timed_workload() for training in trainings]
    return fit_calibration(timed, machine_name(strategy), strategy.num_replicas_in_sync)


class Training:
    """A compiled and traced model that can be timed repeatedly.

    Args:
        build: creates the model, with image or vector inputs and class probabilities.
        local_batch: examples per replica and step.
        strategy: strategy of the training.

    Attributes:
        workload: workload of the model.
        seconds: median step time of each timing.
    """

    def __init__(self, build: Callable[[], Any], local_batch: int, strategy: Any):
        import keras

        from kdist.planner.workload.reading import read_workload

        self.workload, self.strategy = read_workload(build()), strategy
        self.local_batch = local_batch
        with strategy.scope():
            self._model = build()
            # The small rate keeps weights finite; the time includes the update.
            optimizer = keras.optimizers.SGD(1e-5, momentum=0.9)
            self._model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        self._data = _batches(self._model, local_batch * strategy.num_replicas_in_sync)
        self._shortest = min(self._fit(3)[1:])
        self.seconds: list[float] = []

    def time(self, seconds: float = _SECONDS) -> float:
        """Trains for about `seconds`; returns the median step time."""
        steps = int(min(max(seconds / self._shortest, _MIN_STEPS), _MAX_STEPS))
        # The first step is left out, as it creates an iterator.
        self.seconds.append(statistics.median(self._fit(steps + 1)[1:]))
        return self.seconds[-1]

    def timed_workload(self) -> TimedWorkload:
        """Returns the time of the fastest round, as other programs only make rounds slower."""
        return TimedWorkload(self.workload, self.local_batch, min(self.seconds))

    def _fit(self, steps):
        """Returns the seconds between the ends of consecutive steps."""
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
    """Returns the maker's name of the first device of a strategy."""
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


def fit_calibration(timed: Sequence[TimedWorkload], machine: str, replicas: int) -> Calibration:
    """Returns the calibration whose costs have the smallest relative errors.

    Raises:
        ValueError: there are fewer than two workloads.
    """
    if len(timed) < 2:
        raise ValueError(f"{len(timed)} timed workloads; a calibration needs at least 2")
    terms = [work_terms(each.workload, each.local_batch) for each in timed]
    names = sorted({name for each in terms for name in each})
    amounts = np.array([[each.get(name, 0.0) for name in names] for each in terms])
    shares = amounts / np.array([each.seconds for each in timed])[:, None]
    errors = [_error_alone(shares, number) for number in range(len(timed))]
    return Calibration(
        machine=machine,
        replicas=replicas,
        precision=timed[0].workload.precision,
        seconds_per=dict(zip(names, _costs(shares).tolist(), strict=True)),
        probe_error=statistics.median(errors),
        max_probe_error=max(errors),
    )


def _error_alone(shares, number):
    """Returns the relative error of one row, predicted from all others."""
    return abs(float(shares[number] @ _costs(np.delete(shares, number, axis=0))) - 1)


def _costs(shares):
    """Returns the nonnegative costs that bring each row close to 1.

    Iteratively reweighted least squares (Holland and Welsch 1977) minimizes absolute errors, as
    squared errors would be dominated by what the model cannot explain.
    """
    from scipy.optimize import nnls

    sizes = np.maximum(shares.max(axis=0), 1e-30)
    weights = np.ones(len(shares))
    for _ in range(_REWEIGHTINGS):
        costs = nnls(shares / sizes * weights[:, None], weights)[0] / sizes
        errors = np.abs(shares @ costs - 1)
        weights = 1 / np.sqrt(np.maximum(errors, _MIN_ERROR))
    return costs
