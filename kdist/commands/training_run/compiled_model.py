"""Model, optimizer, and learning rate schedule of the flags."""

import functools
import logging
import sys

import numpy as np
from absl import flags

import kdist
from kdist.commands.training_run.applications import (
    IMAGENET,
    NEW,
    application,
    build_application,
)
from kdist.commands.training_run.fine_tuning import build_optimizer, freeze, load_weights
from kdist.commands.training_run.user_code import call, is_reference, parse_arguments

FLAGS = flags.FLAGS
_logger = logging.getLogger("kdist.train")

# kdist's models for images; kdist.models also has others.
MODELS = ("mlp", "lenet", "resnet18", "mobilenet_v2", "inception")
# kdist's model for text, which predicts the next token.
TEXT_MODEL = "transformer"
# Classes of operations in keras.layers and keras.ops: those that compute probabilities, and those
# that change only the form of what they receive, such as of probabilities.
_ACTIVATIONS = ("Softmax", "Sigmoid")
_FORMS = (
    *("Activation", "Average", "Cast", "Dropout", "ExpandDims", "Flatten", "GetItem", "Identity"),
    *("Permute", "Reshape", "Squeeze", "Transpose"),
)
# Flags whose values are arguments of `compile`.
_COMPILE_FLAGS = (
    *("optimizer", "learning_rate", "schedule", "ramp_epochs", "decay", "scale_learning_rate"),
    *("base_batch_size", "accumulate", "jit_compile", "steps_per_execution", "max_staleness"),
    *("local_steps", "local_slots", "clip_norm", "ema", "share_trace"),
)


def compiled_model(strategy, train, rate=None):
    """Returns the compiled model; a number as `rate` replaces the schedule of the learning rate."""
    plain = call_on_cpu(build_model, train) if splits_model() else None
    with strategy.scope():
        if plain is None:
            model = kdist.Model.of(build_model(train))
        else:
            model = kdist.parallel.split(
                plain, kdist.parallel.resolve_placement(plain, strategy.layout, FLAGS.split)
            )
        whole = model if plain is None else plain
        if whole.compiled:
            check_compiled()
        else:
            model.compile(
                optimizer(rate or learning_rate(train.batch, train.num_examples)),
                loss(whole),
                metrics=[accuracy(whole), *([kdist.models.Perplexity()] if is_text(train) else [])],
                jit_compile=FLAGS.jit_compile,
                share_trace=FLAGS.share_trace,
                steps_per_execution=steps_per_execution(),
                accumulate=train.batch.accumulate,
                max_staleness=FLAGS.max_staleness,
                local_steps=FLAGS.local_steps,
                local_slots=FLAGS.local_slots,
            )
        if FLAGS.unfreeze_after_epochs is not None:
            build_optimizer(model)
    return model


def builds(name: str) -> bool:
    """Returns whether `kdist train` itself builds the image model of a plan."""
    return name in MODELS or application(name) is not None


def splits_model():
    """Returns whether --layout is that of a split model, and not one of sharded replicas."""
    return bool(FLAGS.layout) and kdist.Layout.parse(FLAGS.layout).shard is None


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
    if FLAGS["split"].present and not splits_model():
        raise ValueError(f"--layout={FLAGS.layout} splits no model; leave --split out")
    return kdist.Layout.parse(FLAGS.layout)


def call_on_cpu(function, *arguments):
    """Returns `function(*arguments)` with its variables in host memory.

    A model that is going to be split may not fit one device.
    """
    import tensorflow as tf

    with tf.device("CPU:0"):
        return function(*arguments)


def build_model(train):
    """Returns the model of --model, with its start weights and frozen layers."""
    model = new_model(train)
    if FLAGS.weights not in (NEW, IMAGENET):
        print_on_chief(load_weights(model, FLAGS.weights))
    if FLAGS.freeze:
        freeze(model)
    return model


@functools.cache
def print_on_chief(text):
    """Prints a text once in this process if it is the chief of a strategy's scope."""
    import tensorflow as tf

    if kdist.strategies.is_chief(tf.distribute.get_strategy()):
        print(text, flush=True)


def new_model(train):
    """Returns the model of --model for the images and classes of the data."""
    arguments = parse_arguments(FLAGS.model_args)
    data = {"input_shape": tuple(train.image_shape), "num_classes": train.num_classes}
    if is_reference(FLAGS.model):
        return build_users_model(data, arguments)
    warn_of_small_pixels(train)
    if FLAGS.model in (*MODELS, TEXT_MODEL):
        if is_text(train):
            last = train.num_classes - 1
            data |= {"causal": True, "vocabulary_size": train.num_classes, "separator": last}
        options = {"sync_batch_norm": FLAGS.sync_batch_norm, "precision": FLAGS.precision}
        return kdist.models.create(FLAGS.model, **{**data, **options, **arguments})
    name = application(FLAGS.model)
    return build_application(
        name, **data, precision=FLAGS.precision, start=FLAGS.weights, **arguments
    )


