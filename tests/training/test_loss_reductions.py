"""Sums, vectors, and means over rows: each has the gradient, and the logs, of one device."""

import contextlib
import itertools
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.testing import assert_same_weights
from tests.caught import no_warnings
from tests.tiers import covering, seldom

_draw = np.random.default_rng(0)
X = _draw.normal(size=(22, 3))
Y = X.sum(1, keepdims=True) + _draw.normal(size=(22, 1))
# 24 rows in batches of 8: TensorFlow knows the number of rows while it traces the step.
X_STATIC, Y_STATIC = np.concatenate([X, X[:2]]), np.concatenate([Y, Y[:2]])


def squares(model, x, y):
    return (model(x, training=True) - y) ** 2


def rows_of(x):
    return tf.cast(tf.shape(x)[0], x.dtype)


def norm_of_weights(model):
    return tf.add_n([tf.reduce_sum(w**2) for w in model.trainable_weights])


def gradient_penalty(model, x, y):
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x)
    norms = tf.sqrt(tf.reduce_sum(tape.gradient(outputs, x) ** 2, 1))
    return tf.reduce_mean(squares(model, x, y)) + tf.reduce_mean((norms - 1) ** 2)


def signs_of_gradients(model, x, y):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_mean(squares(model, x, y))
    return tf.reduce_mean(squares(model, x + 0.1 * tf.sign(tape.gradient(loss, x)), y))


def after_steps(number, of_copies):
    """Returns the loss of weights after gradient steps on the same rows."""

    def loss(model, x, y):
        weights = model.trainable_variables
        values = [tf.convert_to_tensor(weight) for weight in weights]
        for _ in range(number):
            with tf.GradientTape() as tape:
                tape.watch(values)
                outputs = model.stateless_call(values, [], x)[0] if of_copies else model(x)
                error = tf.reduce_mean((outputs - y) ** 2)
            gradients = tape.gradient(error, values if of_copies else weights)
            values = [v - 0.1 * g for v, g in zip(values, gradients, strict=True)]
        return tf.reduce_mean((model.stateless_call(values, [], 0.5 * x)[0] - y) ** 2)

    return loss


def mask_of(x):
    return tf.cast(x[:, :1] > 0, x.dtype)


def sum_over_mask(model, x, y):
    return tf.reduce_sum(squares(model, x, y) * mask_of(x))


def mean_over_mask(model, x, y):
    """Divides by no less than 1, so that a batch without such rows has no effect."""
    return sum_over_mask(model, x, y) / tf.maximum(tf.reduce_sum(mask_of(x)), 1)


def dice_of(outputs, target):
    p = tf.sigmoid(outputs)
    both = tf.reduce_sum(p * target)
    return 1 - (2 * both + 1) / (tf.reduce_sum(p) + tf.reduce_sum(target) + 1)


def dice(model, x, y):
    """Returns the Dice loss over all pixels of the batch, as published for segmentation."""
    return dice_of(model(x), tf.cast(y > 0, y.dtype))


def self_normalized(model, x, y):
    """Divides by a sum that has a gradient, too."""
    weights = tf.exp(-tf.abs(model(x)))
    return tf.reduce_sum(weights * squares(model, x, y)) / tf.reduce_sum(weights)


def correlation(model, x, y):
    return 1 - keras.ops.sum(model(x) * y) / keras.ops.sqrt(
        keras.ops.sum(model(x) ** 2) * keras.ops.sum(y**2)
    )


def dice_per_column(model, x, y):
    """Returns one value per column, each of which is a function of sums."""
    p = tf.sigmoid(model(x) * x)
    return 1 - (2 * tf.reduce_sum(p, 0) + 1) / (tf.reduce_sum(p * p, 0) + 3)


def balanced(model, x, y):
    """Weights classes by how rare they are in the batch."""
    classes = tf.cast(y[:, 0] > 0, tf.int32)
    counts = tf.reduce_sum(tf.one_hot(classes, 2, dtype=x.dtype), 0)
    return tf.reduce_mean(squares(model, x, y)[:, 0] * tf.gather(rows_of(x) / counts, classes))


def from_mean(model, x, y):
    outputs = model(x)
    return tf.reduce_mean((outputs - tf.reduce_mean(outputs)) * y)


def from_repeated_mean(repeat):
    """Returns the loss of `from_mean`, which repeats the mean for each row."""

    def loss(model, x, y):
        outputs = model(x)
        mean = tf.reduce_mean(outputs, 0, keepdims=True)
        return tf.reduce_mean((outputs - repeat(mean, tf.shape(x)[0])) * y)

    return loss


def contrastive(model, x, y):
    """Returns the loss of SimCLR: each row has to be found among all others of the other view."""
    one, other = (tf.math.l2_normalize(model(view) * view, axis=1) for view in (x, x + 0.1))
    similarities = tf.matmul(one, other, transpose_b=True) / 0.1
    labels = tf.range(tf.shape(x)[0])
    losses = [
        keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        for logits in (similarities, tf.transpose(similarities))
    ]
    return tf.reduce_mean(tf.concat(losses, 0))


def all_views(model, x, y):
    """Returns the NT-Xent loss, over the similarities of two views of each row."""
    views = tf.concat([model(x) * x, model(x + 0.1) * x], 0)
    rows = tf.shape(x)[0]
    similarities = views @ tf.transpose(views) - 1e9 * tf.eye(2 * rows, dtype=x.dtype)
    labels = tf.concat([tf.range(rows) + rows, tf.range(rows)], 0)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, similarities)


def triplets(model, x, y):
    """Returns the loss of the farthest row of the same class and the nearest of the other one."""
    outputs, classes = model(x) * x, y[:, 0] > 0
    distances = tf.reduce_sum(tf.square(outputs[:, None] - outputs[None]), -1)
    is_same = tf.equal(classes[:, None], classes[None])
    positive = tf.reduce_max(tf.where(is_same, distances, 0.0), 1)
    negative = tf.reduce_min(tf.where(is_same, distances + 1e3, distances), 1)
    return tf.reduce_mean(tf.nn.relu(positive - negative + 1))


def redundancy(model, x, y):
    """Returns the loss of Barlow Twins: the correlation of columns over the batch."""
    outputs = model(x) * x
    outputs = (outputs - tf.reduce_mean(outputs, 0)) / tf.math.reduce_std(outputs, 0)
    correlation = tf.matmul(outputs, outputs, transpose_a=True) / rows_of(x)
    return tf.reduce_sum(tf.square(correlation - tf.eye(3, dtype=x.dtype)))


