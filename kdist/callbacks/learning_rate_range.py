"""Tries learning rates on the data, from too small to too large."""

import keras
import numpy as np

from kdist.checkpoint.snapshot import capture, restore, restore_rng, rng_state
from kdist.schedules import new_axes
from kdist.training.scopes import has_parameter_servers
from kdist.training.state import training_state_of

_MIN_STEPS = 20
# Losses are averaged over this fraction of the steps, as those of single batches vary.
_SMOOTHED_FRACTION, _MIN_HALF_WINDOW = 0.1, 3
# The sweep ends when the loss exceeds all of the first ones by this many times of what it had
# fallen.
_DIVERGENCE = 3.0


class LearningRateRange(keras.callbacks.Callback):
    """Learning rate range test: a short training whose rate grows with every step.

    The rate grows exponentially until `last`, or until the loss diverges. Then the model has its
    weights, optimizer state, and seeds of before again, bit by bit. The suggestion is the rate at
    which the loss fell fastest; see Smith, "Cyclical Learning Rates for Training Neural Networks",
    2017, arXiv:1506.01186. It holds for the global batch of the sweep, under any strategy but
    parameter servers.

    Args:
        first: rate of the first step. Defaults to 1e-6.
        last: rate of the last step. Defaults to 10.
        steps: number of steps of the sweep, or of groups with `steps_per_execution`. Defaults to
            100.

    Attributes:
        rates: rates that were tried, an array of shape `(N,)`.
        losses: loss of the global batch at each rate, `(N,)`, in float64.
        rate: suggested rate.
        reason: why, in a sentence.

    Raises:
        ValueError: `first`, `last`, or `steps` is out of range. In `fit`: the model is not one of
            kdist, has no optimizer, or has a schedule; parameter servers train it; or the data
            ended before 20 steps.

    Example:

        search = kdist.callbacks.LearningRateRange()
        search.run(model, train)
        print(search.rate, search.reason)
        search.plot()
        model.optimizer.learning_rate = search.rate
        model.fit(train, epochs=10)
    """

    def __init__(self, first: float = 1e-6, last: float = 10.0, steps: int = 100):
        super().__init__()
        if not 0 < first < last < float("inf"):
            raise ValueError(
                f"first={first:g}, last={last:g}: pass 0 < first < last, in this order"
            )
        if steps < _MIN_STEPS:
            raise ValueError(f"steps={steps} must be at least {_MIN_STEPS}")
        self._sweep = np.geomspace(first, last, steps)
        self._before = None
        self.rates, self.losses = np.zeros(0), np.zeros(0)
        self.rate, self.reason = float("nan"), "not run yet"

    def run(self, model: keras.Model, data, **fit_options) -> float:
        """Runs the test by `model.fit`, repeating the data as often as needed.

        Args:
            model: compiled model.
            data: first argument of `fit`.
            fit_options: further arguments of `fit`, such as `y` and `batch_size`.

        Returns:
            The suggested rate.
        """
        options = {"verbose": 0, "epochs": len(self._sweep), **fit_options}
        options["callbacks"] = [*options.get("callbacks", ()), self]
        try:
            model.fit(data, **options)
        finally:
            self._restore()  # an exception has ended `fit`
        return self.rate

    def on_train_begin(self, logs=None):
        optimizer = _checked_optimizer(self.model)
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._before = capture(self.model), rng_state()
        self._losses: list[float] = []

    def on_train_batch_begin(self, batch, logs=None):
        if len(self._losses) < len(self._sweep):
            self.model.optimizer.learning_rate = self._sweep[len(self._losses)]
        self.model.reset_metrics()  # the loss of the logs is then that of one step, not a mean

    def on_train_batch_end(self, batch, logs=None):
        self._losses.append(float(logs["loss"]))
        if len(self._losses) == len(self._sweep) or self._has_diverged():
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        self._restore()
        if len(self._losses) < _MIN_STEPS and not self._has_diverged():
            raise ValueError(
                f"the data ended after {len(self._losses)} steps, before {_MIN_STEPS}; use run(), "
                "which repeats them, or pass more epochs to fit"
            )
        self.losses = np.array(self._losses)
        self.rates = self._sweep[: len(self.losses)]
        self.rate, self.reason = suggest(self.rates, self.losses)

    def plot(self, axes=None):
        """Plots the loss against the learning rate, with the suggestion.

        Args:
            axes: matplotlib axes to draw on. Defaults to new axes.

        Returns:
            The matplotlib axes.

        Raises:
            ImportError: matplotlib is not installed (`pip install kdist[notebooks]`).
            ValueError: the test has not run yet.
        """
        if not len(self.rates):
            raise ValueError("there is nothing to plot yet: call run(model, data)")
        if axes is None:
            axes = new_axes()
        smooth = _smoothed(self.losses)
        axes.plot(self.rates, self.losses, ".", alpha=0.3, label="loss of a batch")
        axes.plot(self.rates, smooth, label="mean of neighbors")
        axes.axvline(self.rate, color="black", ls="--", label=f"suggestion: {self.rate:.2g}")
        shown = smooth[np.isfinite(smooth)]
        low, high = shown.min(), max(shown[0], shown.min())
        margin = max(high - low, 1e-3 * abs(high))
        axes.set_ylim(low - 0.2 * margin, high + margin)
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend()
        axes.grid(alpha=0.3)
        return axes

    def _has_diverged(self):
        losses = np.array(self._losses)
        if not np.isfinite(losses).all():
            return True
        if len(losses) < _MIN_STEPS:
            return False
        smooth, highest = _smoothed(losses), losses[:_MIN_STEPS].max()
        return smooth[-1] > highest + _DIVERGENCE * (highest - smooth.min())

    def _restore(self):
        if self._before is None:
            return
        (arrays, generators), self._before = self._before, None
        restore(self.model, arrays)
        restore_rng(generators)
        self.model.reset_metrics()


