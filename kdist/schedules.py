"""Learning rate schedules in units of examples seen, for `keras.optimizers`.

    batch = kdist.Batch(local=16, replicas=4)
    rate = Ramp(peak=0.1, batch=batch, ramp_examples=300_000, decay=0.8, decay_examples=60_000)
    model.compile(keras.optimizers.SGD(rate), ...)
    rate.plot(num_examples=600_000)

Schedules are functions of the number of examples, so doubling the replicas changes neither their
length nor their value at a given example. Keras calls a schedule with the optimizer's step, which
is converted by `batch.global_size`.
"""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf

from kdist.batch import Batch
from kdist.compat.keras import is_tensorflow

SCALES = {"none": lambda ratio: 1.0, "linear": lambda ratio: ratio, "sqrt": math.sqrt}


def new_axes():
    """Returns new matplotlib axes for the plot of a rate.

    Raises:
        ImportError: matplotlib is not installed (`pip install kdist[notebooks]`).
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plotting needs matplotlib: pip install 'kdist[notebooks]'") from error
    return plt.figure(figsize=(6, 3), layout="constrained").gca()


class ExampleSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Base class of learning rate schedules in units of examples seen.

    A subclass implements `_rate(examples)` with `keras.ops`, on float64 (float32 with JAX), and
    `get_config`.

    Args:
        batch: the `Batch` of one optimizer step, or a dict of its sizes.

    Raises:
        TypeError: `batch` is neither a `Batch` nor a dict.

    Example:

        class Linear(ExampleSchedule):
            def _rate(self, examples):
                return 0.1 * keras.ops.maximum(1.0 - examples / 60_000, 0.0)
    """

    def __init__(self, batch: Batch | dict):
        if not isinstance(batch, Batch | dict):
            raise TypeError(
                f"batch={batch!r} is not a kdist.Batch; use Batch(local=16, replicas=4)"
            )
        self.batch = batch if isinstance(batch, Batch) else Batch(**batch)

    def __call__(self, step):
        """Returns the float32 rate at an optimizer step, an int or scalar tensor counted from 0."""
        examples = keras.ops.cast(step, _counter_dtype()) * self.batch.global_size
        return keras.ops.cast(self._rate(examples), "float32")

    def at_examples(self, examples) -> np.ndarray:
        """Returns the float64 rates after a number, or an array of numbers, of examples."""
        with tf.init_scope():  # computes numbers while a tf.function is traced
            rates = self._rate(keras.ops.convert_to_tensor(examples, _counter_dtype()))
            return np.asarray(rates, "float64")

    def plot(self, num_examples: int, axes=None):
        """Plots the rate over the first `num_examples` examples.

        Args:
            num_examples: range of the plot, in examples.
            axes: matplotlib axes to draw on. Defaults to new axes, which also show epochs if the
                schedule has `epoch_examples`.

        Returns:
            The matplotlib axes.

        Raises:
            ImportError: matplotlib is not installed (`pip install kdist[notebooks]`).
        """
        if axes is None:
            axes = new_axes()
            self._add_epoch_axis(axes)
        examples = np.linspace(0, num_examples, 1000)
        axes.set_ylim(auto=True)  # limits that an earlier plot has fixed would cut this curve off
        axes.plot(examples, self.at_examples(examples), label=type(self).__name__)
        axes.set(xlabel="examples seen", ylabel="learning rate", xlim=(0, num_examples))
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
        return axes

    def _add_epoch_axis(self, axes):
        length = getattr(self, "epoch_examples", None)
        if length:
            functions = (lambda examples: examples / length, lambda epochs: epochs * length)
            axes.secondary_xaxis("top", functions=functions).set_xlabel("epochs")

    def _rate(self, examples):
        raise TypeError(f"{type(self).__name__} is a base class; use Ramp, Cosine, or Piecewise")

    def get_config(self):
        return {"batch": dataclasses.asdict(self.batch)}

    def __repr__(self):
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