def ignored_class(model, x, y):
    """Divides by the mean of a mask, after operations that hide that rows stay in their places."""
    logits = model(tf.transpose(tf.transpose(x))) * x
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    return loss(tf.cast(y[:, 0] > 0, tf.int32), logits, x[:, 0] ** 2)


# Losses that compare rows of the batch with each other, or with what all of them have in common.
ACROSS = {
    "balanced": balanced,
    "from mean": from_mean,
    "contrastive": contrastive,
    "all views": all_views,
    "triplets": triplets,
    "redundancy": redundancy,
    "pairs": lambda m, x, y: tf.reduce_mean(tf.nn.softmax(m(x) @ tf.transpose(m(x)))),
    "weights first": lambda m, x, y: tf.reduce_sum(
        squares(m, x, y) * (mask_of(x) / (tf.reduce_sum(mask_of(x)) + 1e-7))
    ),
    "maximum": lambda m, x, y: tf.reduce_max(squares(m, x, y)),
    "boolean mask": lambda m, x, y: tf.reduce_mean(
        tf.boolean_mask(squares(m, x, y)[:, 0], x[:, 0] > 0)
    ),
    "softmax of rows": lambda m, x, y: tf.reduce_sum(tf.nn.softmax(m(x), axis=0) * y),
    "first half": lambda m, x, y: tf.reduce_max(squares(m, x, y)[: tf.shape(x)[0] // 2 + 1]),
    "last of running sums": lambda m, x, y: tf.cumsum(squares(m, x, y)[:, 0])[-1],
    "ratio in a function": lambda m, x, y: tf.function(dice_of)(m(x), tf.cast(y > 0, y.dtype)),
    "pairs and weights": lambda m, x, y: contrastive(m, x, y) + 0.1 * norm_of_weights(m),
}

# Functions of several means and sums.
FUNCTIONS = {
    **ACROSS,
    "one per column": dice_per_column,
    "random factor": lambda m, x, y: (
        (0 * tf.random.uniform([], dtype=x.dtype) + 1) * tf.reduce_mean(squares(m, x, y))
    ),
    "root of sum / size": lambda m, x, y: tf.sqrt(
        tf.reduce_sum(squares(m, x, y)) / tf.cast(tf.shape(x)[0], x.dtype)
    ),
    "root of 0": lambda m, x, y: tf.reduce_mean(squares(m, x, y)) + tf.sqrt(tf.reduce_mean(0 * x)),
    "mean over a mask": lambda m, x, y: sum_over_mask(m, x, y) / (tf.reduce_sum(mask_of(x)) + 1e-7),
    "ratio of means": lambda m, x, y: (
        tf.reduce_mean(squares(m, x, y) * mask_of(x)) / tf.reduce_mean(mask_of(x) + 0.1)
    ),
    "mean over a mask, or 0": mean_over_mask,
    "mask and weights": lambda m, x, y: mean_over_mask(m, x, y) + 0.1 * norm_of_weights(m),
    "times weights": lambda m, x, y: mean_over_mask(m, x, y) * (0.1 + norm_of_weights(m)),
    "root of a mean": lambda m, x, y: tf.sqrt(tf.reduce_mean(squares(m, x, y))),
    "log of a sum": lambda m, x, y: tf.math.log(tf.reduce_sum(squares(m, x, y)) + 0.1),
    "product of means": lambda m, x, y: (
        tf.reduce_mean(squares(m, x, y)) * tf.reduce_mean(tf.abs(m(x)))
    ),
    "mean per column": lambda m, x, y: tf.reduce_sum(tf.exp(tf.reduce_mean(m(x) * x, 0))),
    "Dice": dice,
    "self-normalized": self_normalized,
    "correlation": correlation,
    "of Keras's loss": lambda m, x, y: keras.ops.sqrt(keras.losses.MeanSquaredError()(y, m(x))),
    "a list with a mask": lambda m, x, y: [mean_over_mask(m, x, y), tf.reduce_sum(tf.abs(m(x)))],
    "mean in each row": from_repeated_mean(lambda mean, n: tf.broadcast_to(mean, [n, 1])),
    "tiled mean": from_repeated_mean(lambda mean, n: tf.tile(mean, [n, 1])),
    "repeated mean": from_repeated_mean(lambda mean, n: keras.ops.repeat(mean, n, 0)),
    "filled with a mean": lambda m, x, y: tf.reduce_mean(
        tf.fill(tf.shape(y), tf.reduce_mean(m(x))) * squares(m, x, y)
    ),
    "an ignored class": ignored_class,
    "Keras's hinge": lambda m, x, y: keras.losses.Hinge()(tf.cast(y > 0, y.dtype), m(x)),
}

LOSSES = {
    **FUNCTIONS,
    "mean": lambda m, x, y: tf.reduce_mean(squares(m, x, y)),
    "vector": lambda m, x, y: tf.reduce_sum(squares(m, x, y), -1),
    "column": squares,
    "sum": lambda m, x, y: tf.reduce_sum(squares(m, x, y)),
    "sum of Keras": lambda m, x, y: keras.ops.sum(keras.ops.square(m(x) - y)),
    "sum / batch size": lambda m, x, y: tf.reduce_sum(squares(m, x, y)) / 8,
    "sum / size": lambda m, x, y: tf.reduce_sum(squares(m, x, y)) / tf.cast(tf.size(y), x.dtype),
    "thousandth of a sum": lambda m, x, y: 1e-3 * tf.reduce_sum(squares(m, x, y)) * 100.0,
    "scaled sum": lambda m, x, y: 0.3 * tf.reduce_sum(squares(m, x, y)) / 1.7,
    "l2_loss": lambda m, x, y: tf.nn.l2_loss(m(x) - y),
    "sum / rows": lambda m, x, y: tf.reduce_sum(squares(m, x, y)) / rows_of(x),
    "mean of sums": lambda m, x, y: tf.reduce_mean(tf.reduce_sum(squares(m, x, y), -1)),
    "sum of means": lambda m, x, y: tf.reduce_sum(tf.reduce_mean(squares(m, x, y), 0)),
    "mean + weights": lambda m, x, y: tf.reduce_mean(squares(m, x, y)) + 0.1 * norm_of_weights(m),
    "sum + weights": lambda m, x, y: tf.reduce_sum(squares(m, x, y)) + 0.1 * norm_of_weights(m),
    "mean + sum": lambda m, x, y: (
        tf.reduce_mean(squares(m, x, y)) + 0.2 * tf.reduce_sum(tf.abs(m(x)))
    ),
    "a list": lambda m, x, y: [tf.reduce_mean(squares(m, x, y)), tf.reduce_sum(tf.abs(m(x)))],
    "Python's sum": lambda m, x, y: sum([tf.reduce_sum(squares(m, x, y)), tf.reduce_sum(m(x))]),
    "sum / (rows + ε)": lambda m, x, y: tf.reduce_sum(squares(m, x, y)) / (rows_of(x) + 1e-7),
    "segments": lambda m, x, y: tf.reduce_mean(
        tf.math.unsorted_segment_sum(squares(m, x, y), tf.cast(x[:, 0] > 0, tf.int32), 2)
    ),
    "average and weights": lambda m, x, y: (
        tf.nn.compute_average_loss(squares(m, x, y)[:, 0])
        + tf.nn.scale_regularization_loss(0.1 * norm_of_weights(m))
    ),
    "gradient penalty": gradient_penalty,
    "signs of gradients": signs_of_gradients,
    "Keras's loss": lambda m, x, y: keras.losses.MeanSquaredError()(y, m(x)),
    "Keras's sum": lambda m, x, y: keras.losses.MeanSquaredError(reduction="sum")(y, m(x)),
    "Keras's vector": lambda m, x, y: keras.losses.MeanSquaredError(reduction=None)(y, m(x)),
    "a function of TensorFlow": tf.function(lambda m, x, y: tf.reduce_sum(squares(m, x, y))),
}


def own_step(
    loss,
    process=lambda gradients, x: gradients,
    scales=False,
    loss_scale=None,
    change=lambda value: value,
):
    """Returns a `train_step` that differentiates `loss`; `change` follows `scale_loss`."""

    def train_step(self, data):
        x, y = data
        self.optimizer.loss_scale_factor = loss_scale
        with tf.GradientTape() as tape:
            value = loss(self, x, y)
            if scales:
                value = self.optimizer.scale_loss(value)
            value = change(value)
        gradients = process(tape.gradient(value, self.trainable_weights), x)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"done": tf.zeros([])}

    return train_step


def trained(model_class, step=None, strategy=None, data=(X, Y), make=None, logs=False, **options):
    keras.utils.set_random_seed(1)
    members = {"train_step": step} if step else {}
    own_class = type("Own", (model_class,), members)
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = keras.Input((3,))
        x = keras.layers.Dense(2, activation="tanh")(inputs)
        model = own_class(inputs, make(x) if make else keras.layers.Dense(1)(x))
        options = {"loss": None, **options}
        model.compile(keras.optimizers.SGD(0.02), **options)
    history = model.fit(*data, batch_size=8, epochs=2, verbose=0, shuffle=False).history
    return (model.get_weights(), history) if logs else model.get_weights()


@pytest.fixture(autouse=True)
def _float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def assert_equal(step, replicas=2, data=(X, Y), tolerance=1e-6, warns=None, **options):
    """Compares weights with those of one device, and expects no warning but `warns`."""
    expected = trained(keras.Model, step, data=data)
    strategy = kdist.create_strategy("mirrored", replicas)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = trained(kdist.Model, step, strategy, data, **options)
    found = [str(w.message) for w in caught if "of one device" in str(w.message)]
    assert len(found) == bool(warns)
    assert not warns or re.search(warns, found[0])
    assert_same_weights(weights, expected, tolerance)


LAYOUTS = {
    "2 replicas": (2, (X, Y), {}),
    "3 replicas": (3, (X, Y), {}),
    "static": (2, (X_STATIC, Y_STATIC), {}),
    "accumulate": (2, (X, Y), {"accumulate": 2}),
    "2 steps": (2, (X, Y), {"steps_per_execution": 2}),
    "empty replica": (2, (X[:17], Y[:17]), {}),  # a batch of one row
}


def in_turn(layouts):
    """Returns each loss with the next of the layouts."""
    # A function of a micro-batch's sums is another number: docs/guides/strategies.md.
    of_functions = [name for name in layouts if name != "accumulate"]
    return [
        *zip([n for n in LOSSES if n not in FUNCTIONS], itertools.cycle(layouts), strict=False),
        *zip(FUNCTIONS, itertools.cycle(of_functions), strict=False),
    ]


ALL = in_turn(list(LAYOUTS))
OFTEN = [pair for number, pair in enumerate(ALL) if number % 7 in (0, 3)]  # layouts are in turn
MORE = [(loss, "2 replicas") for loss in LOSSES] + in_turn(list(LAYOUTS)[1:])
PAIRS = [*OFTEN, *seldom(dict.fromkeys(ALL + MORE), other_than=OFTEN)]


def _ctc(model, x, y):
    logits = tf.stack([model(x) * x, 0.5 * x, -x], -1)
    labels = tf.cast(x[:, :1] > 0, tf.int32) + 1
    lengths = [tf.fill([tf.shape(x)[0]], n) for n in (1, 3)]
    return tf.reduce_mean(keras.ops.ctc_loss(labels, logits, *lengths))


def _ctc_of_sparse_labels(model, x, y):
    """Returns the loss as Keras's examples compute it."""
    logits = tf.stack([model(x) * x, 0.5 * x, -x], -1)
    labels = tf.sparse.from_dense(tf.cast(x[:, :1] > 0, tf.int32) + 1)
    inputs = tf.transpose(tf.cast(logits, tf.float32), [1, 0, 2])
    lengths = tf.fill([tf.shape(x)[0]], 3)
    loss = tf.compat.v1.nn.ctc_loss(inputs=inputs, labels=labels, sequence_length=lengths)
    return tf.reduce_mean(tf.cast(loss, x.dtype))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("loss", [_ctc, _ctc_of_sparse_labels])
def test_losses_of_sequences_are_means_over_rows(loss):
    """Their graphs have loops, and gradients of their own."""
    assert_equal(own_step(loss))


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize(("loss", "layout"), PAIRS)
def test_gradients_are_those_of_one_device(loss, layout):
    replicas, data, options = LAYOUTS[layout]
    assert_equal(own_step(LOSSES[loss]), replicas, data, **options)


@pytest.mark.parametrize("loss", ["mean + sum", *seldom(["mean", "vector", "sum"])])
def test_scaled_losses(loss):
    assert_equal(own_step(LOSSES[loss], scales=True))


@pytest.mark.parametrize("options", [{}, *seldom([{"accumulate": 2}])])
@pytest.mark.parametrize(
    ("reduction", "is_eager"), [("mean", True), *seldom([("sum", True), ("mean", False)])]
)
def test_what_follows_the_scaling_of_a_loss(reduction, is_eager, options):
    """Nothing shows that a changed loss had been scaled, without a graph or if it is not read."""
    step = own_step(LOSSES[reduction], scales=True, change=lambda value: 0.5 * value)
    options = {**options, "run_eagerly": is_eager, "loss_reduction": reduction}
    assert_equal(step, 3, **options)


@pytest.mark.parametrize("loss", ["sum", *seldom(["vector"])])
def test_a_program_divides_gradients_by_its_rows(loss):
    def mean(gradients, x):
        return [g / rows_of(x) for g in gradients]

    assert_equal(own_step(LOSSES[loss], mean))


def test_gradients_of_two_tapes():
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as one, tf.GradientTape() as other:
            mean, total = LOSSES["mean"](self, x, y), LOSSES["vector"](self, x, y)
        weights = self.trainable_weights
        first, second = one.gradient(mean, weights), other.gradient(total, weights)
        self.optimizer.apply_gradients(zip(first, weights, strict=True))
        self.optimizer.apply_gradients(zip(second, weights, strict=True))
        return {"done": tf.zeros([])}

    assert_equal(train_step)


def clipped_by_norm(gradients, x):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


CHANGES = {
    "global norm": clipped_by_norm,
    "value": lambda gradients, x: [tf.clip_by_value(g, -0.05, 0.05) for g in gradients],
    "norm of Keras": lambda gradients, x: [
        g / (keras.ops.norm(keras.ops.reshape(g, (-1,))) + 1e-12) for g in gradients
    ],
    "sign": lambda gradients, x: [0.1 * tf.sign(g) for g in gradients],
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("change", CHANGES)
def test_a_program_changes_gradients(change):
    """The gradient is that of the batch before it is clipped, as on one device."""
    assert_equal(own_step(LOSSES["mean"], CHANGES[change]))


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 2}], ids=str)
def test_clipping_with_options(options):
    options = {**options, "loss_reduction": "sum"}
    assert_equal(own_step(LOSSES["sum"], clipped_by_norm, scales=True), 3, **options)


