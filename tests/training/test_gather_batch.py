"""Losses and layers that mix the rows of a batch: the same numbers as plain Keras on one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.testing import assert_same_weights
from tests.forked import python_tasks
from tests.tiers import covering, seldom

ROWS, BATCH, FEATURES = 17, 8, 6  # the last batch has one row: other replicas have none


def data(rows=ROWS):
    return np.random.default_rng(1).normal(size=(rows, FEATURES)).astype("float32")


@keras.saving.register_keras_serializable()
class InBatchSoftmax(keras.losses.Loss):
    """Retrieval: the candidates of the other rows are each query's negatives."""

    def __init__(self, gather=lambda x: x, **options):
        super().__init__(**options)
        self.gather = gather

    def call(self, y_true, y_pred):
        queries, candidates = keras.ops.split(self.gather(y_pred), 2, axis=-1)
        scores = keras.ops.matmul(queries, keras.ops.transpose(candidates))
        labels = keras.ops.arange(keras.ops.shape(scores)[0])
        return keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True)


class Whitening(keras.layers.Layer):
    """Normalization by statistics of its own over the batch."""

    def __init__(self, gather):
        super().__init__()
        self.gather = gather

    def call(self, x):
        mean, variance = keras.ops.moments(self.gather(x), axes=[0], keepdims=True)
        return (x - mean) / keras.ops.sqrt(variance + 1e-2)


class SimCLR(keras.Model):
    """NT-Xent over two views, with a learned temperature, by a custom step."""

    scales_loss = True

    def __init__(self, gather, scales_loss):
        super().__init__()
        self.gather, self.scales_loss = gather, scales_loss
        self.encoder = keras.layers.Dense(4)
        self.temperature = self.add_weight(shape=(), initializer="ones")
        self.mean_loss = keras.metrics.Mean("nt_xent")

    def build(self, shape):
        self.encoder.build(shape)

    def call(self, x):
        return self.encoder(x)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            views = tf.concat([self(x), self(x[:, ::-1])], -1)
            first, second = tf.split(self.gather(tf.nn.l2_normalize(views, -1)), 2, -1)
            scores = tf.matmul(first, second, transpose_b=True) * self.temperature
            labels = tf.range(tf.shape(scores)[0])
            both = keras.losses.sparse_categorical_crossentropy(
                labels, scores, from_logits=True
            ) + keras.losses.sparse_categorical_crossentropy(
                labels, tf.transpose(scores), from_logits=True
            )
            loss = tf.reduce_mean(both)
            scaled = self.optimizer.scale_loss(loss) if self.scales_loss else loss
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        self.mean_loss.update_state(loss)
        return {"nt_xent": self.mean_loss.result()}


def encoder(model_class, *layers, units=8):
    inputs = keras.Input((FEATURES,))
    x = inputs
    for layer in (keras.layers.Dense(units), *layers):
        x = layer(x)
    return model_class(inputs, x)


def trained(model, x, *targets, **options):
    history = model.fit(
        x, *targets, batch_size=BATCH, shuffle=False, verbose=0, epochs=2, **options
    )
    return history.history


def assert_equal_to_one_device(
    build, *targets, rows=ROWS, devices=2, strategy="mirrored", **options
):
    """Compares weights and logs of `build(model class, gather)`, for plain Keras and kdist."""
    results = []
    for is_kdist in (False, True):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        if is_kdist:
            with kdist.create_strategy(strategy, devices).scope():
                model = build(kdist.Model, kdist.gather_batch)
        else:
            model = build(keras.Model, lambda x: x)
        logs = trained(model, data(rows), *targets, **options)
        results.append((model.get_weights(), logs))
    (expected, expected_logs), (weights, logs) = results
    assert_same_weights(weights, expected, 2e-6)
    for name, values in expected_logs.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5, err_msg=name)


def sgd():
    return keras.optimizers.SGD(0.1)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("where", "rows"),
    covering([("mirrored", 2), ("mirrored", 4), ("central_storage", 2)], [16, 17, 19]),
)
def test_retrieval_in_a_loss(where, rows):
    strategy, devices = where

    def build(model_class, gather):
        model = encoder(model_class, keras.layers.UnitNormalization())
        model.compile(sgd(), InBatchSoftmax(gather))
        return model

    assert_equal_to_one_device(build, np.zeros(rows), rows=rows, devices=devices, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "reduction", ["mean_with_sample_weight", *seldom(["sum_over_batch_size", "sum"])]
)
def test_retrieval_by_compile(reduction):
    """Sample weights, which a loss function does not see, are gathered as well."""

    def build(model_class, gather):
        model = encoder(model_class, keras.layers.Dense(8, kernel_regularizer="l2"))
        options = {"gather_batch": True} if model_class is kdist.Model else {}
        model.compile(sgd(), InBatchSoftmax(reduction=reduction), **options)
        return model

    weights = np.linspace(0.1, 1.0, ROWS)
    assert_equal_to_one_device(build, np.zeros(ROWS), sample_weight=weights)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("gathers", [True, False])