@functools.cache
def warn_of_small_pixels(train):
    """Logs once that images from 0 to 1 do not suit a model that expects pixels from 0 to 255."""
    images = (train.arrays() or [np.zeros(0)])[0]
    if np.issubdtype(images.dtype, np.floating) and images.size and np.max(images) <= 1:
        _logger.warning(
            "--dataset=%s: its pixels are at most 1, and --model=%s expects 0 to 255, which it "
            "scales itself; return the images without a division by 255",
            FLAGS.dataset,
            FLAGS.model,
        )


def is_text(train):
    """Returns whether the examples are sequences of tokens, which end with a separator."""
    return len(train.image_shape) == 1


def build_users_model(data, arguments):
    """Returns the model of a user's function.

    Args:
        data: shape of an image and number of classes, for a function with these parameters.
        arguments: those of --model_args.

    Raises:
        ValueError: it returned something else, or a model for which no loss is known.
    """
    import keras

    from kdist.models.parts import builder

    build = builder(lambda: call(FLAGS.model, data, **arguments))
    model = build(precision=FLAGS.precision)
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"--model={FLAGS.model} returned {type(model).__name__}; return a keras.Model"
        )
    if not model.compiled and not (model.built and isinstance(model.output_shape, tuple)):
        raise ValueError(
            f"--model={FLAGS.model} returned a model without one known output; compile it in the "
            "function, or return a functional or Sequential model with an Input"
        )
    return model


def check_compiled():
    """Raises a ValueError if a flag cannot apply because the user's function compiled the model."""
    for name in _COMPILE_FLAGS:
        if FLAGS[name].present:
            raise ValueError(
                f"--{name} has no effect, because {FLAGS.model} returns a compiled model; leave "
                "the flag out, or return the model uncompiled"
            )
    if splits_model():
        raise ValueError(
            f"--layout compiles its own copy of the model, and {FLAGS.model} returns a compiled "
            "one; return it uncompiled"
        )


def has_one_output(model):
    """Returns whether the model is a binary classifier, with one output for both classes."""
    return model.output_shape[-1] == 1


def output_activation(model):
    """Returns the name of the function that computes the output: "softmax", "sigmoid", "linear", …

    Operations that only change the form of the output, such as a Reshape or an Average of several
    models, are passed over.
    """
    tensor = model.outputs[0]
    while True:
        operation, node, index = tensor._keras_history
        if hasattr(operation, "outputs") and hasattr(operation, "layers"):  # a model in the model
            tensor = operation.outputs[index]
            continue
        layer = getattr(operation, "layer", operation)  # in TimeDistributed
        kind = type(layer).__name__
        name = getattr(getattr(layer, "activation", None), "__name__", None)
        name = name or (kind.lower() if kind in _ACTIVATIONS else "linear")
        inputs = operation._inbound_nodes[node].input_tensors
        if name != "linear" or kind not in _FORMS or not inputs:
            return name
        tensor = inputs[0]


def loss(model):
    """Returns the loss for the model's output: probabilities, or logits."""
    import keras

    activation = output_activation(model)
    if has_one_output(model):
        return keras.losses.BinaryCrossentropy(from_logits=activation != "sigmoid")
    return keras.losses.SparseCategoricalCrossentropy(from_logits=activation != "softmax")


def accuracy(model):
    """Returns the accuracy metric for the model's output."""
    import keras

    if has_one_output(model):
        threshold = 0.5 if output_activation(model) == "sigmoid" else 0.0
        return keras.metrics.BinaryAccuracy(threshold=threshold, name="accuracy")
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

    options = {"global_clipnorm": FLAGS.clip_norm}
    if FLAGS.ema is not None:
        options |= {"use_ema": True, "ema_momentum": FLAGS.ema}
    if FLAGS.optimizer == "adam":
        return keras.optimizers.Adam(rate, **options)
    momentum = 0.9 if FLAGS.optimizer == "momentum" else 0.0
    return keras.optimizers.SGD(rate, momentum=momentum, **options)


def steps_per_execution():
    """Returns a number, or "auto"."""
    text = FLAGS.steps_per_execution
    return text if text == "auto" else int(text)


def verbosity():
    """Returns `verbose`: by default a progress bar in a terminal, else one line per epoch."""
    if FLAGS.verbose == "auto":
        return 1 if sys.stdout.isatty() else 2
    return int(FLAGS.verbose)