def of_both_orders(weights, gradients, tape):
    """Normalizes first and second derivatives, as Keras's debugging tips do."""
    second = tape.gradient(gradients, weights, unconnected_gradients="zero")
    return [
        0.5 * tf.math.l2_normalize(g) + 0.5 * tf.math.l2_normalize(s)
        for g, s in zip(gradients, second, strict=True)
    ]


def of_first_order(weights, gradients, tape):
    return clipped_by_norm(gradients, None)


def changed_within_another_tape(change):
    """Returns a `train_step` that computes gradients while another tape records."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_weights
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = LOSSES["mean"](self, x, y)
            gradients = inner.gradient(loss, weights)
        changed = change(weights, gradients, outer)
        self.optimizer.apply_gradients(zip(changed, weights, strict=True))
        return {"done": tf.zeros([])}

    return train_step


def test_gradients_within_another_tape_are_changed():
    """They are not reduced before they are changed, because the other tape would record it."""
    assert_equal(changed_within_another_tape(of_first_order), warns="within another")


def test_gradients_of_both_orders_are_changed():
    """Those of the second order are reduced, and the others are means over rows."""
    assert_equal(changed_within_another_tape(of_both_orders))


@pytest.mark.slow
def test_gradients_within_another_tape_are_refused_or_of_the_whole_batch_eagerly():
    strategy = kdist.create_strategy("mirrored", 2)
    step = changed_within_another_tape(of_first_order)
    with pytest.raises(ValueError, match='within another tape.*gather_batch="step"'):
        trained(kdist.Model, step, strategy, run_eagerly=True)
    assert_equal(step, run_eagerly=True, gather_batch="step")


def test_clipping_in_micro_steps_is_reported():
    strategy = kdist.create_strategy("mirrored", 2)
    with pytest.warns(UserWarning, match="clipnorm"):
        trained(kdist.Model, own_step(LOSSES["mean"], clipped_by_norm), strategy, accumulate=2)


def test_weights_climb_along_the_gradient():
    """Sharpness-aware minimization writes the gradient to the weights."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_weights
        with tf.GradientTape() as tape:
            loss = LOSSES["mean"](self, x, y)
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_add(0.1 * gradient / norm)
        with tf.GradientTape() as tape:
            loss = LOSSES["mean"](self, x, y)
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"norm": norm}

    assert_equal(train_step)


