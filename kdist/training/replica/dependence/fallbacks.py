"""Falls back for a step that cannot be computed from the rows of one replica.

If every replica has the whole batch, the step is traced again and computes all of it. Otherwise the
program is warned, or stopped, with what to change.
"""

import re
import warnings

from kdist.training.replica.dependence.of_step import is_eager


class WholeBatchError(Exception):
    """Every replica has to run the step on the whole batch, because a loss needs all its rows."""


def fall_back(step, problem: str, consequence: str, is_certain: bool = False):
    """Lets every replica compute the whole batch, or warns if it does not have that.

    Args:
        step: the replica's `ReplicaStep`.
        problem: what cannot be computed from the rows of one replica, and what to change.
        consequence: what happens otherwise.
        is_certain: whether to raise an error instead of the warning. Defaults to False.

    Raises:
        WholeBatchError: the replica has the whole batch.
        ValueError: it has not, and `is_certain`.
    """
    if step.loss_reduction != "auto" or step.is_dry_run or step.share.is_repeated:
        return
    if step.may_repeat and step.micro_batches == 1:
        raise WholeBatchError(problem)
    if is_certain:
        raise ValueError(f"{problem}. {consequence}")
    if step.has_warned or step.local_replica or not step.is_last:
        return  # the same of another loss, replica, or micro-step
    step.has_warned = True
    warnings.warn(f"{problem}. {consequence}", stacklevel=2)


def on_mixed_rows(step, tensor, noun: str = "loss"):
    """Falls back for a tensor, of which `noun` tells what it is, whose rows were combined."""
    fall_back(
        step,
        f"the {noun} {_name(tensor)!r} combines rows of the batch with each other or with a "
        "mean or sum over rows, or takes rows by their positions. Call kdist.gather_batch on "
        f"what is combined, or accept the {noun} of each replica's rows by "
        'compile(loss_reduction="mean") '
        "(docs/guides/strategies.md)",
        "Each replica sees its own rows only, so that the result is not that of one device",
    )


def on_joined_outputs(step, tensor):
    """Falls back for an output whose rows are not on its first axis, or in another order."""
    fall_back(
        step,
        f"the output {_name(tensor)!r} does not have one entry per row of the batch on its first "
        "axis, in the order of the rows",
        "The outputs of all replicas are joined along that axis, so that the result is not that "
        "of one device",
    )


def on_rows_of_micro_step(step, loss):
    """Falls back for a loss that combines rows, of which a micro-step has only some."""
    fall_back(
        step,
        f"the loss {_name(loss)!r} combines rows of the batch with each other. Compile "
        "with accumulate=1, or accept the loss of each micro-step's rows by "
        'compile(loss_reduction="mean")',
        "Each micro-step has some rows of the batch only, so that the result is not that "
        "of one device",
    )


def on_function_of_micro_step(step, tensor, noun: str = "loss"):
    """Warns of a loss or gradient that is no sum of those of micro-steps, as the root of a mean."""
    fall_back(
        step,
        f"the {noun} {_name(tensor)!r} is a function of means or sums over the rows of a batch, "
        "such as a root or a ratio. Compile with accumulate=1, or accept the mean of those of "
        'micro-steps by compile(loss_reduction="mean")',
        "Each micro-step has some rows of the batch only, so that the result is not that "
        "of one device",
    )


def on_late_updates(variable):
    """Warns of a micro-step that computes with weights which one device would have updated."""
    warnings.warn(
        "accumulate: the step computes a loss or a log with weights after it has updated them "
        f"({variable.path!r}, …), such as a generator's loss with an updated critic. All "
        "optimizers apply their gradients in the last micro-batch, so that the result is not "
        "that of the whole batch. Compute all losses before the first update, or use "
        "accumulate=1",
        stacklevel=2,
    )


def on_repeated_assignment(variable):
    """Warns of a program that assigns a weight itself, which each micro-step repeats."""
    warnings.warn(
        f"accumulate: the step assigns the weight {variable.path!r}, which it does in each "
        "micro-batch. Update it by an optimizer, or use accumulate=1",
        stacklevel=2,
    )


def on_unknown(step, loss, noun: str = "loss"):
    """Falls back for a tensor that may be a mean or a sum over rows."""
    name = "" if is_eager(loss) else f" {_name(loss)!r}"
    where = "run_eagerly=True leaves no graph" if is_eager(loss) else "its graph does not tell"
    fall_back(
        step,
        f"the {noun}{name} may be a mean or a sum over the rows of a batch; {where}. Use "
        'compile(loss_reduction="mean"), or loss_reduction="sum" for a sum',
        "It counts as a mean, whose gradients are averaged over replicas and micro-batches",
    )


def on_number_of_rows(step):
    """Falls back for what Python or NumPy computes from the static number of rows, or decides."""
    fall_back(
        step,
        "the step compares x.shape[0] with a number, or computes one from it by int(), float(), "
        "math, or NumPy: that of the rows of a replica or a micro-batch. Compute with "
        "tf.shape(x)[0] by TensorFlow",
        "It counts those rows only, so that the result may not be that of one device",
    )


def on_changed_gradient(step, leaves_no_graph: bool):
    """Falls back for a gradient that is changed before it is reduced.

    Args:
        step: the replica's `ReplicaStep`.
        leaves_no_graph: whether it may be changed, which nothing shows.
    """
    eagerly = ", and run_eagerly=True leaves no graph that would show how it is used"
    fall_back(
        step,
        "a gradient is changed, such as by clipping, that is computed within another tape"
        f"{eagerly if leaves_no_graph else ''}. Call `tape.gradient` after the blocks of all "
        "tapes, if no derivative of it is needed, or let every replica compute the whole "
        'batch by compile(gather_batch="step")',
        "Each replica changes the gradient of its own rows",
        is_certain=leaves_no_graph,
    )


def _name(tensor):
    """Returns a tensor's name, which is the same for all replicas and micro-steps.

    Python shows equal warnings once.
    """
    return re.sub(r"^(while/|replica_\d+/)+", "", tensor.name)
