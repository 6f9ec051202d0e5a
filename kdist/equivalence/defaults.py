"""Features are compiled as for one device; here a process has all of them train in another way.

Layouts that are no other strategy, but other arguments of `compile`, are compared so. There is no
way back: one process for each.
"""

import dataclasses
import functools

from kdist.training.functions import OnAllReplicas
from kdist.training.replicated import ReplicatedTrainer
from kdist.training.share import BatchDivision

LOCAL_STEPS = 2


def train_one_after_the_other():
    """Under parameter servers, no step misses an update: the weights are those of one device."""
    _compile_with(max_staleness=0)


def train_locally():
    """Local steps on all rows of each batch, by each replica.

    What replicas do alone on the same rows is the same, and its mean as well: that of one device.
    """
    _compile_with(local_steps=LOCAL_STEPS)
    own_call, own_division = OnAllReplicas.__call__, BatchDivision.of
    is_training = False

    def call(self, data, part=None):
        nonlocal is_training
        is_training = self._rounds is not None
        try:
            return own_call(self, data, part)
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

    OnAllReplicas.__call__ = call  # type: ignore[method-assign]
    BatchDivision.of = division  # type: ignore[method-assign,assignment]


def _compile_with(**arguments):
    own = ReplicatedTrainer.compile
    ReplicatedTrainer.compile = functools.partialmethod(own, **arguments)  # type: ignore