def suggest(rates: np.ndarray, losses: np.ndarray) -> tuple[float, str]:
    """Returns the rate at which the smoothed loss falls fastest per factor, and a sentence.

    Args:
        rates: ascending rates, `(N,)`.
        losses: their losses, `(N,)`; what follows the first that is not finite is ignored.

    Example:

        >>> rates = np.geomspace(1e-5, 10, 61)
        >>> rate, reason = suggest(rates, 1 / (1 + rates / 0.01) + (rates > 1) * rates)
        >>> 0.003 < rate < 0.03
        True
    """
    finite = np.isfinite(losses)
    count = len(losses) if finite.all() else int(np.argmin(finite))
    if count < 3:
        return float(rates[0]), "the loss is not finite at the first rates: try smaller ones"
    rates, smooth = rates[:count], _smoothed(losses[:count])
    lowest = int(np.argmin(smooth))
    if lowest < 2:
        return float(rates[0]), "the loss never falls: try smaller rates"
    # Over as many steps as are averaged, since neighbors differ by chance.
    half = _half_window(count)
    places = np.arange(lowest + 1)
    falls = smooth[np.maximum(places - half, 0)] - smooth[np.minimum(places + half, lowest)]
    steepest = int(np.argmax(falls))
    return float(rates[steepest]), (
        f"the loss falls fastest at {rates[steepest]:.2g}, from {smooth[0]:.3g} to "
        f"{smooth[lowest]:.3g} at {rates[lowest]:.2g}"
        + (", and grows again beyond" if lowest < count - 1 else ", the largest rate tried")
    )


def _smoothed(losses):
    """Returns centered means over a tenth of the steps; windows are shorter at the ends."""
    half = _half_window(len(losses))
    return np.array([losses[max(0, i - half) : i + half + 1].mean() for i in range(len(losses))])


def _half_window(steps):
    return max(_MIN_HALF_WINDOW, round(_SMOOTHED_FRACTION * steps / 2))


def _checked_optimizer(model):
    """Returns the optimizer of a model; raises ValueError if its rate cannot be changed."""
    if training_state_of(model) is None:
        raise ValueError("call kdist.patch_keras() before the model is created, or use kdist.Model")
    if has_parameter_servers(model.distribute_strategy):
        raise ValueError(
            "with parameter servers, steps overlap and have no rate of their own; run the test "
            "under another strategy with the same batch"
        )
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError("the model has no optimizer: call compile first")
    if not isinstance(optimizer.learning_rate, keras.Variable):
        raise ValueError("the optimizer has a schedule: compile it with a number for this test")
    return optimizer