def test_gradients_of_a_mean_and_a_sum_are_added():
    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            mean, total = LOSSES["mean"](self, x, y), LOSSES["sum"](self, x, y)
        weights = self.trainable_weights
        pairs = zip(tape.gradient(mean, weights), tape.gradient(total, weights), strict=True)
        self.optimizer.apply([a + 0.1 * b for a, b in pairs], weights)
        return {"done": tf.zeros([])}

    assert_equal(train_step)


@pytest.mark.parametrize("divides", [True, *seldom([False])])
def test_gradients_of_outputs(divides):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x)
        errors = (outputs - y) / rows_of(x) if divides else 0.1 * (outputs - y)
        gradients = tape.gradient(outputs, self.trainable_weights, errors)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"done": tf.zeros([])}

    assert_equal(train_step)


@pytest.mark.slow
def test_a_sum_of_jacobians_is_reported():
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = squares(self, x, y)[:, 0]
        jacobians = tape.jacobian(loss, self.trainable_weights)
        gradients = [tf.reduce_sum(j, 0) for j in jacobians]
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"done": tf.zeros([])}

    with pytest.warns(UserWarning, match="loss_reduction"):
        trained(kdist.Model, train_step, kdist.create_strategy("mirrored", 2))
    assert_equal(train_step, loss_reduction="sum")


class Added(keras.layers.Layer):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "added",
    [lambda x: x**2, lambda x: tf.reduce_sum(x**2), lambda x: tf.reduce_mean(x**2), tf.nn.l2_loss],
    ids=["tensor", "sum", "mean", "l2_loss"],
)
@pytest.mark.parametrize("replicas", [2, *seldom([3])])
def test_added_losses(added, replicas):
    def make(x):
        return keras.layers.Dense(1, kernel_regularizer="l2")(Added(added)(x))

    expected, logs = trained(keras.Model, make=make, loss="mse", logs=True)
    strategy = kdist.create_strategy("mirrored", replicas)
    weights, own = trained(kdist.Model, None, strategy, make=make, loss="mse", logs=True)
    assert_same_weights(weights, expected, 1e-6)
    np.testing.assert_allclose(own["loss"], logs["loss"], rtol=1e-6)