def test_outputs_by_compile(gathers):
    """Each output's loss is logged, and labels are integers."""

    def build(model_class, gather):
        inputs = keras.Input((FEATURES,))
        outputs = {
            "pairs": keras.layers.Dense(8 if gathers else 1, name="pairs")(inputs),
            "label": keras.layers.Dense(3, activation="softmax", name="label")(inputs),
        }
        model = model_class(inputs, outputs)
        options = {"gather_batch": gathers} if model_class is kdist.Model else {}
        pairs = InBatchSoftmax() if gathers else "mse"
        losses = {"pairs": pairs, "label": "sparse_categorical_crossentropy"}
        model.compile(sgd(), losses, metrics={"label": "accuracy"}, **options)
        return model

    targets = {"pairs": np.zeros(ROWS), "label": np.arange(ROWS) % 3}
    assert_equal_to_one_device(build, targets)


def test_logits_by_compile():
    """Keras computes cross-entropies of probabilities from logits, and limits others to 16."""

    def build(model_class, gather):
        large = keras.initializers.RandomNormal(0.0, 300.0)
        head = keras.layers.Dense(3, "softmax", kernel_initializer=large)
        model = encoder(model_class, head)
        options = {"gather_batch": True} if model_class is kdist.Model else {}
        optimizer = keras.optimizers.SGD(1e-4)
        model.compile(optimizer, "sparse_categorical_crossentropy", **options)
        return model

    assert_equal_to_one_device(build, np.arange(ROWS) % 3)


def test_masks_by_compile():
    def build(model_class, gather):
        inputs = keras.Input((FEATURES,))
        x = keras.layers.Reshape((FEATURES, 1))(inputs)
        x = keras.layers.Masking(mask_value=0.0)(x)
        model = model_class(inputs, keras.layers.Dense(1)(x))
        options = {"gather_batch": True} if model_class is kdist.Model else {}
        model.compile(sgd(), "mse", **options)
        return model

    x = data()
    x[np.arange(ROWS)[:, None] % 5 > np.arange(FEATURES)] = 0

    targets = np.ones((ROWS, FEATURES, 1), "float32")
    results = []
    for model_class in (keras.Model, kdist.Model):
        keras.utils.set_random_seed(3)
        if model_class is kdist.Model:
            with kdist.create_strategy("mirrored", 2).scope():
                model = build(model_class, None)
        else:
            model = build(model_class, None)
        trained(model, x, targets)
        results.append(model.get_weights())
    assert_same_weights(*results, 2e-6)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("devices", "scales_loss"), covering([2, 4], [True, False]))
def test_contrastive_step(devices, scales_loss):
    def build(model_class, gather):
        model = SimCLR(gather, scales_loss)
        model.build((None, FEATURES))
        model.compile(sgd())
        return kdist.Model.of(model) if model_class is kdist.Model else model

    assert_equal_to_one_device(build, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, *seldom([2])])
def test_statistics_in_a_layer(devices):
    """Each replica's loss depends on the rows of all others, and is that of its own rows."""

    def build(model_class, gather):
        model = encoder(model_class, Whitening(gather), keras.layers.Dense(1))
        model.compile(sgd(), "mse")
        return model

    assert_equal_to_one_device(build, np.arange(ROWS) / ROWS, devices=devices)


@pytest.mark.slow
def test_a_loss_needs_no_gather_batch():
    """Replicas exchange what a loss combines."""
    assert_equal_to_one_device(
        lambda model_class, gather: compiled(encoder(model_class)), np.zeros(ROWS)
    )


def test_without_it_every_replica_computes_the_whole_batch():
    """The layer is followed by weights, so that its rows cannot be exchanged."""

    def build(model_class, gather):
        model = encoder(model_class, Whitening(lambda x: x), keras.layers.Dense(1))
        model.compile(sgd(), "mse")
        return model

    with pytest.warns(UserWarning, match="every replica computes the whole batch.*gather_batch"):
        assert_equal_to_one_device(build, np.arange(ROWS) / ROWS)


class Pairs(kdist.Model):
    """Trains on batches of shape (2, …): anchors and positives, as in Keras's metric learning."""

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(batch[0]) - self(batch[1]) - 1) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class OfEight(kdist.Model):
    """Accepts batches of eight rows only."""

    def call(self, x):
        return tf.ensure_shape(super().call(x), (8, 8))

    def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
        return keras.ops.mean(y_pred**2)


