"""Programs with `accumulate`, compared with the whole batch on one device."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import kdist
from kdist.testing import assert_same_weights
from tests.caught import no_warnings
from tests.tiers import covering


def data(rows=44):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 6)).astype("float32")
    return x, (2 * x[:, :1] + x[:, 1:2]).astype("float32")


def trained(strategy, build, accumulate, **options):
    """Returns a trained model and the logs of its batches of 16, 16, and 12 rows."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.05), "mse", accumulate=accumulate, **options)
    batches = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batches.append(logs)
    )
    model.fit(*data(), batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[log])
    return model, [{name: float(value) for name, value in logs.items()} for logs in batches]


def whole(build):
    return trained(kdist.create_strategy("one_device"), build, accumulate=1)


def functional(model_class=kdist.Model, *hidden):
    inputs = outputs = keras.Input((6,))
    for layer in [layers.Dense(8, activation="tanh"), *hidden, layers.Dense(1)]:
        outputs = layer(outputs)
    return model_class(inputs, outputs)


class OwnLogs(kdist.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = ops.square(y - self(x, training=True))
            loss = ops.mean(errors)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        rate, step = self.optimizer.learning_rate, self.optimizer.iterations
        return {"own": loss, "sum": ops.sum(errors), "rate": rate, "step": step}


class MoreLogs(kdist.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "error": ops.mean(ops.abs(y - y_pred))}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("model_class", "accumulate"), covering([OwnLogs, MoreLogs], [2, 3]))
def test_logs_of_a_step_are_those_of_the_whole_batch(strategy, model_class, accumulate):
    def build():
        return functional(model_class)

    expected, logs = whole(build)
    found, found_logs = trained(strategy, build, accumulate)
    assert_same_weights(found.get_weights(), expected.get_weights())
    assert len(found_logs) == len(logs)
    for one, other in zip(found_logs, logs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_logs_of_an_eager_step_are_those_of_the_whole_batch():
    def build():
        return functional(MoreLogs)

    _, logs = whole(build)
    _, found = trained(kdist.create_strategy("one_device"), build, 2, run_eagerly=True)
    assert [log["error"] for log in found] == pytest.approx([log["error"] for log in logs])


class Counting(layers.Layer):
    """Scales its input by a factor that rises with the steps, which it counts in two ways."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.number = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")

    def call(self, x, training=False):
        if training:
            self.steps.assign(self.steps + 1.0)
            self.number.assign_add(1)
        return x * ops.minimum(1.0, self.steps / 4.0)


class CountingInBranch(layers.Layer):
    """Counts within a branch, in a weight and in a variable of TensorFlow."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.number = tf.Variable(0.0, trainable=False)

    def call(self, x, training=False):
        def count():
            self.steps.assign_add(1.0)
            self.number.assign_add(1.0)
            return 0.0

        if training:
            tf.cond(self.steps < 9.0, count, lambda: 0.0)
        return x * tf.minimum(1.0, (self.steps + self.number) / 8.0)


class Teacher(kdist.Model):
    """Has a moving average of its weights as its teacher, which its `train_step` updates."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = (
            keras.Sequential([keras.Input((6,)), layers.Dense(1)]) for _ in range(2)
        )
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.student(x) - y - 0.1 * self.teacher(x)))
        weights = self.student.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for average, weight in zip(self.teacher.variables, weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {"loss": loss}


STATES = {
    "a layer that counts": lambda: functional(kdist.Model, Counting()),
    "a branch that counts": lambda: functional(kdist.Model, CountingInBranch()),
    "a spectral normalization": lambda: functional(
        kdist.Model, layers.SpectralNormalization(layers.Dense(4))
    ),
    "a teacher": Teacher,
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", STATES)
def test_state_that_does_not_depend_on_rows_changes_once_per_step(strategy, name):
    expected, _ = whole(STATES[name])
    found, _ = trained(strategy, STATES[name], 2)
    assert_same_weights(found.get_weights(), expected.get_weights())
    for one, other in zip(found.variables, expected.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)


def test_micro_steps_draw_different_masks():
    class Noisy(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(1)

        def call(self, x):
            return x + keras.random.normal((1, 8), seed=self.seed)

    found, _ = trained(
        kdist.create_strategy("one_device"), lambda: functional(kdist.Model, Noisy()), 2
    )
    state = next(v for v in found.variables if v.name == "seed_generator_state")
    assert state.numpy()[1] == 2 * 6


@pytest.mark.slow
def test_replicas_that_share_a_trace_count_steps(mirrored):
    build = STATES["a layer that counts"]
    expected, _ = whole(build)
    found, _ = trained(mirrored, build, 2, share_trace=True)
    assert_same_weights(found.get_weights(), expected.get_weights())


@pytest.mark.slow
def test_central_storage_counts_steps():
    strategy = kdist.create_strategy("central_storage", 2)
    expected, _ = whole(STATES["a layer that counts"])
    found, _ = trained(strategy, STATES["a layer that counts"], 2)
    assert_same_weights(found.get_weights(), expected.get_weights())


def contrastive(y, embeddings):
    scores = ops.matmul(embeddings, ops.transpose(embeddings))
    labels = ops.arange(ops.shape(scores)[0])
    return keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True)


class Reversed(kdist.Model):
    def train_step(self, data):
        x, y = data
        return super().train_step((x + x[::-1], y))


class InBatch(kdist.Model):
    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = ops.mean(contrastive(None, self(x, training=True)))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("build", "setting"),
    covering(
        [
            lambda: (functional(kdist.Model), contrastive),
            lambda: (functional(Reversed), "mse"),
            lambda: (functional(InBatch), None),
        ],
        [(1, {"accumulate": 2}), (2, {"accumulate": 2}), (2, {"local_steps": 2})],
    ),
)
def test_losses_that_combine_rows_warn(build, setting):
    devices, options = setting
    strategy = kdist.create_strategy("mirrored", devices)
    with strategy.scope():
        model, loss = build()
        model.compile("sgd", loss, **options)
    with pytest.warns(UserWarning, match="combines rows") as caught:
        model.fit(*data(), batch_size=16, verbose=0)
    assert len({str(each.message) for each in caught}) == 1


@pytest.mark.fast_cases(1)
def test_losses_by_row_do_not_warn(strategy):
    with no_warnings():
        trained(strategy, lambda: functional(kdist.Model, layers.LayerNormalization()), 2)


class OwnStep(kdist.Model):
    """Step that updates the weights by a method of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self(x, training=True)))
        variables = self.trainable_variables
        self.update(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class OfTensors(OwnStep):
    """Step whose gradients of looked-up rows become tensors."""

    def update(self, gradients, variables):
        self.optimizer.apply([0.5 * tf.convert_to_tensor(g) for g in gradients], variables)


@pytest.mark.fast_cases(1)
def test_slices_that_become_tensors_do_not_warn(strategy):
    def build():
        inputs = keras.Input((6,))
        words = layers.Embedding(5, 4)(ops.cast(ops.abs(inputs), "int32"))
        return OfTensors(inputs, layers.Dense(1)(layers.Flatten()(words)))

    with no_warnings():
        model, logs = trained(strategy, build, 2)
    expected_model, expected = whole(build)
    assert_same_weights(model.get_weights(), expected_model.get_weights(), 1e-6)
    assert logs == [pytest.approx(each, rel=1e-5) for each in expected]


class InTurn(kdist.Model):
    """Updates two networks; the loss of the second is computed with the updated first one."""

    def __init__(self, in_turn):
        super().__init__()
        self.first, self.second = (
            keras.Sequential([keras.Input((6,)), layers.Dense(6)]) for _ in range(2)
        )
        self.other = keras.optimizers.SGD(0.1)
        self.in_turn = in_turn

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.first(x) - y))
        weights = self.first.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            outputs = self.second(x)
            outputs = self.first(outputs) if self.in_turn else outputs
            loss = ops.mean(ops.square(outputs))
        weights = self.second.trainable_variables
        self.other.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("in_turn", [True, False])
def test_networks_that_are_updated_in_turn_warn(strategy, in_turn):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(strategy, lambda: InTurn(in_turn), 2)
    found = {str(each.message) for each in caught}
    assert len(found) == in_turn
    assert all("after it has updated" in text for text in found)


class OwnUpdate(OwnStep):
    def update(self, gradients, variables):
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)


@pytest.mark.fast_cases(1)
def test_weights_that_a_step_updates_itself_warn(strategy):
    with pytest.warns(UserWarning, match="assigns the weight"):
        trained(strategy, lambda: functional(OwnUpdate), 2)
