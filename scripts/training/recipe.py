"""The model, its optimizer and the schedule that the flags describe."""

import sys

from absl import flags

import kdist

FLAGS = flags.FLAGS


def compiled_model(strategy, train):
    """The model that the flags describe, compiled."""
    plain = on_host(build_model, train) if FLAGS.layout else None
    with strategy.scope():
        if plain is None:
            model = build_model(train)
        else:
            model = kdist.parallel.split_as(plain, strategy.layout, FLAGS.split)
        model.compile(
            optimizer(learning_rate(train.batch, train.num_examples)),
            loss(model),
            metrics=[accuracy(model)],
            jit_compile=FLAGS.jit_compile,
            steps_per_execution=steps_per_execution(),
            accumulate=FLAGS.accumulate,
            max_staleness=FLAGS.max_staleness,
            local_steps=FLAGS.local_steps,
            local_slots=FLAGS.local_slots,
        )
    return model


def split_layout():
    """The layout of --layout; None without.

    Raises:
        ValueError: it is none, or --strategy says something else.
    """
    if FLAGS.layout is None:
        if FLAGS["split"].present:
            raise ValueError("--split says what lies where in a --layout; give one")
        return None
    if FLAGS["strategy"].present:
        raise ValueError("--layout is a strategy of its own; leave --strategy out")
    return kdist.Layout.parse(FLAGS.layout)


def on_host(function, *arguments):
    """What a function gives that makes its variables in the host's memory: a model that is to be
    split need not fit one device."""
    import tensorflow as tf

    with tf.device("CPU:0"):
        return function(*arguments)


def build_model(train):
    """The model that --model names, for the data's shape and number of classes."""
    return kdist.models.create(
        FLAGS.model,
        input_shape=train.image_shape,
        num_classes=train.num_classes,
        sync_batch_norm=FLAGS.sync_batch_norm,
        precision=FLAGS.precision,
    )


def has_one_logit(model):
    """Whether the model answers a yes-or-no question with one number."""
    return model.output_shape[-1] == 1


def loss(model):
    """The loss that belongs to the model's output."""
    import keras

    if has_one_logit(model):
        return keras.losses.BinaryCrossentropy(from_logits=True)
    return keras.losses.SparseCategoricalCrossentropy()


def accuracy(model):
    """The accuracy that belongs to the model's output."""
    import keras

    if has_one_logit(model):
        return keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")
    return keras.metrics.SparseCategoricalAccuracy(name="accuracy")


def learning_rate(batch, epoch_examples):
    """The schedule that the flags describe, in examples."""
    scaling = {"scale": FLAGS.scale_learning_rate, "base_batch": FLAGS.base_batch_size}
    ramp = int(FLAGS.ramp_epochs * epoch_examples)
    if FLAGS.schedule == "cosine":
        return kdist.schedules.Cosine(
            peak=FLAGS.learning_rate,
            batch=batch,
            ramp_examples=ramp,
            total_examples=FLAGS.epochs * epoch_examples,
            **scaling,
        )
    return kdist.schedules.Ramp(
        peak=FLAGS.learning_rate,
        batch=batch,
        ramp_examples=ramp if FLAGS.schedule == "ramp" else 0,
        decay=FLAGS.decay if FLAGS.schedule == "ramp" else 1.0,
        decay_examples=epoch_examples,
        **scaling,
    )


def optimizer(rate):
    """The optimizer that --optimizer names."""
    import keras

    if FLAGS.optimizer == "adam":
        return keras.optimizers.Adam(rate)
    return keras.optimizers.SGD(rate, momentum=0.9 if FLAGS.optimizer == "momentum" else 0.0)


def steps_per_execution():
    """A number, or "auto"."""
    text = FLAGS.steps_per_execution
    return text if text == "auto" else int(text)


def verbosity():
    """Keras's `verbose`: a progress bar for a person, a line an epoch for a log file."""
    if FLAGS.verbose == "auto":
        return 1 if sys.stdout.isatty() else 2
    return int(FLAGS.verbose)
