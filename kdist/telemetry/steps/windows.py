"""Measurements of training in windows of some seconds.

windows = TimingWindows(model, seconds=10)
windows.before_call()                     # before each call of the step function
metrics = windows.after_call(steps=4)     # metrics of a window that has just ended, or None
"""

import collections
import contextlib
import functools
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from kdist.compat.keras import TensorFlowTrainer
from kdist.telemetry.steps.step_times import StepTimes
from kdist.telemetry.steps.trace import SampledProfiles
from kdist.training.scopes import has_parameter_servers
from kdist.training.sharding.parts import sharded_state
from kdist.training.state import training_state_of

if TYPE_CHECKING:
    from kdist.parallel.inspect.traffic import WatchedGraphs

# FLOPs of a training step per FLOP of the forward pass: the backward pass computes the gradients of
# the input and of the weights (Kaplan et al. 2020, section 2.1).
_TRAINING_FLOPS_PER_FORWARD_FLOP = 3


class TimingWindows:
    """Reads the clock of a model in training; a model without a clock has no measurements.

    The model is compiled, and its training data is known by its first call. A window ends after
    `seconds`, unless `metrics` ends it earlier. With `profiles`, some steps are profiled from time
    to time.
    """

    def __init__(self, model: keras.Model, seconds: float, profiles: bool = True):
        self._model, self._seconds = model, seconds
        state = training_state_of(model)
        self._clock = state.clock if state else None
        strategy = model.distribute_strategy
        flops, peak = _flops(model)
        self._times = StepTimes(
            state.global_batch_size if state else None,
            strategy.num_replicas_in_sync,
            flops,
            peak,
            split_devices(strategy),
        )
        # A profile contains the steps only if this process runs them.
        elsewhere = tf.distribute.experimental.ParameterServerStrategy | tf.distribute.TPUStrategy
        can_profile = self._clock is not None and not isinstance(strategy, elsewhere)
        self._profiles = SampledProfiles() if profiles and can_profile else None
        sends = is_split(strategy) or sharded_state(strategy)
        self._watched = WatchedSteps(model) if sends else None
        self._since = time.perf_counter()
        self._own_seconds = 0.0

    def note_own(self, seconds: float):
        """Adds seconds that telemetry itself took within callbacks."""
        self._own_seconds += seconds

    def before_call(self):
        """Prepares for a call of the step function; call it before each one."""
        if self._watched:
            self._watched.before_call()
        if self._profiles:
            self._profiles.begin()

    def after_call(self, steps: int) -> dict[str, Any] | None:
        """Returns the metrics of the window if it ends with this call, which ran `steps` steps."""
        self._read_graphs()
        profile = self._profiles.end(steps) if self._profiles else None
        if profile is None and time.perf_counter() - self._since < self._seconds:
            return None
        return self.metrics(profile)

    def metrics(self, profile=None) -> dict[str, Any]:
        """Ends the window and returns its metrics; empty if no step ran in it."""
        self._since = time.perf_counter()
        own_seconds, self._own_seconds = self._own_seconds, 0.0
        if not self._clock:
            return {}
        return self._times.window(self._clock.take(), profile, own_seconds)

    def after_first_call(self):
        """Replaces `after_call` for a call that traced and compiled, which is not measured."""
        self._read_graphs()
        self._since = time.perf_counter()
        self._own_seconds = 0.0
        if self._clock:
            self._clock.take()

    def total(self) -> dict[str, Any]:
        """Returns the metrics of all windows combined; empty without any."""
        return self._times.total()

    def _read_graphs(self):
        if self._watched:
            self._watched.after_call()
            if self._profiles and is_split(self._model.distribute_strategy):
                self._profiles.operation_devices = self._watched.operation_devices

    def crossing_bytes(self) -> dict[str, int] | None:
        """Returns the bytes sent between devices in one step; see `WatchedSteps`.

        They are None unless the model is split or its replicas are sharded.
        """
        return self._watched.crossing_bytes if self._watched else None

    def end(self):
        """Stops profiles and graph watching."""
        if self._watched:
            self._watched.end()
        if self._profiles:
            self._profiles.stop()


