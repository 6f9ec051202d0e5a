"""Weights that replicas divide among themselves: `shard="weights"`."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.compat.tensorflow import collect_function_graphs
from kdist.testing import assert_same_weights, python
from kdist.training.sharding.memory import state_bytes
from kdist.training.sharding.weights import ShardedVariable
from tests.tiers import seldom
from tests.training.test_sharding import CLASSES, LENGTH, LOSS, OPTIMIZERS, fit, scope

layers, optimizers = keras.layers, keras.optimizers

BLOCKS, WIDTH = 6, 64


def on(replicas):
    return scope(replicas, "weights")


def model_class(replicas):
    return kdist.Model if replicas else keras.Model


def deep(replicas, optimizer="sgd", **options):
    """Returns a model of equal layers without small weights."""
    keras.utils.set_random_seed(5)
    with on(replicas):
        inputs = x = keras.Input((WIDTH,))
        for number in range(BLOCKS):
            x = layers.Dense(WIDTH, "relu", use_bias=False, name=f"layer{number}")(x)
        model = model_class(replicas)(inputs, x)
        model.compile(optimizer, "mse", **options)
    return model


def vectors(rows=16):
    generator = np.random.default_rng(1)
    return generator.normal(size=(2, rows, WIDTH)).astype("float32")


def test_scales_of_float8_are_refused_where_they_are_created():
    """The first step failed, and its message did not name float8."""
    layout = kdist.Layout(data=2, shard="weights", min_shard_bytes=64)
    with kdist.create_strategy(layout).scope(), pytest.raises(ValueError, match="float8.*=4097"):
        layers.Dense(4, dtype="float8_from_float32").build((None, 8))


@pytest.mark.parametrize("replicas", [2, 4])
def test_bytes_on_each_device(replicas):
    model = deep(replicas, "adam")
    model.fit(*vectors(), verbose=0)
    whole = 4 * WIDTH * WIDTH
    found = state_bytes(model)
    assert len(found) == replicas
    for held in found.values():
        assert held.weights == pytest.approx(BLOCKS * whole / replicas, abs=64)
        assert held.optimizer == pytest.approx(2 * BLOCKS * whole / replicas, abs=64)
        assert held.gathered == 2 * whole
        sharded = 3 * BLOCKS * whole / replicas
        assert sum(held) <= 1.15 * (sharded + 2 * whole)


def test_a_device_holds_two_gathered_weights():
    """Read from the executed graphs: a gather waits for what used the weight before the last."""
    model = deep(2)
    with collect_function_graphs() as functions:
        model.fit(*vectors(), verbose=0)
    step = max(functions, key=lambda function: len(function.post_optimization_graph.node))
    nodes = {node.name: node for node in step.post_optimization_graph.node}
    weights = [name for name in nodes if name.endswith("/concat") and "gather" in name]
    assert len(weights) == 2 * (BLOCKS + BLOCKS - 1)  # the first layer needs no gradient of inputs
    for replica in ("", "replica_1/"):
        layer = replica + r"functional_\d+/layer{}(_\d+)?/"
        forward = [layer.format(number) + "(MatMul|Relu)" for number in range(BLOCKS)]
        backward = [
            "gradient_tape/" + layer.format(number) + "MatMul/MatMul"
            for number in reversed(range(1, BLOCKS))
        ]
        uses = [user_of(nodes.values(), name) for name in (*forward, *backward)]
        for before, after in zip(uses, uses[2:], strict=False):
            weight = next(name for name in after.input if "gather" in name)
            assert depends(nodes, weight, before.name), (weight, before.name)
        for before, after in itertools.pairwise(uses[:BLOCKS]):
            weight = next(name for name in after.input if "gather" in name)
            assert not depends(nodes, weight, before.name), "gathered while the previous is in use"


def user_of(nodes, name):
    """Returns the node with a name, a regular expression, that uses a gathered weight."""
    named = [node for node in nodes if re.fullmatch(name, node.name)]
    (found,) = (node for node in named if any("gather" in each for each in node.input))
    return found


def depends(nodes, name, on_name):
    """Returns True if a node starts only after another one."""
    seen, pending = set(), [name]
    while pending:
        node = pending.pop().lstrip("^").partition(":")[0]
        if node == on_name:
            return True
        if node not in seen and node in nodes:
            seen.add(node)
            pending += nodes[node].input
    return False


@pytest.mark.slow
def test_evaluate_predict_and_weights():
    x, y = vectors()
    plain, model = deep(0), deep(2)
    assert isinstance(model.layers[1].kernel, ShardedVariable)
    assert model.count_params() == plain.count_params()
    assert_same_weights(model.get_weights(), plain.get_weights(), 0)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), 1e-5, 1e-6)
    np.testing.assert_allclose(model(x), plain(x), 1e-5, 1e-6)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(plain.evaluate(x, y, verbose=0), 1e-5)
    start = [weight + 0.01 for weight in plain.get_weights()]
    results = []
    for each in (plain, model):
        each.set_weights(start)
        each.fit(x, y, verbose=0)
        results.append(each.get_weights())
    assert_same_weights(*results, 1e-6)


def shared(replicas):
    """Returns a model with weights used twice, in loops, regularized, constrained, and frozen."""
    keras.utils.set_random_seed(5)
    with on(replicas):
        words = layers.Embedding(50, 8, name="words", embeddings_regularizer="l2")
        inputs = keras.Input((LENGTH,), dtype="int32")
        frozen = layers.Dense(8, name="frozen", trainable=False)
        x = layers.LSTM(8, kernel_constraint="max_norm")(frozen(words(inputs)))
        twice = layers.Dense(8, kernel_regularizer="l2", name="twice")
        x = twice(keras.ops.tanh(twice(x)))
        logits = keras.ops.matmul(x, keras.ops.transpose(words.embeddings))
        outputs = layers.Dense(CLASSES, activation="softmax")(layers.Concatenate()([x, logits]))
        model = model_class(replicas)(inputs, outputs)
        model.compile(OPTIMIZERS["Momentum"](), LOSS, steps_per_execution=2 if replicas else 1)
    return model


@pytest.mark.slow
def test_shared_frozen_and_recurrent_weights():
    plain, model = shared(0), shared(2)
    for each in (plain, model):
        fit(each, epochs=2)
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-6)
    assert isinstance(model.get_layer("frozen").kernel, ShardedVariable)


def test_convolutions_whose_gradients_are_fused():
    """oneDNN merges the gradients of the kernel and of the bias, which replicas divide as well."""
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(16, 8, 8, 4)), generator.normal(size=(16, 4, 4, 16))
    results = []
    for replicas in (0, 2):
        keras.utils.set_random_seed(5)
        with on(replicas):
            inputs = keras.Input((8, 8, 4))
            hidden = layers.Conv2D(16, 3, activation="relu")(inputs)
            model = model_class(replicas)(inputs, layers.Conv2D(16, 3)(hidden))
            model.compile("sgd", "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        results.append(model.get_weights())
    assert_same_weights(*results, 1e-6)
    assert all(isinstance(weight, ShardedVariable) for weight in model.weights)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"accumulate": 2}, *seldom([{"run_eagerly": True}])])
def test_micro_steps_and_eager_steps(options):
    plain, model = deep(0, "adam"), deep(2, "adam", **options)
    for each in (plain, model):
        each.fit(*vectors(), epochs=2, verbose=0)
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-6)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shard", ["gradients", "weights"])
def test_sums_of_gradients_are_divided(shard):
    x, y = vectors()
    results = []
    for replicas in (0, 2):
        keras.utils.set_random_seed(5)
        with scope(replicas, shard):
            inputs = keras.Input((WIDTH,))
            model = model_class(replicas)(inputs, layers.Dense(WIDTH)(layers.Dense(4)(inputs)))
            model.compile("adam", "mse", **({"accumulate": 2} if replicas else {}))
        model.fit(x, y, verbose=0)
        results.append(model.get_weights())
    assert_same_weights(*results, 1e-6)
    sums = model.train_function._replicated._accumulators._sums[id(model.optimizer)]
    assert sorted(total.shape.num_elements() for total in sums.values()) == [4, 32, 128, 128]


class TwoUpdates(kdist.Model):
    """Its second loss reads the weights that the first one has changed."""

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_weights_that_a_step_reads_after_an_update():
    x, y = vectors()
    results = []
    for replicas in (0, 2):
        keras.utils.set_random_seed(5)
        with on(replicas):
            inputs = keras.Input((WIDTH,))
            model = (TwoUpdates if replicas else keras.Model)(inputs, layers.Dense(WIDTH)(inputs))
            model.compile("sgd", "mse")
        model.fit(x, y, batch_size=16, epochs=1 if replicas else 2, verbose=0)
        results.append(model.get_weights())
    assert_same_weights(*results, 1e-6)


@pytest.mark.slow
def test_files_and_models_for_serving(tmp_path):
    x, y = vectors()
    model = deep(2, "adam")
    model.fit(x, y, verbose=0)
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    np.testing.assert_allclose(
        keras.saving.load_model(tmp_path / "model.keras")(x), expected, 1e-5, 1e-6
    )
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(x), expected, 1e-5, 1e-6)
    path = kdist.serving.export(model, tmp_path / "served", examples={})
    (served,) = tf.saved_model.load(path).signatures["serving_default"](tf.constant(x)).values()
    np.testing.assert_allclose(served, expected, 1e-5, 1e-6)
    assert isinstance(model.layers[1].kernel, ShardedVariable)
    model.load_weights(tmp_path / "model.keras")
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, 1e-5, 1e-6)
    with pytest.raises(ValueError, match=r"kdist.callbacks.Checkpoint"):
        tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")


class OfValues(keras.Model):
    """Names its weights by their values, which are variables where weights are whole."""

    watches = False

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape(watch_accessed_variables=not self.watches) as tape:
            if self.watches:
                tape.watch([weight.value for weight in weights])
            loss = self.compute_loss(x, y, self(x, training=True))
        sources = weights if self.watches else [weight.value for weight in weights]
        self.optimizer.apply(tape.gradient(loss, sources), weights)
        return {"loss": loss}


class OfVariables:
    """Updates weights with numbers whose only path to the gradients is not one of tensors."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.sums:
            for total, gradient in zip(self.sums, gradients, strict=True):
                total.assign(0.9 * total + gradient)
            gradients = [total + 0.0 for total in self.sums]
        else:
            with tf.control_dependencies(gradients):
                gradients = [tf.ones(gradient.shape) for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("has_sums", [True, False])
def test_updates_that_wait_for_gradients(has_sums):
    """TensorFlow would report a cycle if weights were gathered again in the wrong order."""
    results = []
    for replicas in (0, 2):
        keras.utils.set_random_seed(5)
        bases = (OfVariables, model_class(replicas))
        with on(replicas):
            x = inputs = keras.Input((WIDTH,))
            for _ in range(BLOCKS):
                x = layers.Dense(WIDTH, "tanh")(x)
            model = type("Own", bases, {})(inputs, x)
            shapes = [weight.shape for weight in model.trainable_variables] if has_sums else []
            model.sums = [model.add_weight(s, "zeros", trainable=False) for s in shapes]
            model.compile("sgd", "mse")
        model.fit(*vectors(), batch_size=8, shuffle=False, verbose=0)
        results.append(model.get_weights())
    assert_same_weights(*results, 1e-6)


@pytest.mark.parametrize("watches", [False, True])
def test_gradients_of_the_values_of_weights(watches):
    x, y = vectors()
    results = []
    for replicas in (0, 2):
        keras.utils.set_random_seed(5)
        bases = (OfValues, model_class(replicas)) if replicas else (OfValues,)
        with on(replicas):
            inputs = keras.Input((WIDTH,))
            hidden = layers.Dense(WIDTH, "relu")(inputs)
            model = type("Own", bases, {"watches": watches})(inputs, layers.Dense(WIDTH)(hidden))
            model.compile("sgd", "mse")
        model.fit(x, y, batch_size=16, verbose=0)
        results.append(model.get_weights())
    assert_same_weights(*results, 1e-6)


def test_what_needs_whole_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Leave jit_compile"):
        deep(2, jit_compile=True)
    model = deep(2)
    x, _ = vectors()
    with model.distribute_strategy.scope(), tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x))
    with pytest.raises(ValueError, match=r"kdist\.Model\.of.*kdist\.step"):
        tape.gradient(loss, model.trainable_variables)
    with pytest.raises(ValueError, match=r"model\.export"):
        tf.saved_model.save(model, tmp_path)


