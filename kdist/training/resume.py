"""Where training is, and how `fit` goes on from a place in the middle.

A callback that can bring a model back to where another process has left it has these methods, and
`fit` calls them in this order:

    position = callback.load(model)        # before data are opened; None: from the beginning
    callback.restore(facts)                # the model is built; before any on_train_begin
    callback.on_train_begin()              # comes last: the other callbacks get their state back
    callback.release()                     # however fit ends
"""

from typing import Any, NamedTuple, Protocol

import keras


class Position(NamedTuple):
    """A place between two steps.

    Attributes:
        epoch: that is under way, from 0.
        step: steps of it that are done.
        batch: batches of the data that are behind, over all epochs; what a pipeline goes on from.
    """

    epoch: int
    step: int
    batch: int

    @property
    def next_epoch(self) -> "Position":
        """The beginning of the epoch after this one."""
        return Position(self.epoch + 1, 0, self.batch)


class Resumption(Protocol):
    """What `fit` asks of a callback that goes on where training was left."""

    def load(self, model: keras.Model) -> Position | None:
        """Where to go on; None if there is nothing to go on from."""

    def restore(self, facts: dict[str, Any]):
        """Gives the model its state.

        Args:
            facts: what the data say of themselves, by `data_facts`.
        """

    def release(self):
        """Training is over, or has failed."""


def resumption_of(callbacks) -> Resumption | None:
    """The callback that can, if there is one.

    Raises:
        ValueError: there are two.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    methods = ("load", "restore", "release")
    able = [c for c in keras.tree.flatten(callbacks) if all(hasattr(c, m) for m in methods)]
    if len(able) > 1:
        raise ValueError(f"fit takes one callback that resumes, got {len(able)}: {able}")
    return able[0] if able else None


def data_facts(x, global_batch_size, steps_per_epoch) -> dict[str, Any]:
    """What has to be the same when training goes on, as far as the data tell."""
    facts = {"global_batch_size": global_batch_size, "steps_per_epoch": steps_per_epoch}
    return {**facts, **{name: getattr(x, name, None) for name in ("num_examples", "seed")}}
