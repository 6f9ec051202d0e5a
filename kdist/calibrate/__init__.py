"""Calibrates this machine by training small networks for about two minutes.

    calibration = calibrate(replicas=2)  # before TensorFlow runs anything else
    pathlib.Path("machine.json").write_text(calibration.to_json())

Each network has mostly layers of one kind. They train with `kdist.Model.fit`, like any model, so
that fused operations, threads, and the exchange of gradients cost the same.

    PROBES[0].build()   # a kdist.Model, built in the scope of a strategy
"""

import dataclasses
import functools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kdist.planner.measurements import Calibration, work_terms
from kdist.planner.workload.layers import Workload
from kdist.program import check_installed

_CLASSES = 10

# Duration and steps of one probe in each round.
_SECONDS, _MIN_STEPS, _MAX_STEPS = 0.35, 5, 60

# Batches in memory that repeat, as reading data is not timed.
_BATCHES = 4

# Iterations of the fit, and the error below which a row gets no more weight.
_REWEIGHTINGS, _MIN_ERROR = 20, 0.03


@dataclasses.dataclass(frozen=True)
class Probe:
    """A network to time, and the local batch for steps of some tens of milliseconds."""

    build: Callable[[], Any]
    local_batch: int


def _network(shape, body, stem=0):
    """Returns a model of an optional convolution to `stem` channels, the body, and classes."""
    import keras

    from kdist.model import Model

    layers = keras.layers
    x = inputs = keras.Input(shape)
    if stem:
        x = layers.Conv2D(stem, 3, padding="same", use_bias=False)(x)
    x = body(layers, x)
    if len(x.shape) == 4:
        x = layers.GlobalAveragePooling2D()(x)
    return Model(inputs, layers.Dense(_CLASSES, activation="softmax")(x))


def _convolutions(size, widths, kernel=3, stride=1, norm=False, channels=3):
    def body(layers, x):
        for number, width in enumerate(widths[1:]):
            strides = stride if number == 0 else 1
            x = layers.Conv2D(width, kernel, strides, padding="same", use_bias=not norm)(x)
            if norm:
                x = layers.BatchNormalization()(x)
            x = layers.ReLU()(x)
        return x

    return _network((size, size, channels), body, stem=widths[0])


def _depthwise(size, width, kernel=3, stride=1, depth=3, norm=False):
    def body(layers, x):
        for number in range(depth):
            strides = stride if number == 0 else 1
            x = layers.DepthwiseConv2D(kernel, strides, padding="same", use_bias=False)(x)
            if norm:
                x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
        return x

    return _network((size, size, 3), body, stem=width)


def _elementwise(size, width, of, depth=4):
    def layer(layers, x):
        if of == "norm":
            return layers.ReLU()(layers.BatchNormalization()(x))
        if of == "add":
            return layers.Add()([layers.ReLU()(x), x])
        if of == "join":
            return layers.Concatenate()([layers.ReLU()(x), x])
        if of == "halve":
            return layers.MaxPooling2D(2)(x)
        return layers.MaxPooling2D(3, 1, padding="same")(x)

    def body(layers, x):
        for _ in range(depth):
            x = layer(layers, x)
        return x

    return _network((size, size, 3), body, stem=width)


def _dense(inputs, width, depth):
    def body(layers, x):
        for _ in range(depth):
            x = layers.Dense(width, activation="relu")(x)
        return x

    return _network((inputs,), body)


def _probes(build, *sizes, **options):
    """Yields probes of the same kind; each size is the local batch and arguments of `build`."""
    for local_batch, *arguments in sizes:
        yield Probe(functools.partial(build, *arguments, **options), local_batch)


# Sizes, channels, and depths of image models, from their first layers to their last.
PROBES = (
    # 3×3, from many pixels and few channels to few pixels and many channels
    *_probes(_convolutions, (16, 56, [16] * 4), (16, 32, [32] * 4), (4, 56, [64] * 3)),
    *_probes(_convolutions, (8, 28, [64] * 4), (4, 28, [128] * 3), (8, 14, [128] * 3)),
    *_probes(_convolutions, (8, 14, [256] * 2), (8, 7, [256] * 3), (8, 7, [512] * 2)),
    *_probes(_convolutions, (8, 4, [512] * 3), (16, 2, [512] * 3)),
    *_probes(_convolutions, (8, 28, [64] * 4), (8, 7, [512] * 2), (16, 56, [16] * 3), norm=True),
    # 3×3 with stride 2
    *_probes(_convolutions, (8, 56, [32, 64]), (16, 28, [64, 128]), (16, 14, [128, 256]), stride=2),
    # 5×5 and few channels
    *_probes(_convolutions, (32, 28, [8] * 3), (32, 20, [5, 10, 20]), kernel=5, channels=1),
    *_probes(_convolutions, (4, 20, [5, 10]), kernel=5, channels=1),
    *_probes(_convolutions, (32, 14, [32] * 3), kernel=5),
    # 1×1, alternately wide and narrow
    *_probes(_convolutions, (8, 48, [24, 144] * 2), (16, 24, [32, 192] * 2), kernel=1),
    *_probes(_convolutions, (16, 12, [64, 384] * 2), (16, 6, [160, 960] * 2), kernel=1),
    *_probes(_convolutions, (32, 3, [160, 960] * 2), (8, 28, [256, 64] * 2), kernel=1),
    *_probes(_convolutions, (8, 14, [512, 128] * 2), kernel=1),
    *_probes(_convolutions, (16, 12, [64, 384] * 2), kernel=1, norm=True),
    # depthwise
    *_probes(_depthwise, (8, 48, 96), (16, 24, 144), (16, 12, 384), (16, 6, 960), (32, 3, 960)),
    *_probes(_depthwise, (16, 48, 96), stride=2, depth=1),
    *_probes(_depthwise, (8, 24, 144), kernel=5),
    *_probes(_depthwise, (16, 12, 384), norm=True),
    # elementwise
    *_probes(_elementwise, (16, 56, 32, "norm"), (16, 28, 128, "norm"), (32, 7, 512, "norm")),
    *_probes(_elementwise, (16, 4, 64, "norm"), depth=16),
    *_probes(_elementwise, (2, 4, 16, "norm"), depth=8),
    *_probes(_elementwise, (16, 28, 128, "add")),
    *_probes(_elementwise, (16, 28, 32, "join"), depth=3),
    *_probes(_elementwise, (8, 28, 64, "pool"), (16, 32, 64, "halve")),
    # dense layers, and steps with hardly any computation
    *_probes(_dense, (32, 512, 512, 4), (32, 1024, 2048, 3), (128, 1024, 1024, 3)),
    *_probes(_dense, (16, 512, 4096, 2), (16, 128, 128, 10), (8, 64, 32, 1), (8, 64, 32, 5)),
    *_probes(_convolutions, (16, 8, [8, 8]), channels=1),
)


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