def _of_outputs(name):
    """Returns a loss of (y, outputs); `y` holds the inputs, too."""

    def own(y, outputs):
        return FUNCTIONS[name](lambda x, training=None: outputs, y[:, 1:], y[:, :1])

    return own


COMPILED = ["mean over a mask", "Dice", "one per column", "contrastive", "root of 0"]
COMPILED += seldom(["self-normalized", "of Keras's loss", "triplets", "redundancy"])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_functions_of_means_and_sums(name):
    """As a loss, as a metric, and in the logs."""
    data = X, np.concatenate([Y, X], 1)
    options = {"loss": _of_outputs(name), "metrics": [_named(_of_outputs(name), "metric")]}
    expected, logs = trained(keras.Model, data=data, logs=True, **options)
    strategy = kdist.create_strategy("mirrored", 3)
    weights, found = trained(kdist.Model, None, strategy, data, logs=True, **options)
    assert_same_weights(weights, expected, 1e-9)
    assert found.keys() == {"loss", "metric"}
    for key in logs:
        np.testing.assert_allclose(found[key], logs[key], rtol=1e-9)


def _named(function, name):
    function.__name__ = name
    return function


class Uncertain(keras.layers.Layer):
    """Adds a loss over a mask, weighted by a variance that is trained."""

    def build(self, shape):
        self.log_variance = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        ratio = sum_over_mask(lambda x, training: x, x, 1) / (tf.reduce_sum(mask_of(x)) + 1)
        self.add_loss(tf.exp(-self.log_variance) * ratio + self.log_variance)
        return x


def test_an_added_function_with_a_weight_of_its_own():
    options = {"loss": "mse", "make": lambda x: keras.layers.Dense(1)(Uncertain()(x))}
    expected, logs = trained(keras.Model, logs=True, **options)
    strategy = kdist.create_strategy("mirrored", 2)
    weights, found = trained(kdist.Model, None, strategy, logs=True, **options)
    assert_same_weights(weights, expected, 1e-9)
    np.testing.assert_allclose(found["loss"], logs["loss"], rtol=1e-9)


@pytest.mark.parametrize("loss", [FUNCTIONS["root of a mean"], *seldom([dice, LOSSES["mean"]])])
def test_models_that_are_traced_to_be_built_do_not_warn(loss):
    """Such a trace has one replica, on which nothing is exchanged."""

    class Subclassed(kdist.Model):
        train_step = own_step(loss)

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x, training=None):
            return self.dense(x)

    with kdist.create_strategy("mirrored", 2).scope():
        model = Subclassed()
        model.compile("sgd")
    with no_warnings(message="mean or a sum"):
        model.fit(X, Y, batch_size=8, verbose=0)


def _untold(model, x, y):
    return tf.cond(
        model.optimizer.iterations < 100,
        lambda: tf.reduce_sum(squares(model, x, y)),
        lambda: 2 * tf.reduce_sum(squares(model, x, y)),
    )


def _attention_over_rows(model, x, y):
    """Applies a layer to combinations of rows, which replicas would repeat for all rows."""
    hidden = model.layers[1](x)
    combined = tf.nn.softmax(hidden @ tf.transpose(hidden)) @ hidden
    return tf.reduce_mean((model.layers[2](combined) - y) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "remedy"), [(_untold, "loss_reduction"), (_attention_over_rows, "gather_batch")]
)
def test_other_functions_of_rows_are_computed_from_the_whole_batch(loss, remedy):
    assert_equal(own_step(loss), warns=f"every replica computes the whole batch.*{remedy}")
    with pytest.warns(UserWarning, match="loss_reduction"):
        trained(kdist.Model, own_step(loss), kdist.create_strategy("mirrored", 2), accumulate=2)


def _first_rows(model, x, y):
    return tf.reduce_mean(squares(model, x[:3], y[:3])) + tf.reduce_mean(model(x[3:]) ** 2)


def _halves(model, x, y):
    """Mixes the rows of one half of the batch with those of the other."""
    (one, other), (y, _) = tf.split(x, 2), tf.split(y, 2)
    return tf.reduce_mean(squares(model, 0.3 * one + 0.7 * other, y))


def _halves_of_outputs(model, x, y):
    outputs, middle = model(x), tf.shape(x)[0] // 2
    return tf.reduce_mean((outputs[:middle] - y[middle:]) ** 2)


def _chosen_rows(model, x, y):
    return tf.reduce_mean(squares(model, tf.gather(x, [0, 2]), tf.gather(y, [0, 2])))


def _scanned(model, x, y):
    rows = tf.scan(lambda before, row: 0.5 * before + row, model(x))
    return tf.reduce_mean((rows - y) ** 2)


def _padded(model, x, y):
    """Returns a mean over more rows than the batch has, and weights rows by their positions."""
    padded = tf.pad(squares(model, x, y), [[1, 2], [0, 0]])
    weights = tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, None]
    joined = tf.concat([tf.ones((1, 1), x.dtype), model(x)], 0)
    return tf.reduce_mean(padded) + tf.reduce_mean(weights * squares(model, x, y) * joined[1:])


def _largest(model, x, y):
    """Returns the errors of the row that has the largest output, and of its class."""
    outputs = model(x)
    chosen = tf.one_hot(tf.argmax(outputs, 0), tf.shape(x)[0], axis=0, dtype=x.dtype)
    classes = tf.cast(x[:, 0] > 0, tf.int32)
    sums = tf.scatter_nd(classes[:, None], outputs, [2, 1])
    return tf.reduce_mean((chosen * (outputs - y)) ** 2 + (tf.gather(sums, classes) - y) ** 2)


def _frequencies(model, x, y):
    spectrum = tf.signal.fft(tf.transpose(tf.cast(model(x) - y, tf.complex128)))
    return 1e-2 * tf.reduce_mean(tf.abs(spectrum[:, 1:]) ** 2)


def _penalty_between_rows(model, x, y):
    """Penalizes the slope of the outputs at points between a row and the one at the other end."""
    between = 0.3 * x + 0.7 * x[::-1]
    with tf.GradientTape() as tape:
        tape.watch(between)
        outputs = model(between)
    slopes = tape.gradient(outputs, between)
    return tf.reduce_mean((tf.norm(slopes, axis=1) - 1) ** 2) + tf.reduce_mean(squares(model, x, y))