def train_on_unknown_sizes(model_class, shape, strategy, **options):
    keras.utils.set_random_seed(3)
    batches = data()[:16].reshape(2, *shape)
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=tf.TensorSpec([*[None] * (len(shape) - 1), FEATURES]),
    )
    with strategy.scope():
        model = encoder(model_class)
        model.compile(sgd(), **options)
    model.fit(dataset, verbose=0)
    return model.get_weights()


def test_a_first_axis_without_rows(mirrored):
    train = functools.partial(train_on_unknown_sizes, Pairs, (2, 4, FEATURES))
    expected = train(kdist.create_strategy("one_device"))
    with pytest.warns(UserWarning, match="every replica computes the whole batch"):
        assert_same_weights(train(mirrored), expected, 2e-6)


def test_a_number_of_rows_that_is_constant(mirrored):
    train = functools.partial(train_on_unknown_sizes, OfEight, (8, FEATURES))
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        train(mirrored)
    assert any('gather_batch="step"' in note for note in raised.value.__notes__)
    expected = train(kdist.create_strategy("one_device"))
    assert_same_weights(train(mirrored, gather_batch="step"), expected, 2e-6)


def compiled(model, loss=None, **options):
    model.compile(sgd(), loss or InBatchSoftmax(), **options)
    return model


def test_evaluation_is_that_of_one_device(mirrored):
    x, y = data(), np.zeros(ROWS)
    keras.utils.set_random_seed(3)
    expected = compiled(encoder(keras.Model)).evaluate(x, y, batch_size=BATCH, verbose=0)
    keras.utils.set_random_seed(3)
    with mirrored.scope():
        model = compiled(encoder(kdist.Model), gather_batch=True)
    assert model.evaluate(x, y, batch_size=BATCH, verbose=0) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("tensor", [np.int8(3), 7, True, 0.5])
def test_types(mirrored, tensor):
    def on_replica():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return kdist.gather_batch({"a": tf.fill([replica + 1, 2], tensor), "b": None})

    found = mirrored.experimental_local_results(tf.function(lambda: mirrored.run(on_replica))())
    for gathered in found:
        assert gathered["b"] is None
        np.testing.assert_array_equal(gathered["a"], np.full([3, 2], tensor))


def test_refusals(mirrored):
    with pytest.raises(TypeError, match="symbolic"):
        kdist.gather_batch(keras.Input((3,)))
    with pytest.raises(TypeError, match="ragged|Ragged"):
        kdist.gather_batch(tf.ragged.constant([[1.0], []]))
    with pytest.raises(TypeError, match="string"):
        kdist.gather_batch(tf.constant(["a"]))
    with pytest.raises(ValueError, match="scalar"):
        kdist.gather_batch(tf.constant(1.0))
    with pytest.raises(ValueError, match="accumulate"):
        compiled(encoder(kdist.Model), accumulate=2, gather_batch=True)
    with pytest.raises(ValueError, match="step"):
        compiled(encoder(kdist.Model), gather_batch="all")
    with pytest.raises(ValueError, match="no loss"):
        encoder(kdist.Model).compile(gather_batch=True)

    def train(loss, **options):
        with mirrored.scope():
            model = compiled(encoder(kdist.Model), loss, **options)
        trained(model, data(), np.zeros(ROWS))

    gathered = functools.partial(InBatchSoftmax, kdist.gather_batch)
    with pytest.raises(ValueError, match="accumulate"):
        train(gathered(), accumulate=2)
    with pytest.raises(ValueError, match="local_steps"):
        train(gathered(), local_steps=2)
    with pytest.raises(ValueError, match="sum"):
        train(gathered(reduction="sum"))
    with pytest.raises(ValueError, match="none"):
        train(InBatchSoftmax(reduction="none"), gather_batch=True)


TASK = """
import json, sys
import kdist
name, *_ = sys.argv[1:]
strategy = kdist.create_strategy(name, cluster_timeout_seconds=60)
import numpy as np
from kdist.testing import largest_difference
from tests.training.test_gather_batch import *

def train(model_class, **options):
    keras.utils.set_random_seed(3)
    gather = kdist.gather_batch if options else lambda x: x
    model = encoder(model_class, Whitening(gather))
    compiled(model, **options)
    logs = trained(model, data(), np.zeros(ROWS))
    return model.get_weights(), logs["loss"]

with strategy.scope():
    options = {"max_staleness": 0} if name == "parameter_server" else {}
    weights, losses = train(kdist.Model, gather_batch=True, **options)
expected, expected_losses = train(keras.Model)
print(json.dumps([largest_difference(weights, expected),
                  largest_difference([losses], [expected_losses])]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("multi_worker", {"worker": 2}),
        *seldom([("parameter_server", {"chief": 1, "worker": 2, "ps": 1})]),
    ],
)
def test_jobs(name, tasks):
    for result in python_tasks(TASK, tasks, [name]):
        assert result is None or max(result) < 2e-6
