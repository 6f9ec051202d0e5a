"""Means of losses and metrics over windows, from Keras's running means over the epoch."""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from kdist.compat.keras import TensorFlowTrainer
from kdist.training.scopes import has_parameter_servers
from kdist.training.state import training_state_of


class WindowMeans:
    """Accumulates the logs of a window, which may span epochs.

    Keras logs the mean of a metric since the epoch began. The difference of two such sums is the
    sum over the steps between them.

    Args:
        running: names of the logs that are running means. Of other logs, the latest value counts.
    """

    def __init__(self, running: Iterable[str] = ()):
        self._running = frozenset(running)
        self._steps_before = 0  # in this epoch, at the last reading
        self._before: dict[str, float] = {}  # sums at the last reading
        self.steps = 0
        self._sums: dict[str, float] = collections.defaultdict(float)
        self._latest: dict[str, float] = {}

    def begin_epoch(self):
        """Notes that Keras starts its means again."""
        self._steps_before, self._before = 0, {}

    def add(self, logs: Mapping[str, float], steps: int):
        """Adds a reading of the logs after `steps` steps of the epoch."""
        self._latest = dict(logs)
        for name in self._running.intersection(logs):
            total = float(logs[name]) * steps
            self._sums[name] += total - self._before.get(name, 0.0)
            self._before[name] = total
        self.steps += steps - self._steps_before
        self._steps_before = steps

    def take(self) -> dict[str, Any]:
        """Returns the logs of the window with its number of steps, and begins the next window."""
        logs: dict[str, Any] = dict(self._latest)
        if self._running.intersection(logs) and self.steps:
            logs |= {name: total / self.steps for name, total in self._sums.items()}
            logs["window_steps"] = self.steps
        self.steps, self._sums = 0, collections.defaultdict(float)
        return logs

    def get_state(self) -> dict[str, Any]:
        """Returns the JSON-serializable state of a running window."""
        return {
            "steps_before": self._steps_before,
            "before": self._before,
            "steps": self.steps,
            "sums": dict(self._sums),
            "latest": self._latest,
        }

    def set_state(self, state: Mapping[str, Any]):
        """Restores the result of `get_state`."""
        self._steps_before, self._before = state["steps_before"], dict(state["before"])
        self.steps, self._sums = state["steps"], collections.defaultdict(float, state["sums"])
        self._latest = dict(state["latest"])


def running_means(model: keras.Model) -> frozenset[str]:
    """Returns the names of the logs of `fit` that are means over the steps of the epoch.

    The logs of a custom `train_step` may be anything. Parameter servers count the steps of a log
    only approximately. In both cases the result is empty.
    """
    if not _logs_are_metrics(model) or has_parameter_servers(model.distribute_strategy):
        return frozenset()
    means: set[str] = set()
    others: set[str] = set()
    for metric in _flat(model.metrics):
        # Subclasses such as RootMeanSquaredError return a function of the mean.
        is_mean = isinstance(metric, keras.metrics.Mean)
        is_mean = is_mean and type(metric).result is keras.metrics.Mean.result
        names = means if is_mean else others
        names.add(metric.name)
        names.update(f"{output}_{metric.name}" for output in getattr(model, "output_names", ()))
    return frozenset(means - others)


def _logs_are_metrics(model):
    state = training_state_of(model)
    if state is not None:
        return state.logs_are_metrics
    return type(model).train_step is getattr(TensorFlowTrainer, "train_step", None)


def _flat(metrics):
    """Yields metrics, with those of a container instead of the container."""
    for metric in metrics:
        parts = getattr(metric, "metrics", None)
        if parts:
            yield from _flat(part for part in parts if part is not metric)
        else:
            yield metric