def with_teacher(of_rows):
    """Returns a train_step that assigns a teacher's weights, and shrinks those of the student."""

    def train_step(self, data):
        first, second = self.layers[1:3]
        scale = tf.reduce_mean(data[0]) if of_rows else 0.5
        first.kernel.assign(first.kernel * scale)
        logs = super(type(self), self).train_step(data)
        weights = [*first.weights, *second.weights]
        for average, weight in zip(self.teacher.weights, weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return logs | {"distance": tf.reduce_sum(tf.square(self.teacher.layers[1].kernel))}

    return train_step


def student(replicas, of_rows=False):
    """Returns a student after two steps, its teacher, and the logs."""
    keras.utils.set_random_seed(5)
    base = model_class(replicas)
    kind = type("Student", (base,), {"train_step": with_teacher(of_rows)})
    with on(replicas):
        inputs = keras.Input((WIDTH,))
        outputs = layers.Dense(WIDTH, use_bias=False)(layers.Dense(WIDTH, "tanh")(inputs))
        model = kind(inputs, outputs)
        model.teacher = keras.models.clone_model(base(inputs, outputs))
        model.teacher.trainable = False
        model.compile(optimizers.SGD(0.5, momentum=0.9), "mse")
    history = model.fit(*vectors(), batch_size=8, shuffle=False, verbose=0)
    return [*model.get_weights(), *model.teacher.get_weights()], history.history


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_weights_that_a_step_assigns(replicas):
    expected, logs = student(0)
    found, of_replicas = student(replicas)
    assert_same_weights(found, expected, 1e-5)
    assert of_replicas["distance"] == pytest.approx(logs["distance"], rel=1e-5)


class WithOwnGradient(layers.Dense):
    def call(self, inputs):
        @tf.custom_gradient
        def double(x):
            return 2 * keras.ops.matmul(x, self.kernel), lambda gradient: gradient

        return double(inputs)


def test_steps_that_would_be_wrong_are_refused():
    with pytest.raises(ValueError, match="is assigned"):
        student(2, of_rows=True)
    with on(2):
        inputs = keras.Input((WIDTH,))
        model = kdist.Model(inputs, WithOwnGradient(WIDTH)(inputs))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="own gradient"):
        model.fit(*vectors(), verbose=0)


