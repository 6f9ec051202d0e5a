"""Predictions: the outputs of all replicas, in the order of the rows."""

import contextlib

import keras
import tensorflow as tf

from kdist.training import step as steps
from kdist.training.epochs import up_to
from kdist.training.functions import OnAllReplicas, on_converted
from kdist.training.inputs import InParts, without_part
from kdist.training.keras_internals import (
    convert_to_np_if_not_ragged,
    potentially_ragged_concat,
    reduce_per_replica,
)
from kdist.training.step_limit import within_limit
from kdist.training.together import are_several_workers


class PredictFunction:
    """Gives the outputs for batches, on every replica of the trainer's strategy.

    Args:
        trainer: the model.
        step: a function of one replica's rows that gives their outputs.
    """

    def __init__(self, trainer, step):
        self._strategy = trainer.distribute_strategy
        on_all_replicas = OnAllReplicas(trainer, _own_rows(step))

        def on_batch(batch, part):
            outputs = on_converted(trainer, on_all_replicas, batch, part)
            if are_several_workers(self._strategy):
                return keras.tree.map_structure(self._of_all_workers, outputs)
            return reduce_per_replica(outputs, self._strategy, reduction="concat")

        if not trainer.run_eagerly:
            is_one = self._strategy.num_replicas_in_sync == 1
            on_batch = tf.function(
                on_batch,
                reduce_retracing=True,
                autograph=False,
                jit_compile=bool(trainer.jit_compile) and is_one,
            )
        self._on_batch = on_batch

    def _of_all_workers(self, output):
        """The rows of all replicas of all workers, in their order."""
        return self._strategy.gather(output, axis=0)

    def __call__(self, batches):
        """The outputs for some batches, one after the other.

        Raises:
            StopIteration: there is no batch.
        """
        batches, part = without_part(batches)
        with within_limit(self._strategy):
            outputs = [self._on_batch(batch, part) for batch in batches]
        if not outputs:
            raise StopIteration
        return joined(outputs)

    def under_way(self, groups):
        """A context that gives the groups: each is run when its turn has come."""
        return contextlib.nullcontext(groups)

    def in_order(self, outputs):
        """The outputs of groups in the order of the rows."""
        return outputs

    def group(self, iterator, length, may_run_out=False):
        """The outputs for the next `length` batches of an iterator, or for as many as it has."""
        iterator, part = without_part(iterator)
        return self(InParts(up_to(length, iterator), part))


def concatenated(outputs):
    """The outputs of several calls as NumPy arrays; ragged and sparse ones stay what they are."""
    return keras.tree.map_structure(convert_to_np_if_not_ragged, joined(outputs))


def joined(outputs):
    """The rows of several outputs as one."""

    def join(*parts):
        return potentially_ragged_concat(list(parts))

    return outputs[0] if len(outputs) == 1 else keras.tree.map_structure(join, *outputs)


def _own_rows(step):
    """The step, without outputs for a row that was shown to a replica that has none."""

    def on_rows(rows):
        outputs = step(rows)
        running = steps.current()
        if running is None or not running.share.may_be_empty:
            return outputs
        return keras.tree.map_structure(lambda output: _without(output, running), outputs)

    return on_rows


def _without(output, running):
    shown = tf.cast(running.share.rows > 0, tf.int32)
    return output[: tf.shape(output)[0] * shown]