class _Scaled(ExampleSchedule):
    """Base class of schedules with a warmup and a peak that may scale with the global batch."""

    def __init__(self, peak, batch, start, floor, ramp_examples, scale, base_batch, epoch_examples):
        super().__init__(batch)
        if scale not in SCALES:
            raise ValueError(f"scale={scale!r} is unknown; use one of {', '.join(SCALES)}")
        if scale != "none" and base_batch is None:
            raise ValueError(
                f"scale={scale!r} needs base_batch, the global batch size that peak was tuned for"
            )
        _check_not_negative(peak=peak, start=start, floor=floor, ramp_examples=ramp_examples)
        _check_positive(base_batch=base_batch, epoch_examples=epoch_examples)
        self.peak, self.start, self.floor = float(peak), float(start), float(floor)
        self.ramp_examples, self.epoch_examples = ramp_examples, epoch_examples
        self.scale, self.base_batch = scale, base_batch
        ratio = self.batch.global_size / base_batch if base_batch else 1.0
        self.scaled_peak = self.peak * SCALES[scale](ratio)
        if self.scaled_peak < self.floor:
            raise ValueError(
                f"the floor {self.floor:g} is above the peak {self.scaled_peak:g}; lower the floor"
            )

    def _rate(self, examples):
        if self.epoch_examples:
            examples = keras.ops.floor(examples / self.epoch_examples) * self.epoch_examples
        # Avoids a division by zero; `where` below discards the result without a ramp.
        progress = examples / max(self.ramp_examples, 1)
        rising = self.start + (self.scaled_peak - self.start) * progress
        after = self._after_ramp(keras.ops.maximum(examples - self.ramp_examples, 0.0))
        return keras.ops.where(examples < self.ramp_examples, rising, after)

    def get_config(self):
        names = ("peak", "start", "floor", "ramp_examples", "scale", "base_batch", "epoch_examples")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


@keras.saving.register_keras_serializable(package="kdist")
class Ramp(_Scaled):
    """Learning rate with a linear warmup, a constant part, and an exponential decay.

    With e examples seen, r = `ramp_examples`, s = `sustain_examples`, d = `decay_examples`:

        e < r:            start + (peak - start) * e / r
        r <= e < r + s:   peak
        r + s <= e:       floor + (peak - floor) * decay ** ((e - r - s) / d)

    This is the schedule of Google's TPU and GPU notebooks for Keras, which is in epochs there. The
    warmup to a peak proportional to the batch size is from Goyal et al. 2017, arXiv:1706.02677; to
    its square root, for Adam, from Malladi et al. 2022, arXiv:2205.10287.

    Args:
        peak: peak rate, before scaling.
        batch: the `Batch` of one optimizer step.
        start: rate at the first example. Defaults to 0.
        floor: limit of the decay. Defaults to 0.
        ramp_examples: length of the warmup, in examples. Defaults to 0, no warmup.
        sustain_examples: length of the constant part, in examples. Defaults to 0.
        decay: factor in (0, 1] by which the rate above `floor` decays every `decay_examples`.
            Defaults to 1, no decay.
        decay_examples: examples per factor of `decay`, usually one epoch. Required if `decay` is
            not 1.
        scale: scaling of the peak with r = global batch / `base_batch`: `"linear"` multiplies it
            by r, `"sqrt"` by the square root of r. Start and floor are not scaled. Defaults to
            `"none"`.
        base_batch: global batch size that `peak` was tuned for. Required if `scale` is not
            `"none"`.
        epoch_examples: examples per epoch, to hold the rate constant during each epoch. Defaults
            to None, a smooth rate.

    Raises:
        ValueError: a rate or length is negative, `decay` is outside (0, 1], `floor` is above the
            peak, or a required argument is missing.

    Example:

    >>> rate = Ramp(peak=5e-5, batch=Batch(1), start=1e-5, floor=1e-5, ramp_examples=50,
    ...             decay=0.8, decay_examples=10, epoch_examples=10)
    >>> [round(float(rate.at_examples(e)), 9) for e in (0, 10, 19, 50, 60, 90)]
    [1e-05, 1.8e-05, 1.8e-05, 5e-05, 4.2e-05, 2.6384e-05]
    """

    def __init__(
        self,
        peak,
        batch,
        *,
        start=0.0,
        floor=0.0,
        ramp_examples=0,
        sustain_examples=0,
        decay=1.0,
        decay_examples=None,
        scale="none",
        base_batch=None,
        epoch_examples=None,
    ):
        super().__init__(
            peak, batch, start, floor, ramp_examples, scale, base_batch, epoch_examples
        )
        _check_not_negative(sustain_examples=sustain_examples)
        _check_positive(decay_examples=decay_examples)
        if not 0 < decay <= 1:
            raise ValueError(f"decay={decay} is outside (0, 1]; 1 disables the decay")
        if decay != 1 and decay_examples is None:
            raise ValueError(
                f"decay={decay} needs decay_examples, the number of examples per factor"
            )
        self.sustain_examples = sustain_examples
        self.decay, self.decay_examples = float(decay), decay_examples

    def _after_ramp(self, examples):
        decaying_for = keras.ops.maximum(examples - self.sustain_examples, 0.0)
        remaining = self.decay ** (decaying_for / (self.decay_examples or 1))
        return self.floor + (self.scaled_peak - self.floor) * remaining

    def get_config(self):
        names = ("sustain_examples", "decay", "decay_examples")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


