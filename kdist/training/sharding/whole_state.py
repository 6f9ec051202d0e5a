"""State that several workers divide, whole on a worker while it is read outside of steps.

    with whole(model):           # on all workers
        model.save("model.keras")    # on any of them

Each worker has parts of weights and slots. One that reads a whole one needs those of the others,
which have to send them at the same time. So all workers share them before one of them reads.
"""

import contextlib
import weakref
from collections.abc import Iterator

import keras

from kdist.cluster import heartbeat
from kdist.training.replica.accumulation import optimizers_of
from kdist.training.sharding.optimizer_state import shards_of
from kdist.training.sharding.parts import divides_over_workers
from kdist.training.sharding.weights import sharded_weights

# Models that `share` has gathered state of, and those of them that are whole on all workers.
_shared_models: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_whole_models: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def share(model: keras.Model, is_kept: bool = True, with_slots: bool = True):
    """Gathers the state that workers divide; a collective call.

    Args:
        model: the model.
        is_kept: whether this worker keeps the state on its host, until `forget`. Defaults to True.
        with_slots: whether to gather the slots of optimizers as well. Defaults to True.
    """
    _shared_models.add(model)
    with heartbeat.collective("gathering the weights and slots of all workers"):
        for weight in sharded_weights(model):
            value = weight.shard.whole.whole()
            weight.shared = value if is_kept else None
        for shards in _shards_of(model) if with_slots else ():
            shards.share(is_kept)


def forget(model: keras.Model):
    """Frees what `share` has gathered."""
    if model not in _shared_models:
        return
    _shared_models.remove(model)
    _whole_models.discard(model)
    for weight in sharded_weights(model):
        weight.shared = None
    for shards in _shards_of(model):
        shards.forget_shared()


def forget_all():
    """Frees what `share` has gathered of any model: a step is about to change it."""
    for model in list(_shared_models):
        forget(model)


@contextlib.contextmanager
def whole(model: keras.Model) -> Iterator[None]:
    """Returns a context manager in which all state can be read; its beginning is a collective call.

    Args:
        model: the model. Within another such context of it, this one does nothing, nor where no
            workers divide state.
    """
    if model in _whole_models or not divides_over_workers(model.distribute_strategy):
        yield
        return
    share(model)
    _whole_models.add(model)
    try:
        yield
    finally:
        forget(model)


def _shards_of(model):
    found = [shards_of(optimizer) for optimizer in optimizers_of(model)]
    return [shards for shards in found if shards is not None]
