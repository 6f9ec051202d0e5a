"""The data that the flags name, all of them or what --minutes leave time for."""

import json
import sys
import time

from absl import flags

import kdist
from kdist.run_directory import RunDirectory
from training.recipe import compiled_model

FLAGS = flags.FLAGS

# --minutes: how many steps are timed, and how many are trained in any case.
MEASURED_STEPS = 2
MINIMAL_STEPS = 4


def data_in_time(strategy, batch, started, interrupted=None):
    """The data set's name and its pipelines; with --minutes, of as much as there is time for.

    Args:
        strategy: to train under.
        batch: a `kdist.Batch`.
        started: when the program did, of `time.perf_counter`.
        interrupted: path of the run that is gone on with, which has found its examples.
    """
    import keras

    dataset, train, test = load_data(batch)
    if FLAGS.minutes is None:
        return dataset, train, test
    examples = measured_before(interrupted) if interrupted else None
    examples = examples or examples_in_time(strategy, train, test, started)
    keras.utils.set_random_seed(FLAGS.seed)
    if examples < train.num_examples:
        return load_data(batch, examples)
    return dataset, train, test


def load_data(batch, examples=None):
    """The data set's name and its pipelines; the fallback's if it cannot be had.

    Args:
        batch: a `kdist.Batch`.
        examples: to train on, in the place of --examples.
    """
    options = {"batch": batch, "seed": FLAGS.seed, "operations": FLAGS.operations}
    try:
        return FLAGS.dataset, *kdist.data.load(
            FLAGS.dataset,
            examples=examples or FLAGS.examples,
            data_dir=FLAGS.data_dir,
            download=FLAGS.download,
            **options,
        )
    except kdist.data.DatasetUnavailable as error:
        if FLAGS.fallback_dataset is None:
            raise
        print(f"{error}\nTraining on {FLAGS.fallback_dataset} instead.", file=sys.stderr)
        return FLAGS.fallback_dataset, *kdist.data.load(FLAGS.fallback_dataset, **options)


def examples_in_time(strategy, train, test, started):
    """How many examples --minutes leave time for, by the time that a few steps take."""
    if kdist.strategies.num_workers(strategy) > 1:
        raise ValueError("--minutes is for one host; on several, give --examples")
    model = compiled_model(strategy, train)
    training = rate(train, lambda steps: model.fit(train, steps_per_epoch=steps, verbose=0))
    testing = rate(train, lambda steps: model.evaluate(train, steps=steps, verbose=0))
    # Compiling anew takes no longer than all of this has taken.
    left = 60 * FLAGS.minutes - 2 * (time.perf_counter() - started)
    left -= FLAGS.epochs * test.num_examples / testing
    batch = train.batch.global_size
    examples = int(left * training / FLAGS.epochs) // batch * batch
    kept = min(train.num_examples, max(MINIMAL_STEPS * batch, examples))
    print(
        f"{training:,.0f} examples/s: {FLAGS.minutes:g} minutes are enough for {kept:,} of "
        f"{train.num_examples:,} examples"
    )
    return kept


def rate(train, run):
    """Examples a second of `run`, a function of how many steps to run, after compiling."""
    run(1)
    began = time.perf_counter()
    run(MEASURED_STEPS)
    return MEASURED_STEPS * train.batch.global_size / (time.perf_counter() - began)


def measured_before(run_dir):
    """The examples that an interrupted run with --minutes has found time for."""
    return json.loads(RunDirectory(run_dir).config.read_text())["num_examples"]
