"""The largest local batch that fits, and the smallest that is nearly as fast: `--batch`."""

import math
import sys

from absl import flags

from kdist import program
from kdist.commands.tuning_run.trials import (
    Trial,
    TrialError,
    given_flags,
    memory_limits,
    trial_command,
)
from kdist.tuning.batch import BatchSearch, BatchTrial

FLAGS = flags.FLAGS
_SECONDS = 4.0


def find_batch():
    """Tries local batches, and prints the table, the batches, and a command that trains.

    Raises:
        ValueError: not even the smallest batch fits.
    """
    limit, process_limit = memory_limits()
    search = BatchSearch(FLAGS.local_batch_size, limit, FLAGS.max_batch or sys.maxsize)
    replicas = 1
    while (local_batch := search.next_batch()) is not None:
        print(f"local batch {local_batch} …", end=" ", flush=True)
        trial, facts = _measured(local_batch, process_limit)
        print(_trial_text(trial), flush=True)
        search.add(trial)
        if facts:
            replicas = facts["replicas"]
            most = facts["examples"] // (replicas * FLAGS.accumulate)
            search.max_batch = min(search.max_batch, most)
    if search.largest is None:
        last = search.trials[-1]
        raise ValueError(
            f"not even a local batch of {last.local_batch} fits: {last.reason}; use more devices, "
            "or divide the model by --layout"
        )
    _print_result(search, replicas * FLAGS.accumulate)


def _measured(local_batch, limit):
    """Returns (trial, facts that the child process reported or None)."""
    size = f"--local_batch_size={local_batch}"
    arguments = [*given_flags("local_batch_size", "minutes"), size]
    try:
        with Trial(trial_command(arguments), limit) as child:
            turn = child.turn(_SECONDS)
    except TrialError as error:
        if not error.lacked:
            raise RuntimeError(str(error)) from error
        return BatchTrial(local_batch, False, math.nan, error.peak_bytes, str(error)), None
    return BatchTrial(local_batch, True, turn.step_seconds, turn.memory_bytes), child.facts


def _trial_text(trial):
    if not trial.fits:
        return trial.reason
    return f"{trial.step_seconds * 1e3:,.1f} ms per step, {trial.memory_bytes / 1e9:.2f} GB"


def _print_result(search, parts):
    """Prints the table and what follows; an update has `parts` local batches."""
    print(f"\n{'local':>8} {'global':>8} {'step':>12} {'examples/s':>12} {'memory':>10}")
    for trial in search.fitting:
        size, seconds = trial.local_batch * parts, trial.step_seconds
        memory = f"{trial.memory_bytes / 1e9:.2f} GB"
        print(
            f"{trial.local_batch:8,} {size:8,} {seconds * 1e3:9,.1f} ms {size / seconds:12,.0f} "
            f"{memory:>10}"
        )
    knee = search.knee()
    bound = "" if search.is_limited else ", and memory allows more"
    print(f"\nlargest that was tried and fits: a local batch of {search.largest:,}{bound}")
    print(f"nearly as fast as the fastest (90 %): from a local batch of {knee:,} on")
    after = knee * parts
    scaling = learning_rate_scaling(FLAGS.local_batch_size * parts)
    before = scaling["base_batch_size"]
    ratio = after / before
    print(
        f"learning rate: for a global batch of {after:,} instead of {before:,}, times {ratio:.3g} "
        f"with SGD, {math.sqrt(ratio):.3g} with Adam:"
    )
    changed = {"local_batch_size": knee, **scaling}
    texts = [f"--{name}={value}" for name, value in changed.items()]
    print(f"  {program.command('train', *given_flags(*changed, 'minutes'), *texts)}")


def learning_rate_scaling(present_batch: int) -> dict[str, str | int]:
    """Returns the flags with which the learning rate follows another global batch.

    Args:
        present_batch: global batch of the training as it is.
    """
    if FLAGS.scale_learning_rate != "none":  # the rate follows already
        return {
            "scale_learning_rate": FLAGS.scale_learning_rate,
            "base_batch_size": FLAGS.base_batch_size,
        }
    is_given = FLAGS["base_batch_size"].present
    return {
        "scale_learning_rate": "sqrt" if FLAGS.optimizer == "adam" else "linear",
        "base_batch_size": FLAGS.base_batch_size if is_given else present_batch,
    }
