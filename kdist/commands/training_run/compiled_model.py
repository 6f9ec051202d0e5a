"""Model, optimizer, and learning rate schedule of the flags."""

import sys

from absl import flags

import kdist

FLAGS = flags.FLAGS


def compiled_model(strategy, train):
    """Returns the compiled model."""
    plain = call_on_cpu(build_model, train) if FLAGS.layout else None
    with strategy.scope():
        if plain is None:
            model = build_model(train)
        else:
            model = kdist.parallel.split(
                plain, kdist.parallel.resolve_placement(plain, strategy.layout, FLAGS.split)
            )
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
    """Returns the layout of --layout, or None.

    Raises:
        ValueError: the layout is invalid, or --strategy is given as well.
    """
    if FLAGS.layout is None:
        if FLAGS["split"].present:
            raise ValueError("--split places the layers of a --layout; pass one")
        return None
    if FLAGS["strategy"].present:
        raise ValueError("--layout replaces --strategy; leave --strategy out")
    return kdist.Layout.parse(FLAGS.layout)


def call_on_cpu(function, *arguments):
    """Returns `function(*arguments)` with its variables in host memory.

    A model that is going to be split may not fit one device.
    """
    import tensorflow as tf

    with tf.device("CPU:0"):
        return function(*arguments)


def build_model(train):
    """Returns the model of --model for the images and classes of the data."""
    return kdist.models.create(
        FLAGS.model,
        input_shape=train.image_shape,
        num_classes=train.num_classes,
        sync_batch_norm=FLAGS.sync_batch_norm,
        precision=FLAGS.precision,
    )


def has_one_logit(model):
    """Returns whether the model is a binary classifier with one logit."""
    return model.output_shape[-1] == 1


def loss(model):
    """Returns the loss for the model's output."""
    import keras

    if has_one_logit(model):
        return keras.losses.BinaryCrossentropy(from_logits=True)
    return keras.losses.SparseCategoricalCrossentropy()


def accuracy(model):
    """Returns the accuracy metric for the model's output."""
    import keras

    if has_one_logit(model):
        return keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")
    return keras.metrics.SparseCategoricalAccuracy(name="accuracy")


def learning_rate(batch, epoch_examples):
    """Returns the learning rate schedule."""
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
    """Returns the optimizer of --optimizer."""
    import keras

    if FLAGS.optimizer == "adam":
        return keras.optimizers.Adam(rate)
    return keras.optimizers.SGD(rate, momentum=0.9 if FLAGS.optimizer == "momentum" else 0.0)


def steps_per_execution():
    """Returns a number, or "auto"."""
    text = FLAGS.steps_per_execution
    return text if text == "auto" else int(text)


def verbosity():
    """Returns `verbose`: by default a progress bar in a terminal, else one line per epoch."""
    if FLAGS.verbose == "auto":
        return 1 if sys.stdout.isatty() else 2
    return int(FLAGS.verbose)