def _flops(model):
    """Returns (FLOPs per example, peak FLOP/s of all GPUs); None where unknown."""
    from kdist.parallel.device_groups import GroupStrategy
    from kdist.planner.tables.gpus import find_gpu

    names = []
    with contextlib.suppress(RuntimeError, ValueError):
        names = [
            tf.config.experimental.get_device_details(gpu).get("device_name", "")
            for gpu in tf.config.list_physical_devices("GPU")
        ]
    gpu = find_gpu(names[0]) if names else None
    peak = gpu.peak_flops(model.dtype_policy.name) if gpu else None
    if peak is None:
        return None, None
    strategy = model.distribute_strategy
    devices = len(strategy.groups[0]) if isinstance(strategy, GroupStrategy) else 1
    return training_flops(model), peak * strategy.num_replicas_in_sync * devices


def training_flops(model: keras.Model) -> float | None:
    """Returns the FLOPs of the forward and backward pass for one example; None where unknown.

    A multiplication and an addition count as two. Operations count if TensorFlow has statistics for
    them, such as matrix products and convolutions. The model is built, with known input shapes
    except for the batch.
    """
    try:
        inputs = keras.tree.map_structure(
            lambda x: tf.TensorSpec([1, *x.shape[1:]], x.dtype), model.inputs
        )
        call = tf.function(lambda *x: model(list(x) if len(x) > 1 else x[0], training=False))
        graph = call.get_concrete_function(*inputs).graph
        options = tf.compat.v1.profiler.ProfileOptionBuilder
        counted = tf.compat.v1.profiler.profile(
            graph, options=options(options.float_operation()).with_empty_output().build()
        )
    except (AttributeError, TypeError, ValueError):  # a subclassed model with unknown inputs
        return None
    return float(counted.total_float_ops) * _TRAINING_FLOPS_PER_FORWARD_FLOP or None


def split_devices(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the local devices that a strategy splits models over; empty if it splits none."""
    from kdist.parallel.device_groups import device_names

    if not is_split(strategy):
        return []
    names = device_names(strategy)
    host = names[0].rpartition("/")[0]
    return [name for name in names if name.rpartition("/")[0] == host]


def is_split(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the replicas of a strategy have several devices each."""
    from kdist.parallel.device_groups import GroupStrategy

    return isinstance(strategy, GroupStrategy) and strategy.layout.group_size != 1


# The graphs of each train function, while it exists.
_graphs_of: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


class WatchedSteps:
    """Watches the first call of a step whose devices exchange tensors: TensorFlow shows its graphs.

    TensorFlow does not expose them again for a step that has run before. Then the graphs of an
    earlier `fit` are used, if there are any.
    """

    def __init__(self, model):
        self._model = model
        self._watch = contextlib.ExitStack()
        self._watched: WatchedGraphs | None = None
        self._graphs: WatchedGraphs | None = None

    def before_call(self):
        """Starts watching before the first call; call it before each one."""
        if self._watched is None:
            from kdist.parallel.inspect.traffic import watched_graphs

            self._watched = self._watch.enter_context(watched_graphs())

    def after_call(self):
        """Stops watching after the first call; call it after each one."""
        if self._graphs is not None or self._watched is None:
            return
        self._watch.close()
        function = self._model.train_function
        if self._watched.hold_a_step:
            _graphs_of[function] = self._watched
        self._graphs = _graphs_of.get(function, self._watched)

    @property
    def operation_devices(self) -> Mapping[str, str] | None:
        """Name of each operation of a step -> its device; None where unknown."""
        if self._graphs is None or not self._graphs.hold_a_step:
            return None
        return self._graphs.devices

    @functools.cached_property
    def crossing_bytes(self) -> dict[str, int] | None:
        """Bytes per step, such as `{"CPU:0 to CPU:1": 1228800}`; None where unknown.

        For sharded replicas they are those of all replicas, such as `{"gathered": 49152,
        "scattered": 49152}`.
        """
        state, strategy = self._model.training_state, self._model.distribute_strategy
        batch, layout = state.global_batch_size, strategy.layout
        if self._graphs is None or not (self._graphs.hold_a_step and batch):
            return None
        if not is_split(strategy):
            # The graph does not tell how often micro-steps exchange their gradients.
            known = state.accumulate == 1
            return self._graphs.sharded_bytes(batch // layout.data, layout.data) if known else None
        crossing = self._graphs.crossing_bytes(batch // (layout.data * layout.micro_batches))
        if crossing is None:
            return None
        return {f"{here} to {there}": size for (here, there), size in sorted(crossing.items())}

    def end(self):
        """Stops watching if training ended within the first call."""
        self._watch.close()


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
