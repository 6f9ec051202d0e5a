"""Other arguments of `compile` for all features, to compare layouts that are not strategies.

The change cannot be undone, so each layout needs a process of its own.
"""

import dataclasses
import functools

from kdist.training.groups.functions import ReplicatedStep
from kdist.training.replica.row_shares import BatchDivision
from kdist.training.trainer import Trainer

LOCAL_STEPS = 2


def train_one_after_the_other():
    """Sets max_staleness=0, so that parameter servers compute the weights of one device."""
    _compile_with(max_staleness=0)


def train_locally():
    """Local steps on all rows of each batch, by each replica.

    What replicas do alone on the same rows is the same, and its mean as well: that of one device.
    """
    _compile_with(local_steps=LOCAL_STEPS)
    own_call, own_division = ReplicatedStep.__call__, BatchDivision.of
    is_training = False

    def call(self, data, worker_slice=None):
        nonlocal is_training
        is_training = self._rounds is not None
        try:
            return own_call(self, data, worker_slice)
        finally:
            is_training = False

    def division(data, strategy, *arguments):
        divided = own_division(data, strategy, *arguments)
        if not is_training or divided.is_fixed:
            return divided
        replicas = len(divided.sizes)
        return dataclasses.replace(
            divided, sizes=(sum(divided.sizes),) * replicas, starts=(0,) * replicas
        )

    ReplicatedStep.__call__ = call  # type: ignore[method-assign]
    BatchDivision.of = division  # type: ignore[method-assign,assignment]


def _compile_with(**arguments):
    own = Trainer.compile
    Trainer.compile = functools.partialmethod(own, **arguments)  # type: ignore