@keras.saving.register_keras_serializable(package="kdist")
class Cosine(_Scaled):
    """Learning rate with a linear warmup and a cosine decay (Loshchilov, arXiv:1608.03983).

    With e examples seen, r = `ramp_examples`, t = `total_examples`:

        e < r:   start + (peak - start) * e / r
        r <= e:  floor + (peak - floor) * (1 + cos(pi * min(1, (e - r) / (t - r)))) / 2

    Args:
        total_examples: number of examples after which the rate is `floor`, more than
            `ramp_examples`.
        peak, batch, start, floor, ramp_examples, scale, base_batch, epoch_examples: see `Ramp`.

    Raises:
        ValueError: `total_examples` is not more than `ramp_examples`, or as for `Ramp`.

    Example:

    >>> rate = Cosine(peak=1.0, batch=Batch(1), total_examples=100, ramp_examples=20)
    >>> [round(float(rate.at_examples(e)), 6) for e in (0, 10, 20, 60, 100, 200)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """

    def __init__(
        self,
        peak,
        batch,
        *,
        total_examples,
        start=0.0,
        floor=0.0,
        ramp_examples=0,
        scale="none",
        base_batch=None,
        epoch_examples=None,
    ):
        super().__init__(
            peak, batch, start, floor, ramp_examples, scale, base_batch, epoch_examples
        )
        if total_examples <= ramp_examples:
            raise ValueError(
                f"total_examples={total_examples} must be more than ramp_examples={ramp_examples}; "
                "increase the former or decrease the latter"
            )
        self.total_examples = total_examples

    def _after_ramp(self, examples):
        progress = keras.ops.minimum(examples / (self.total_examples - self.ramp_examples), 1.0)
        remaining = (1 + keras.ops.cos(math.pi * progress)) / 2
        return self.floor + (self.scaled_peak - self.floor) * remaining

    def get_config(self):
        return {**super().get_config(), "total_examples": self.total_examples}


@keras.saving.register_keras_serializable(package="kdist")
class Piecewise(ExampleSchedule):
    """Piecewise constant learning rate.

    Args:
        boundaries: increasing numbers of examples at which the next value begins.
        values: rates, one more than `boundaries`.
        batch: the `Batch` of one optimizer step.

    Raises:
        ValueError: boundaries do not increase, or values are negative or of the wrong number.

    Example:

    >>> rate = Piecewise(boundaries=[100, 200], values=[0.1, 0.01, 0.001], batch=Batch(1))
    >>> rate.at_examples([0, 99, 100, 199, 200]).tolist()
    [0.1, 0.1, 0.01, 0.01, 0.001]
    """

    def __init__(self, boundaries, values, batch):
        super().__init__(batch)
        self.boundaries, self.values = list(boundaries), list(values)
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"{len(self.boundaries)} boundaries need {len(self.boundaries) + 1} values, "
                f"got {len(self.values)}"
            )
        if any(a >= b for a, b in zip([0, *self.boundaries], self.boundaries, strict=False)):
            raise ValueError(f"boundaries must be positive and increasing, got {self.boundaries}")
        _check_not_negative(**{f"values[{i}]": value for i, value in enumerate(self.values)})

    def _rate(self, examples):
        boundaries = keras.ops.convert_to_tensor(self.boundaries, examples.dtype)
        passed = keras.ops.sum(keras.ops.cast(examples[..., None] >= boundaries, "int32"), axis=-1)
        return keras.ops.take(keras.ops.convert_to_tensor(self.values, examples.dtype), passed)

    def get_config(self):
        return {**super().get_config(), "boundaries": self.boundaries, "values": self.values}


def _counter_dtype():
    """Returns the dtype of the number of examples.

    float64 represents every integer up to 2^53. JAX disables it by default; in float32 the number,
    and hence the rate, has a relative error of 6e-8 from 16.7 million examples on.
    """
    return "float64" if is_tensorflow() else "float32"


def _check_not_negative(**values):
    for name, value in values.items():
        if not 0 <= value < math.inf:  # NaN fails every comparison
            raise ValueError(
                f"{name}={value} is negative or not finite; use a finite number, 0 or more"
            )


def _check_positive(**values):
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(
                f"{name}={value} is not positive and finite; use a positive number, or None"
            )
