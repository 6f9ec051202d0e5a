"""Which operations of a split model are on which device, and what they send each other."""

import contextlib
import functools
import weakref
from collections.abc import Mapping

import tensorflow as tf

from kdist.parallel.groups import GroupStrategy
from kdist.parallel.traffic import WatchedGraphs, watched_graphs
from kdist.strategies import device_names


def split_devices(strategy: tf.distribute.Strategy) -> list[str]:
    """The devices that models under a strategy are split over, as far as this process has them.

    Empty where replicas are on one device each.
    """
    if not isinstance(strategy, GroupStrategy) or strategy.layout.group_size == 1:
        return []
    names = device_names(strategy)
    host = names[0].rpartition("/")[0]
    return [name for name in names if name.rpartition("/")[0] == host]


# What was seen of a model's train function, as long as there is one.
_seen_of: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


class SplitSteps:
    """Looks at the first call of a split model's step, when TensorFlow tells of its graphs.

    Of a step that has run before it does not tell again: then what was seen in an earlier `fit`
    counts, if anything was.

    Args:
        model: compiled; what it was given to train on has to be known by its first call.
    """

    def __init__(self, model):
        self._model = model
        self._watch = contextlib.ExitStack()
        self._seen: WatchedGraphs | None = None
        self._graphs: WatchedGraphs | None = None

    def before_call(self):
        """To be called before each call; watches the first one."""
        if self._seen is None:
            self._seen = self._watch.enter_context(watched_graphs())

    def after_call(self):
        """To be called after each call."""
        if self._graphs is not None or self._seen is None:
            return
        self._watch.close()
        function = self._model.train_function
        if self._seen.hold_a_step:
            _seen_of[function] = self._seen
        self._graphs = _seen_of.get(function, self._seen)

    @property
    def placed(self) -> Mapping[str, str] | None:
        """The device of each operation of a step; None where TensorFlow has not told."""
        if self._graphs is None or not self._graphs.hold_a_step:
            return None
        return self._graphs.devices

    @functools.cached_property
    def crossing_bytes(self) -> dict[str, int] | None:
        """Such as `{"CPU:0 to CPU:1": 1228800}`, in a step; None where it is not known."""
        batch = getattr(self._model, "global_batch_size", None)
        if self._graphs is None or not (self._graphs.hold_a_step and batch):
            return None
        layout = self._model.distribute_strategy.layout
        crossing = self._graphs.crossing_bytes(batch // (layout.data * layout.micro_batches))
        if crossing is None:
            return None
        return {f"{here} to {there}": size for (here, there), size in sorted(crossing.items())}

    def end(self):
        """Ends the watching, if training ended within the first call."""
        self._watch.close()