def _partitioned(model, x, y):
    """Adds means of the rows of two classes."""
    parts = tf.dynamic_partition(squares(model, x, y), tf.cast(x[:, 0] > 0, tf.int32), 2)
    return tf.reduce_mean(parts[1]) + 0.5 * tf.reduce_mean(parts[0])


def _hardest(model, x, y):
    """Returns the mean of the largest errors, whose number is a rounded part of that of rows."""
    errors = tf.reduce_sum(squares(model, x, y), 1)
    number = tf.cast(0.6 * tf.cast(tf.shape(x)[0], tf.float64), tf.int32)
    hard = tf.math.top_k(errors, number).values
    return tf.reduce_mean(hard) + 0.1 * tf.reduce_sum(errors) / tf.cast(number, errors.dtype)


def _joined(model, x, y):
    """Sorts the errors together with a constant one, and divides by the number of all of them."""
    errors = tf.concat([tf.reduce_sum(squares(model, x, y), 1), tf.ones(1, x.dtype)], 0)
    number = tf.cast(tf.shape(errors)[0], x.dtype)
    return tf.reduce_mean(tf.sort(errors)[-2:]) + tf.reduce_sum(errors) / number


@pytest.mark.parametrize(
    "loss", [_padded, _partitioned, _hardest, _joined, *seldom([_largest, _frequencies])]
)
def test_functions_of_positions_are_those_of_the_whole_batch(loss):
    assert_equal(own_step(loss))


@pytest.mark.parametrize("loss", [_scanned, _penalty_between_rows])
def test_rows_that_are_combined_are_computed_from_the_whole_batch(loss):
    assert_equal(own_step(loss), warns="every replica computes the whole batch")


@pytest.mark.parametrize("loss", [_halves, *seldom([_first_rows, _chosen_rows])])
def test_rows_at_positions_are_those_of_the_whole_batch(loss):
    message = "every replica computes the whole batch"
    assert_equal(own_step(loss), data=(X_STATIC, Y_STATIC), warns=message)


def _of_some_rows(y_true, y_pred):
    """Returns one value for each row that a mask keeps, whose mean Keras takes."""
    return tf.boolean_mask((y_true - y_pred) ** 2, y_true > 0)


def test_a_loss_of_the_values_of_some_rows():
    expected = trained(keras.Model, loss=_of_some_rows)
    weights = trained(kdist.Model, None, kdist.create_strategy("mirrored", 2), loss=_of_some_rows)
    assert_same_weights(weights, expected, 1e-6)


def _until_small(x):
    """Halves all rows until their norm is small."""
    return tf.while_loop(lambda y: tf.norm(y) > 0.5, lambda y: (0.5 * y,), (x,))[0]


def _by_positions(x):
    """Adds rows of a table, scales by positions and their number, and subtracts a mean of some."""
    rows = tf.shape(x)[0]
    table = tf.cast(tf.reshape(tf.range(80.0), (40, 2)) / 40, x.dtype)[:rows]
    place = tf.cast(tf.linspace(0.0, 1.0, rows), x.dtype)[:, None]
    chosen = tf.reduce_mean(tf.boolean_mask(x, x[:, 0] > 0), 0)
    return place * (x + table) - chosen + x / tf.cast(rows, x.dtype)