# Layers exist before a model does, as in programs that import nothing else of kdist. The process
# holds the copies of all logical devices.
LARGE = """
import json, resource
import keras, kdist, numpy as np

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

width, depth, replicas = 1024, 12, 4
with kdist.create_strategy("mirrored", replicas, shard="weights").scope():
    keras.layers.Dense(8).build((8, 8))
    before = peak()
    inputs = x = keras.Input((width,))
    for _ in range(depth):
        x = keras.layers.Dense(width, use_bias=False)(x)
    model = kdist.Model(inputs, x)
    model.compile("adam", "mse")
x = np.zeros((replicas, width), "float32")
model.fit(x, x, epochs=3, batch_size=replicas, verbose=0)
undivided = 3 * 4 * width * width * depth * replicas
print(json.dumps((peak() - before) / undivided))
"""


@pytest.mark.slow
def test_a_process_needs_less_memory_than_undivided_state():
    """Undivided weights and slots alone, without gradients, take more than this at the peak."""
    assert python(LARGE) < 0.75


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("shard", "gathers"), [("optimizer", 1), ("weights", 2)])
def test_bytes_between_devices_are_those_of_the_formula(shard, gathers, tmp_path):
    """ZeRO paper, section 7; the first layer's weight is not gathered again for gradients."""
    replicas = 4
    with scope(replicas, shard):
        inputs = x = keras.Input((WIDTH,))
        for _ in range(3):
            x = layers.Dense(WIDTH, "relu")(x)
        model = kdist.Model(inputs, x)
        model.compile("adam", "mse")
    telemetry = kdist.callbacks.Telemetry(tmp_path, device_seconds=None)
    model.fit(*vectors(), verbose=0, callbacks=[telemetry])
    crossing = telemetry.summary()["crossing_bytes_per_step"]
    formula = (replicas - 1) * 4 * model.count_params()
    first = (replicas - 1) * 4 * WIDTH * WIDTH if shard == "weights" else 0
    assert crossing["scattered"] == pytest.approx(formula, rel=0.05)
    assert crossing["gathered"] == pytest.approx(gathers * formula - first, rel=0.05)
