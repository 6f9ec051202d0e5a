"""Data of the run: all examples, or as many as --minutes leaves time for."""

import sys
import time

import numpy as np
from absl import flags

import kdist
from kdist.commands.training_run.compiled_model import compiled_model
from kdist.commands.training_run.user_code import call, is_reference
from kdist.data.names import TEXT_PREFIX
from kdist.data.worker_addresses import resolve_data_workers
from kdist.run_directory import RunDirectory

FLAGS = flags.FLAGS

# --minutes: seconds for which steps are timed, and minimum number of steps to train.
MEASURED_SECONDS = 1.0
MIN_STEPS = 4


def load_data_in_time(strategy, batch, started, interrupted):
    """Returns (name of the dataset, training pipeline, test pipeline), within --minutes.

    Args:
        strategy: the strategy to train with.
        batch: a `kdist.Batch`.
        started: start of the program, in seconds of `time.perf_counter`.
        interrupted: run directory of the interrupted run to resume, which determined its examples,
            or None.
    """
    import keras

    dataset, train, test = load_data(batch)
    if FLAGS.minutes is None:
        return dataset, train, test
    examples = examples_of_run(interrupted) if interrupted else None
    examples = examples or examples_in_time(strategy, train, test, started)
    keras.utils.set_random_seed(FLAGS.seed)
    if examples < train.num_examples:
        train = train.subset(examples)
    return dataset, train, test


def load_data(batch):
    """Returns (name of the dataset, training pipeline, test pipeline), or those of the fallback.

    Args:
        batch: a `kdist.Batch`.
    """
    options = {name: FLAGS[name].value for name in ("seed", "operations", "parallel_calls")}
    options["batch"] = batch
    if FLAGS.dataset.startswith(TEXT_PREFIX):
        options["sequence_length"] = FLAGS.sequence_length
    if resolve_data_workers(FLAGS.data_workers or None):
        from kdist.data import workers

        workers.ends_on_silence = True
    try:
        return FLAGS.dataset, *load_by_name(
            FLAGS.dataset,
            examples=FLAGS.examples,
            data_dir=FLAGS.data_dir,
            download=FLAGS.download,
            data_workers=FLAGS.data_workers or None,
            **options,
        )
    except kdist.data.DatasetUnavailable as error:
        if FLAGS.fallback_dataset is None:
            raise
        print(f"{error}\nTraining on {FLAGS.fallback_dataset} instead.", file=sys.stderr)
        FLAGS.epochs = FLAGS.fallback_epochs or FLAGS.epochs
        return FLAGS.fallback_dataset, *load_by_name(
            FLAGS.fallback_dataset, data_workers=(), **options
        )


def load_by_name(name, *, data_dir=None, download=True, **options):
    """Returns the training and the test pipeline of a dataset, or of a user's function.

    Args:
        name: name or directory of a dataset, or `module:function` or `path.py:function`.
        data_dir, download, **options: see `kdist.data.load`.
    """
    if not is_reference(name):
        return kdist.data.load(name, data_dir=data_dir, download=download, **options)
    from kdist.data.datasets import create_pipelines

    return create_pipelines(sources_of_function(name), **options)


def sources_of_function(text):
    """Returns the training and the test source of a user's function.

    It returns `(train, test)`. Each is a `kdist.data.Source`, or arrays `(images, labels)` as in
    `keras.datasets`, whose labels may be (N, 1).
    """
    from kdist.data import Source

    returned = call(text)
    try:
        train, test = returned
        if isinstance(train, Source) and isinstance(test, Source):
            return train, test
        train, test = ((np.asarray(x), _flat(y)) for x, y in (train, test))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"--dataset={text} returned {type(returned).__name__}; return (x_train, y_train), "
            "(x_test, y_test), arrays of images and labels, or two kdist.data.Source"
        ) from error
    # Labels that are not integers are refused below, with their type.
    integers = [y for _, y in (train, test) if np.issubdtype(y.dtype, np.integer)]
    classes = 1 + int(max((labels.max(initial=0) for labels in integers), default=0))
    return tuple(kdist.data.from_arrays(*arrays, num_classes=classes) for arrays in (train, test))


def _flat(labels):
    labels = np.asarray(labels)
    return labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels


def examples_in_time(strategy, train, test, started):
    """Returns the number of examples that fit into --minutes, from the time of a few steps."""
    if kdist.strategies.num_workers(strategy) > 1:
        raise ValueError("--minutes is for one host; use --examples on several")
    print(f"timing a few steps, for {FLAGS.minutes:g} minutes in all …", flush=True)
    model = compiled_model(strategy, train)
    training = rate(train, lambda steps: model.fit(train, steps_per_epoch=steps, verbose=0))
    testing = rate(train, lambda steps: model.evaluate(train, steps=steps, verbose=0))
    # Compiling again takes at most as long as everything so far.
    left = 60 * FLAGS.minutes - 2 * (time.perf_counter() - started)
    left -= FLAGS.epochs * test.num_examples / testing
    batch = train.batch.global_size
    examples = int(left * training / FLAGS.epochs) // batch * batch
    kept = min(train.num_examples, max(MIN_STEPS * batch, examples))
    print(
        f"{training:,.0f} examples/s: {FLAGS.minutes:g} minutes are enough for {kept:,} of "
        f"{train.num_examples:,} examples"
    )
    return kept


def rate(train, run):
    """Returns the examples per second of `run(number of steps)`, after compilation."""
    run(1)
    steps, seconds = 1, 0.0
    while seconds < MEASURED_SECONDS and steps < train.steps_per_epoch:
        steps *= 2
        began = time.perf_counter()
        run(steps)
        seconds = time.perf_counter() - began
    return steps * train.batch.global_size / seconds


def examples_of_run(run_dir):
    """Returns the number of examples of an interrupted run with --minutes."""
    return RunDirectory(run_dir).read_config()["num_examples"]
