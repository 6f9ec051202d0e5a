"""Learning rates as functions of the examples seen, for `keras.optimizers`.

    batch = kdist.Batch(local=16, replicas=4)
    rate = Ramp(peak=0.1, batch=batch, ramp_examples=300_000, decay=0.8, decay_examples=60_000)
    model.compile(keras.optimizers.SGD(rate), ...)
    rate.plot(num_examples=600_000)

A schedule is stated in examples, so doubling the replicas changes neither how long it lasts nor
what it is at a given example. Keras calls it with the optimizer's step; one step is
`batch.global_size` examples.
"""

import math

import keras
import numpy as np
import tensorflow as tf

from kdist.backend import is_tensorflow
from kdist.batch import Batch

SCALES = {"none": lambda ratio: 1.0, "linear": lambda ratio: ratio, "sqrt": math.sqrt}


class ExampleSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate as a function of the examples seen; the base of all schedules here.

    A subclass writes `_rate(examples)` with `keras.ops`, on float64 (on JAX: float32), and
    `get_config`.

    Args:
        batch: the `Batch` behind one optimizer step, or its dict of sizes.

    Raises:
        TypeError: `batch` is neither.
    """

    def __init__(self, batch: Batch | dict):
        if not isinstance(batch, Batch | dict):
            raise TypeError(
                f"batch={batch!r}: give a kdist.Batch, such as Batch(local=16, replicas=4)"
            )
        self.batch = batch if isinstance(batch, Batch) else Batch(**batch)

    def __call__(self, step):
        """The float32 rate at an optimizer step: a Python number or a scalar tensor, from 0."""
        examples = keras.ops.cast(step, _exact()) * self.batch.global_size
        return keras.ops.cast(self._rate(examples), "float32")

    def at_examples(self, examples) -> np.ndarray:
        """The float64 rates after so many examples: a number or an array of any shape."""
        with tf.init_scope():  # numbers also where a tf.function is being traced
            rates = self._rate(keras.ops.convert_to_tensor(examples, _exact()))
            return np.asarray(rates, "float64")

    def plot(self, num_examples: int, axes=None):
        """Draws the rate over the first `num_examples`; gives matplotlib's axes.

        Args:
            num_examples: the width of the drawing, in examples.
            axes: matplotlib's axes to draw in. By default new ones, which also count epochs along
                their top where the schedule has `epoch_examples`.

        Raises:
            ImportError: matplotlib is not installed (`pip install kdist[notebooks]`).
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("drawing needs matplotlib: pip install 'kdist[notebooks]'") from error
        if axes is None:
            axes = plt.figure(figsize=(6, 3), layout="constrained").gca()
            self._count_epochs(axes)
        examples = np.linspace(0, num_examples, 1000)
        axes.plot(examples, self.at_examples(examples), label=type(self).__name__)
        axes.set(xlabel="examples seen", ylabel="learning rate", xlim=(0, num_examples))
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
        return axes

    def _count_epochs(self, axes):
        length = getattr(self, "epoch_examples", None)
        if length:
            functions = (lambda examples: examples / length, lambda epochs: epochs * length)
            axes.secondary_xaxis("top", functions=functions).set_xlabel("epochs")

    def _rate(self, examples):
        raise TypeError(f"{type(self).__name__} is a base class; take Ramp, Cosine or Piecewise")

    def get_config(self):
        batch = self.batch
        sizes = {
            "local": batch.local,
            "replicas": batch.replicas,
            "accumulate": batch.accumulate,
        }
        return {"batch": sizes}

    def __repr__(self):
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