class _Function(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def check_two_replicas(is_divided, **options):
    """Checks weights and logs, and whether the replicas divide the batch or warn that they do not.

    `options` are arguments of `trained`.
    """
    expected, logs = trained(keras.Model, logs=True, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = kdist.create_strategy("mirrored", 2)
        weights, own = trained(kdist.Model, strategy=strategy, logs=True, **options)
    found = [w for w in caught if "every replica computes the whole batch" in str(w.message)]
    assert bool(found) != is_divided
    assert_same_weights(weights, expected, 1e-6)
    for name, values in logs.items():
        np.testing.assert_allclose(own[name], values, rtol=1e-6)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("function", "rows"), covering([_until_small, _by_positions, tf.identity], ["any", "known"])
)
def test_a_layer_of_all_rows_is_that_of_the_whole_batch(function, rows):
    """With a compiled loss, whose values of each row look like those of any layer."""
    data = (X, Y) if rows == "any" else (X_STATIC, Y_STATIC)

    def make(x):
        return keras.layers.Dense(1)(_Function(function)(x))

    is_divided = function is tf.identity
    check_two_replicas(is_divided, data=data, make=make, loss="mse", metrics=["mae"])


@tf.custom_gradient
def _straight_through(x):
    return tf.round(x), lambda gradient: gradient


def _largest(x):
    return tf.reduce_max(tf.abs(x), 0)


class _Range(keras.layers.Layer):
    """Quantizer that follows the range of its inputs, with one step for each feature."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.step = self.add_weight(shape=shape[1:], initializer="ones", trainable=False)
        self.range = self.add_weight(shape=shape[1:], initializer="ones", trainable=False)

    def call(self, x, training=False):
        step = tf.broadcast_to(tf.convert_to_tensor(self.step), tf.shape(x))
        x = x + tf.stop_gradient(tf.round(4 * x / step) * step / 4 - x)
        if training:
            largest = tf.ensure_shape(self.function(x), x.shape[1:])
            self.range.assign(tf.maximum(self.range - 0.1, largest))
        return x / (1 + self.range)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("function", "is_divided"),
    [
        (lambda x: _straight_through(4 * _largest(x)), True),
        (lambda x: _until_small(_largest(x)), False),
        (lambda x: _straight_through(4 * tf.reduce_mean(x, 0)), True),
        (lambda x: tf.function(_largest)(x), True),
    ],
    ids=["rounded", "in a loop", "rounded mean", "in a function"],
)
def test_state_of_all_rows_is_that_of_the_whole_batch(function, is_divided):
    """Such as the range of a quantizer, which is no mean of the ranges of replicas."""

    def make(x):
        inner = keras.layers.Dense(3)(_Range(function)(x))
        return keras.layers.Dense(1)(_Range(function)(inner))

    check_two_replicas(is_divided, make=make, loss="mse")


@pytest.mark.slow
def test_a_function_of_jax_has_the_whole_batch():
    """TensorFlow's graph does not show what it does with rows."""
    numpy = pytest.importorskip("jax.numpy")

    def initial(rng, inputs):
        return {"kernel": numpy.ones((2, 2)) / 2}, {"mean": numpy.zeros(2)}

    def centered(params, state, inputs, training):
        mean = numpy.mean(inputs, axis=0)
        return (inputs - mean) @ params["kernel"], {"mean": 0.9 * state["mean"] + 0.1 * mean}

    def make(x):
        return keras.layers.Dense(1)(keras.layers.JaxLayer(centered, initial)(x))

    check_two_replicas(False, make=make, loss="mse")


def test_an_output_without_rows_beside_others_has_a_loss():
    def make(x):
        outputs = keras.layers.Dense(2)(x)
        return {"center": keras.ops.mean(outputs, axis=0, keepdims=True), "rows": outputs}

    def fitted(model_class):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,))
        model = model_class(inputs, make(inputs))
        model.compile(keras.optimizers.SGD(0.1), {"center": "mse", "rows": "mse"})
        targets = {"center": np.zeros((21, 1)), "rows": np.ones((21, 2))}
        logs = model.fit(X[:21], targets, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights(), logs.history

    expected, logs = fitted(keras.Model)
    with kdist.create_strategy("mirrored", 2).scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, own = fitted(kdist.Model)
    assert_same_weights(weights, expected, 1e-6)
    for name, values in logs.items():
        np.testing.assert_allclose(own[name], values, rtol=1e-5)


class _CenteringCell(keras.layers.SimpleRNNCell):
    """Cell that subtracts the mean of the rows."""

    def call(self, x, states, training=False):
        return super().call(x - keras.ops.mean(x, axis=0), states, training=training)


@pytest.mark.slow
def test_a_cell_of_all_rows_is_that_of_the_whole_batch():
    def make(x):
        steps = keras.layers.Reshape((2, 1))(x)
        return keras.layers.Dense(1)(keras.layers.RNN(_CenteringCell(2))(steps))

    expected = trained(keras.Model, make=make, loss="mse")
    strategy = kdist.create_strategy("mirrored", 2)
    with pytest.warns(UserWarning, match="every replica computes the whole batch"):
        weights = trained(kdist.Model, None, strategy, make=make, loss="mse")
    assert_same_weights(weights, expected, 1e-6)


def _predictions(function):
    """Returns what one device predicts by a function of features, and what two devices predict."""
    predicted = []
    for strategy in (contextlib.nullcontext(), kdist.create_strategy("mirrored", 2).scope()):
        with strategy:
            keras.utils.set_random_seed(1)
            inputs = keras.Input((3,))
            model = kdist.Model(inputs, _Function(function)(keras.layers.Dense(2)(inputs)))
            predicted.append(model.predict(X[:16], batch_size=8, verbose=0))
    return predicted


@pytest.mark.filterwarnings("ignore:.*every replica computes the whole batch")
@pytest.mark.parametrize("function", [_by_positions, *seldom([tf.identity, lambda x: x[::-1]])])
def test_predictions_of_all_rows_are_those_of_the_whole_batch(function):
    expected, ours = _predictions(function)
    np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*every replica computes the whole batch")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.stack([x[:, 0], x[:, 1]]),  # such as distances to positives and negatives
        lambda x: tf.matmul(x, x, transpose_a=True),
        *seldom(
            [
                lambda x: tf.reduce_mean(x, axis=0),
                lambda x: tf.nn.relu(tf.concat([x, -x], axis=0)),
                lambda x: tf.tile(x, [2, 1]),
                lambda x: {"rows": x, "positions": tf.range(5)},
            ]
        ),
    ],
)
def test_outputs_without_rows_on_the_first_axis_are_those_of_the_whole_batch(function):
    """Replicas' outputs cannot be joined along that axis."""
    pairs = zip(*map(keras.tree.flatten, _predictions(function)), strict=True)
    for expected, ours in pairs:
        np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*every replica computes the whole batch")
def test_a_scalar_is_predicted_from_one_batch():
    with kdist.create_strategy("mirrored", 2).scope():
        inputs = keras.Input((3,))
        model = kdist.Model(inputs, _Function(tf.reduce_sum)(inputs))
        assert model.predict(X[:8], verbose=0) == pytest.approx(X[:8].sum(), abs=1e-5)


class _CountingRows(kdist.Model):
    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def predict_step(self, data):
        self.seen.assign_add(tf.cast(tf.shape(data)[0], "float32"))
        return data


def test_a_weight_counts_the_rows_of_all_replicas_in_predict():
    with kdist.create_strategy("mirrored", 2).scope():
        model = _CountingRows()
    model.predict(X[:21], batch_size=8, verbose=0)
    assert model.seen.numpy() == 21


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.reshape(x, (-1,)),
        lambda x: tf.zeros_like(x),
        lambda x: tf.split(tf.concat([x, -x], axis=0), 2)[1],
        lambda x: tf.repeat(x, 2, axis=0),
        lambda x: {"rows": x, "number": tf.fill([tf.shape(x)[0], 1], 2.0)},
        lambda x: tf.boolean_mask(x, x[:, 0] > 0),
        lambda x: tf.map_fn(lambda row: row[0] * row, x),
        lambda x: tf.one_hot(tf.argmax(x, axis=1), 2),
        lambda x: tf.strings.as_string(x),
    ],
)
def test_predictions_of_each_row_are_divided(function):
    strategy = kdist.create_strategy("mirrored", 2)
    with no_warnings(message="whole batch"), strategy.scope():
        inputs = keras.Input((3,))
        model = kdist.Model(inputs, _Function(function)(keras.layers.Dense(2)(inputs)))
        model.predict(X[:16], batch_size=8, verbose=0)


@pytest.mark.slow
def test_outputs_at_positions_are_taken_from_those_of_all_replicas():
    assert_equal(own_step(_halves_of_outputs), data=(X_STATIC, Y_STATIC))
    assert_equal(own_step(_halves_of_outputs))


def test_joined_rows_that_are_divided_again_are_not_reported():
    """Two views of each row pass through the model at once."""

    def loss(model, x, y):
        one, other = tf.split(model(tf.concat([x, 0.5 * x], 0)), 2)
        return tf.reduce_mean((one - y) ** 2) + tf.reduce_mean((other - one) ** 2)

    with no_warnings():
        assert_equal(own_step(loss))


def _mixed_up(model, x, y):
    weight = tf.random.uniform([], dtype=x.dtype)
    return tf.reduce_mean(squares(model, weight * x + (1 - weight) * x[::-1], y))


