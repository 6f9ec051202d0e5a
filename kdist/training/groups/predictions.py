"""Predict function of synchronous strategies: outputs of all replicas, in the order of the rows."""

import dataclasses
import functools

import keras

from kdist.compat.keras import (
    convert_to_np_if_not_ragged,
    potentially_ragged_concat,
    reduce_per_replica,
)
from kdist.compat.tensorflow import function_of_its_own
from kdist.training.groups.functions import ReplicatedStep, run_converted
from kdist.training.groups.inputs import without_slice
from kdist.training.groups.step_groups import GroupResult, GroupRunner, StepGroup, take_up_to
from kdist.training.replica import step as steps
from kdist.training.scopes import is_multi_worker
from kdist.training.strategy_setup import step_timeout_of


class PredictFunction(GroupRunner):
    """Computes the outputs for step groups, on every replica.

    Args:
        trainer: the model.
        step: function that returns the outputs for one replica's rows.
    """

    def __init__(self, trainer, step):
        self._strategy = trainer.distribute_strategy
        replicated_step = ReplicatedStep(trainer, _without_foreign_rows(step))

        def on_batch(batch, worker_slice):
            outputs = run_converted(trainer, replicated_step, batch, worker_slice)
            if replicated_step.is_repeated:
                return reduce_per_replica(outputs, self._strategy, reduction="first")
            if is_multi_worker(self._strategy):
                gather = functools.partial(self._strategy.gather, axis=0)
                return keras.tree.map_structure(gather, outputs)
            return reduce_per_replica(outputs, self._strategy, reduction="concat")

        if not trainer.run_eagerly:
            is_one = self._strategy.num_replicas_in_sync == 1
            on_batch = replicated_step.traced(
                function_of_its_own(
                    on_batch,
                    reduce_retracing=True,
                    jit_compile=bool(trainer.jit_compile) and is_one,
                )
            )
        self._on_batch = on_batch

    def __call__(self, batches):
        """Returns the concatenated outputs for all batches of an iterable.

        Raises:
            StopIteration: there is no batch.
        """
        batches, worker_slice = without_slice(batches)
        return concatenate(self._outputs(batches, worker_slice))

    def run(self, group: StepGroup) -> GroupResult:
        """Returns the outputs of a group's steps, fewer if the data ends."""
        iterator, worker_slice = without_slice(group.iterator)
        outputs = self._outputs(take_up_to(group.length, iterator), worker_slice)
        group = dataclasses.replace(group, length=len(outputs))
        return GroupResult(group, {"outputs": concatenate(outputs)})

    def _outputs(self, batches, worker_slice):
        with step_timeout_of(self._strategy):
            outputs = [self._on_batch(batch, worker_slice) for batch in batches]
        if not outputs:
            raise StopIteration
        return outputs


def to_numpy(outputs):
    """Returns the concatenated outputs as NumPy arrays; ragged and sparse tensors stay tensors."""
    return keras.tree.map_structure(convert_to_np_if_not_ragged, concatenate(outputs))


def concatenate(outputs):
    """Returns several outputs of the same structure, concatenated along the rows."""

    def join(*parts):
        return potentially_ragged_concat(list(parts))

    return outputs[0] if len(outputs) == 1 else keras.tree.map_structure(join, *outputs)


def _without_foreign_rows(step):
    """Returns `step` without outputs for the row that an empty replica borrows from another."""

    @functools.wraps(step)
    def on_rows(rows):
        outputs = step(rows)
        running = steps.current()
        if running is None:
            return outputs
        running.check_outputs(outputs)
        if running.share.is_repeated:
            return outputs  # those of the first replica are returned
        return keras.tree.map_structure(running.share.own_rows, outputs)

    return on_rows