class _Scaled(ExampleSchedule):
    """A schedule whose peak grows with the global batch, and that begins with a ramp."""

    def __init__(self, peak, batch, start, floor, ramp_examples, scale, base_batch, epoch_examples):
        super().__init__(batch)
        if scale not in SCALES:
            raise ValueError(f"scale={scale!r}; take one of {', '.join(SCALES)}")
        if scale != "none" and base_batch is None:
            raise ValueError(
                f"scale={scale!r} needs base_batch, the global batch peak is meant for"
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
        # A ramp of length 0 is over before it starts; the divisor only must not be 0.
        risen = examples / max(self.ramp_examples, 1)
        rising = self.start + (self.scaled_peak - self.start) * risen
        after = self._after_ramp(keras.ops.maximum(examples - self.ramp_examples, 0.0))
        return keras.ops.where(examples < self.ramp_examples, rising, after)

    def get_config(self):
        return {
            **super().get_config(),
            "peak": self.peak,
            "start": self.start,
            "floor": self.floor,
            "ramp_examples": self.ramp_examples,
            "scale": self.scale,
            "base_batch": self.base_batch,
            "epoch_examples": self.epoch_examples,
        }


@keras.saving.register_keras_serializable(package="kdist")
class Ramp(_Scaled):
    """Rises to a peak, holds it, then falls exponentially towards a floor.

    With e examples seen, r = `ramp_examples`, s = `sustain_examples`, d = `decay_examples`:

        e < r:            start + (peak - start) * e / r
        r <= e < r + s:   peak
        r + s <= e:       floor + (peak - floor) * decay ** ((e - r - s) / d)

    This is the schedule of Google's TPU and GPU notebooks for Keras, there in epochs. Warming up
    to a peak that grows linearly with the batch is from Goyal et al. 2017, arXiv:1706.02677; with
    its square root, for Adam, from Malladi et al. 2022, arXiv:2205.10287.

    >>> rate = Ramp(peak=5e-5, batch=Batch(1), start=1e-5, floor=1e-5, ramp_examples=50,
    ...             decay=0.8, decay_examples=10, epoch_examples=10)
    >>> [round(float(rate.at_examples(e)), 9) for e in (0, 10, 19, 50, 60, 90)]
    [1e-05, 1.8e-05, 1.8e-05, 5e-05, 4.2e-05, 2.6384e-05]

    Args:
        peak: the highest rate, for a global batch of `base_batch` if it is scaled.
        batch: the `Batch` behind one optimizer step.
        start: the rate at the first example. Defaults to 0.
        floor: what the rate falls towards. Defaults to 0.
        ramp_examples: how long it rises; 0 begins at the peak. Defaults to 0.
        sustain_examples: how long it stays at the peak. Defaults to 0.
        decay: the factor by which the excess over the floor shrinks every `decay_examples`, in
            (0, 1]; 1 keeps the peak for good. Defaults to 1.
        decay_examples: needed where `decay` is not 1; usually the examples of an epoch.
        scale: the peak is multiplied by global batch / `base_batch` (`"linear"`), by its root
            (`"sqrt"`), or by nothing (`"none"`, the default). Start and floor stay: they are
            rates that are safe whatever the batch.
        base_batch: examples; needed where the peak is scaled.
        epoch_examples: the rate stays what it is at the beginning of each epoch of so many
            examples; None, the default, is smooth.

    Raises:
        ValueError: a negative rate or length, a decay outside (0, 1], a floor above the peak, or
            an argument that another one needs is missing.
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
            raise ValueError(f"decay={decay}: take a factor above 0, and 1 at most (no decay)")
        if decay != 1 and decay_examples is None:
            raise ValueError(f"decay={decay} needs decay_examples, the examples it is meant for")
        self.sustain_examples = sustain_examples
        self.decay, self.decay_examples = float(decay), decay_examples

    def _after_ramp(self, examples):
        falling_for = keras.ops.maximum(examples - self.sustain_examples, 0.0)
        remains = self.decay ** (falling_for / (self.decay_examples or 1))
        return self.floor + (self.scaled_peak - self.floor) * remains

    def get_config(self):
        return {
            **super().get_config(),
            "sustain_examples": self.sustain_examples,
            "decay": self.decay,
            "decay_examples": self.decay_examples,
        }


@keras.saving.register_keras_serializable(package="kdist")
class Cosine(_Scaled):
    """Rises to a peak, then falls to a floor along half a cosine (Loshchilov, arXiv:1608.03983).

    With e examples seen, r = `ramp_examples`, t = `total_examples`:

        e < r:   start + (peak - start) * e / r
        r <= e:  floor + (peak - floor) * (1 + cos(pi * min(1, (e - r) / (t - r)))) / 2

    >>> rate = Cosine(peak=1.0, batch=Batch(1), total_examples=100, ramp_examples=20)
    >>> [round(float(rate.at_examples(e)), 6) for e in (0, 10, 20, 60, 100, 200)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    Args:
        total_examples: when the floor is reached; more than `ramp_examples`.

    The other arguments, and what they raise, are those of `Ramp`.
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
                "lengthen the one or shorten the other"
            )
        self.total_examples = total_examples

    def _after_ramp(self, examples):
        progress = keras.ops.minimum(examples / (self.total_examples - self.ramp_examples), 1.0)
        return (
            self.floor
            + (self.scaled_peak - self.floor) * (1 + keras.ops.cos(math.pi * progress)) / 2
        )

    def get_config(self):
        return {**super().get_config(), "total_examples": self.total_examples}


@keras.saving.register_keras_serializable(package="kdist")
class Piecewise(ExampleSchedule):
    """One rate up to each boundary, and one after the last.

    >>> rate = Piecewise(boundaries=[100, 200], values=[0.1, 0.01, 0.001], batch=Batch(1))
    >>> rate.at_examples([0, 99, 100, 199, 200]).tolist()
    [0.1, 0.1, 0.01, 0.01, 0.001]

    Args:
        boundaries: examples, increasing; from the boundary on, the next value holds.
        values: rates, one more than there are boundaries.
        batch: the `Batch` behind one optimizer step.

    Raises:
        ValueError: boundaries do not increase, values are negative or not one more in number.
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
            raise ValueError(f"boundaries must be above 0 and increase, got {self.boundaries}")
        _check_not_negative(**{f"values[{i}]": value for i, value in enumerate(self.values)})

    def _rate(self, examples):
        boundaries = keras.ops.convert_to_tensor(self.boundaries, examples.dtype)
        passed = keras.ops.sum(keras.ops.cast(examples[..., None] >= boundaries, "int32"), axis=-1)
        return keras.ops.take(keras.ops.convert_to_tensor(self.values, examples.dtype), passed)

    def get_config(self):
        return {**super().get_config(), "boundaries": self.boundaries, "values": self.values}


def _exact():
    """The type in which examples are counted.

    float64 holds every whole number up to 2^53. JAX has none unless it is told to; in float32
    examples, and so rates, are right to 6e-8 of themselves from 16.7 million examples on.
    """
    return "float64" if is_tensorflow() else "float32"


def _check_not_negative(**values):
    for name, value in values.items():
        if not 0 <= value < math.inf:  # NaN fails every comparison
            raise ValueError(
                f"{name}={value}: it cannot be negative; take a finite number, 0 or more"
            )


def _check_positive(**values):
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: it must be above 0; take a finite number, or None")