@pytest.mark.slow
@pytest.mark.parametrize("synchronized", [True, *seldom([False])])
def test_normalized_rows_and_random_factors_are_not_reported(synchronized):
    def make(x):
        x = keras.layers.BatchNormalization(synchronized=synchronized)(x)
        return keras.layers.Dense(1)(keras.layers.LayerNormalization()(x))

    with no_warnings():
        strategy = kdist.create_strategy("mirrored", 2)
        trained(kdist.Model, own_step(_mixed_up), strategy, make=make)
        trained(kdist.Model, None, strategy, make=make, loss="mse")


@pytest.mark.slow
def test_a_function_in_a_nested_function():
    @tf.function
    def gradients(model, x, y):
        with tf.GradientTape() as tape:
            loss = dice(model, x, y)
        return tape.gradient(loss, model.trainable_weights)

    def train_step(self, data):
        found = gradients(self, *data)
        self.optimizer.apply_gradients(zip(found, self.trainable_weights, strict=True))
        return {"done": tf.zeros([])}

    assert_equal(train_step)


def test_functions_that_return_sums():
    def total(y_true, y_pred):
        return tf.reduce_sum((y_true - y_pred) ** 2)

    options = {"loss": total, "metrics": [total], "logs": True}
    expected, logs = trained(keras.Model, **options)
    weights, own = trained(kdist.Model, None, kdist.create_strategy("mirrored", 2), **options)
    assert_same_weights(weights, expected, 1e-6)
    assert list(own) == list(logs)
    for name, values in logs.items():
        np.testing.assert_allclose(own[name], values, rtol=1e-6)


@pytest.mark.slow
def test_a_loss_that_the_graph_does_not_tell_can_be_declared():
    assert_equal(own_step(_untold), loss_reduction="sum")


def test_a_sum_may_be_declared_without_a_graph():
    assert_equal(own_step(LOSSES["sum"]), loss_reduction="sum", run_eagerly=True)
    assert_equal(own_step(LOSSES["vector"]), run_eagerly=True)


@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"loss_reduction": "mean"}, {"accumulate": 2, "run_eagerly": True}],
    ids=str,
)
def test_a_loss_scale_where_the_graph_is_not_read(options):
    """The scale multiplies a loss that is already divided among the replicas."""
    assert_equal(own_step(LOSSES["mean"], scales=True, loss_scale=8.0), **options)


def test_a_division_by_a_constant_number_of_rows_stays_a_mean():
    """The number of rows is a constant in the graph, like any other number."""

    def loss(model, x, y):
        return tf.reduce_sum(squares(model, x, y)) / x.shape[0]

    assert_equal(own_step(loss), data=(X_STATIC, Y_STATIC))


def test_a_function_of_a_division_by_a_constant_number_of_rows():
    def loss(model, x, y):
        return tf.sqrt(tf.reduce_sum(squares(model, x, y)) / x.shape[0])

    assert_equal(own_step(loss), data=(X_STATIC, Y_STATIC))


def test_scaled_functions_with_weights():
    assert_equal(own_step(FUNCTIONS["times weights"], scales=True))


def test_a_loss_that_is_logged_first():
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = _untold(self, *data)
        self._loss_tracker.update_state(loss)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": self._loss_tracker.result()}

    assert_equal(train_step, warns="every replica computes the whole batch")


def _upsampled(x):
    x = keras.layers.Conv2DTranspose(2, 2, strides=2)(keras.layers.Reshape((1, 1, 2))(x))
    return keras.layers.Dense(1)(keras.layers.Flatten()(x))


def _recurrent(x):
    rnn = keras.layers.Bidirectional(keras.layers.LSTM(2))
    return keras.layers.Dense(1)(rnn(keras.layers.Reshape((2, 1))(x)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [_recurrent, *seldom([_upsampled])])
def test_layers_whose_shapes_depend_on_the_rows_are_not_reported(make):
    """A transposed convolution has the shape of its outputs as an input."""
    expected = trained(keras.Model, own_step(LOSSES["mean"]), make=make)
    with no_warnings(message="mean or a sum"):
        strategy = kdist.create_strategy("mirrored", 2)
        weights = trained(kdist.Model, own_step(LOSSES["mean"]), strategy, make=make)
    assert_same_weights(weights, expected, 1e-6)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="loss_reduction"):
        kdist.Model(*[keras.Input((1,))] * 2).compile("sgd", loss_reduction="median")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("steps", "of_copies"), [(1, False), (1, True), (2, True)])
def test_a_loss_of_weights_after_gradient_steps(steps, of_copies):
    """Each replica would take the steps on its own rows, as MAML does not."""
    warns = "combines rows" if steps > 1 else None
    assert_equal(own_step(after_steps(steps, of_copies)), warns=warns)


def test_gradients_of_copies_that_are_changed():
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            values = [tf.convert_to_tensor(weight) for weight in self.trainable_variables]
            tape.watch(values)
            loss = tf.reduce_mean((self.stateless_call(values, [], x)[0] - y) ** 2)
        gradients = [g / (tf.norm(g) + 1e-3) for g in tape.gradient(loss, values)]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"done": tf.zeros([])}

    assert_equal(train_step)


def without_own_row(y, outputs):
    """Compares each row with all others; the row itself is left out."""
    pairs = keras.ops.matmul(outputs, keras.ops.transpose(outputs))
    own = keras.ops.eye(keras.ops.shape(pairs)[0]) > 0
    return keras.ops.mean(keras.ops.logsumexp(keras.ops.where(own, -np.inf, pairs), axis=1))


def softmax_over_rows(y, outputs):
    """Chooses the row of each of two classes."""
    targets = keras.ops.concatenate([y > 0, y <= 0], 1)
    both = keras.ops.concatenate([outputs, -2 * outputs], 1)
    return keras.losses.categorical_crossentropy(targets, both, from_logits=True, axis=0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("loss", [without_own_row, softmax_over_rows])
@pytest.mark.parametrize("data", [(X, Y), (X_STATIC, Y_STATIC)], ids=["22 rows", "24 rows"])
def test_losses_over_rows_and_their_logs(loss, data):
    strategy = kdist.create_strategy("mirrored", 2)
    (weights, logs), (expected, expected_logs) = (
        trained(kind, None, s, data, loss=loss, logs=True)
        for kind, s in ((kdist.Model, strategy), (keras.Model, None))
    )
    assert_same_weights(weights, expected, 1e-6)
    np.testing.assert_allclose(logs["loss"], expected_logs["loss"], 1e-6)
