"""Training state that replicas divide among themselves: `shard="optimizer"` and the others."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.callbacks import AveragedWeights
from kdist.testing import assert_same_weights, largest_difference
from kdist.training.sharding.memory import state_bytes
from kdist.training.sharding.optimizer_state import shards_of
from kdist.training.sharding.owners import assign_owners
from kdist.training.sharding.parts import EqualParts, sharded_state
from tests.tiers import seldom

layers, optimizers = keras.layers, keras.optimizers

WORDS, LENGTH, CLASSES = 50, 6, 5
# Weights of fewer bytes stay whole: biases of 5 to 10 elements.
MIN_BYTES = 64
LOSS = "sparse_categorical_crossentropy"
# Optimizers that divide by the gradient's own size make full steps of rounding without it.
EPSILON = 1e-3
# Muon's polynomials of a matrix amplify rounding.
OF_MUON = 1e-5


def examples(rows=64):
    generator = np.random.default_rng(3)
    return generator.integers(0, WORDS, (rows, LENGTH)), generator.integers(0, CLASSES, rows)


def network(model_class=kdist.Model):
    """Returns a model with an embedding, a constraint, and odd sizes that nothing divides."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 7, name="words")(inputs)
    x = layers.Flatten()(x)
    x = layers.Dense(9, activation="tanh", kernel_constraint="max_norm", name="middle")(x)
    return model_class(inputs, layers.Dense(CLASSES, activation="softmax", name="head")(x))


def scope(replicas, shard="optimizer"):
    """Returns the scope of sharded replicas; one without effect for 0."""
    if not replicas:
        return contextlib.nullcontext()
    sizes = {"min_shard_bytes": MIN_BYTES} if shard else {}
    return kdist.create_strategy(kdist.Layout(data=replicas, shard=shard, **sizes)).scope()


def trained(optimizer, replicas=0, shard="optimizer", epochs=2, callbacks=(), **options):
    """Returns a model that has trained on `replicas` devices, or by plain Keras if 0."""
    with scope(replicas, shard):
        model = network(kdist.Model if replicas else keras.Model)
        model.compile(optimizer(), LOSS, **options)
    fit(model, epochs=epochs, callbacks=list(callbacks))
    return model


def fit(model, **options):
    x, y = examples()
    return model.fit(x, y, batch_size=20, shuffle=False, verbose=0, **options)


def whole_slots(model, path):
    """Returns the optimizer's variables of a model, as a file has them."""
    model.save(path)
    opened = keras.saving.load_model(path)
    return [variable.numpy() for variable in opened.optimizer.variables]


OPTIMIZERS = {
    "Momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.01, epsilon=EPSILON, amsgrad=True),
    "AdamW": lambda: excluding(optimizers.AdamW(0.01, weight_decay=0.2, epsilon=EPSILON)),
    "RMSprop": lambda: optimizers.RMSprop(0.01, epsilon=EPSILON, centered=True, momentum=0.5),
    "Adagrad": lambda: optimizers.Adagrad(0.1, epsilon=EPSILON),
    "Lion": lambda: optimizers.Lion(0.001),
    "Nadam": lambda: optimizers.Nadam(0.01, epsilon=EPSILON),
    "Adamax": lambda: optimizers.Adamax(0.01, epsilon=EPSILON),
    "Ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=1e-3),
    "Adadelta": lambda: optimizers.Adadelta(0.5, epsilon=EPSILON),
    "clipnorm": lambda: optimizers.Adam(0.01, epsilon=EPSILON, clipnorm=0.02),
    "global_clipnorm": lambda: optimizers.Adam(0.01, epsilon=EPSILON, global_clipnorm=0.05),
    "accumulating, clipped": lambda: optimizers.SGD(
        0.1, gradient_accumulation_steps=2, global_clipnorm=0.05
    ),
    "moving average": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8),
    "loss scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01, epsilon=EPSILON, global_clipnorm=0.05), dynamic_growth_steps=2
    ),
    # Each large weight is updated whole, on one device.
    "Muon": lambda: optimizers.LossScaleOptimizer(
        optimizers.Muon(0.02, global_clipnorm=0.05), dynamic_growth_steps=2
    ),
    "Muon, clipped": lambda: excluding(optimizers.Muon(0.02, weight_decay=0.2, clipnorm=0.02)),
    "Adafactor": lambda: optimizers.Adafactor(0.05),
    "Lamb": lambda: optimizers.Lamb(0.02, epsilon=EPSILON),
    "centralized": lambda: Centralized(0.1, momentum=0.9),
}
OFTEN = ["AdamW", "accumulating, clipped", "loss scale"]


@keras.saving.register_keras_serializable()
class Centralized(optimizers.SGD):
    """An optimizer that subtracts the mean of each gradient."""

    def update_step(self, gradient, variable, learning_rate):
        gradient = tf.convert_to_tensor(gradient)
        super().update_step(gradient - tf.reduce_mean(gradient), variable, learning_rate)


class Inimitable(optimizers.SGD):
    """An optimizer whose configuration lacks an argument."""

    def __init__(self, factor):
        super().__init__(factor * 0.1)
        self.factor = factor

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)


class WithMeanNorm(optimizers.SGD):
    """An optimizer whose steps depend on the norms of all gradients."""

    def build(self, variables):
        super().build(variables)
        self.mean_norm = self.add_variable((), name="mean_norm")

    def update_step(self, gradient, variable, learning_rate):
        self.mean_norm.assign(0.9 * self.mean_norm + 0.1 * tf.norm(gradient))
        super().update_step(gradient / self.mean_norm, variable, learning_rate)


def excluding(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


CASES = [
    *((name, 2, "optimizer") for name in OFTEN),
    ("AdamW", 2, "weights"),
    ("loss scale", 4, "weights"),
    ("Muon", 2, "optimizer"),
    ("Muon, clipped", 4, "weights"),
    ("Adafactor", 4, "optimizer"),
    ("centralized", 2, "weights"),
]
ALL = [
    (name, n, shard) for name in OPTIMIZERS for n in (2, 4) for shard in ("optimizer", "weights")
]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("name", "replicas", "shard"), [*CASES, *seldom(ALL, other_than=CASES)])
def test_the_weights_are_those_of_one_device(name, replicas, shard, tmp_path):
    # Keras's optimizers cannot accumulate the rows of looked-up words.
    train = without_embedding if name == "accumulating, clipped" else trained
    expected, model = (train(OPTIMIZERS[name], each, shard) for each in (0, replicas))
    tolerance = OF_MUON if "Muon" in name else 1e-6
    assert_same_weights(model.get_weights(), expected.get_weights(), tolerance)
    assert_same_weights(
        whole_slots(model, tmp_path / "model.keras"),
        [variable.numpy() for variable in expected.optimizer.variables],
        tolerance,
    )
    assert int(model.optimizer.iterations) == int(expected.optimizer.iterations) > 0


def without_embedding(optimizer, replicas, shard):
    with scope(replicas, shard):
        keras.utils.set_random_seed(5)
        inputs = keras.Input((LENGTH,))
        outputs = layers.Dense(CLASSES, activation="softmax")(layers.Dense(9)(inputs))
        model = (kdist.Model if replicas else keras.Model)(inputs, outputs)
        model.compile(optimizer(), LOSS)
    fit(model, epochs=3)
    return model


@pytest.mark.slow
def test_a_weight_that_is_excluded_from_weight_decay():
    """It is given as a variable, of which the optimizer updates the shard."""
    results = []
    for replicas in (0, 2):
        with scope(replicas):
            model = network(kdist.Model if replicas else keras.Model)
            adam = optimizers.AdamW(0.01, weight_decay=0.5, epsilon=EPSILON)
            adam.exclude_from_weight_decay(var_list=[model.get_layer("words").embeddings])
            model.compile(adam, LOSS)
        fit(model)
        results.append(model.get_weights())
    assert_same_weights(*results, 1e-6)


def float8(replicas, shard, clipping):
    keras.utils.set_random_seed(3)
    with scope(replicas, shard):
        inputs = keras.Input((8,))
        outputs = layers.Dense(5, dtype="float8_from_float32")(inputs)
        model = kdist.Model(inputs, outputs)
        model.compile(optimizers.SGD(0.5, **clipping), "mse")
    x = np.random.default_rng(0).normal(size=(20, 8)).astype("float32")
    model.fit(x, x[:, :5], batch_size=10, shuffle=False, verbose=0)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("clipping", [{"clipnorm": 0.01}, {"global_clipnorm": 0.01}], ids=str)
def test_scales_of_float8_are_no_part_of_a_norm(clipping):
    """Keras assigns their gradients before it clips those of the other weights."""
    weights = float8(2, "optimizer", clipping).get_weights()
    assert_same_weights(weights, float8(2, None, clipping).get_weights(), 1e-6)


@pytest.mark.slow
def test_a_step_that_overflows_changes_nothing():
    """A replica whose part is finite must not update it if that of another one is not."""

    def loss(labels, outputs):
        factor = tf.where(tf.reduce_any(labels > 1e5), np.inf, 1.0)
        return keras.losses.sparse_categorical_crossentropy(labels % CLASSES, outputs) * factor

    with scope(2):
        model = network()
        scaled = optimizers.LossScaleOptimizer(OPTIMIZERS["Adam"](), initial_scale=8.0)
        model.compile(scaled, loss)
    x, y = examples()
    model.fit(x, y, batch_size=64, verbose=0)
    before = model.get_weights()
    y[:8] += 200_000 * CLASSES  # rows of the first replica
    model.fit(x, y, batch_size=64, verbose=0)
    assert_same_weights(model.get_weights(), before, 0)
    assert float(model.optimizer.dynamic_scale) == 4.0
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize(
    ("optimizer", "replicas", "shard", "slots"),
    [
        ("adam", 2, "optimizer", 2),
        ("adam", 4, "optimizer", 2),
        ("muon", 2, "optimizer", 1),
        ("muon", 2, "weights", 1),
    ],
)
def test_bytes_on_each_device(optimizer, replicas, shard, slots):
    """Of slots and of what is updated, each device holds 1/N of the large weights."""
    size = 256
    with scope(replicas, shard):
        inputs = keras.Input((size,))
        x = layers.Dense(size, use_bias=False)(layers.Dense(size, use_bias=False)(inputs))
        model = kdist.Model(inputs, layers.Dense(2, use_bias=False)(x))
        model.compile(optimizer, "mse")
    model.fit(np.ones((8, size)), np.ones((8, 2)), verbose=0)
    found = state_bytes(model)
    assert len(found) == replicas
    weights = 4 * (2 * size * size + 2 * size)
    for held in found.values():
        parts = replicas if shard == "weights" else 1
        assert held.weights == pytest.approx(weights / parts, abs=64)  # and seeds
        assert held.optimizer == pytest.approx((1 + slots) * weights / replicas, rel=0.02)


@pytest.mark.slow
def test_weights_that_a_program_sets_are_trained():
    """The shards follow the weights, whoever has written them."""
    start = [weight + 0.01 for weight in network(keras.Model).get_weights()]
    results = []
    for replicas in (0, 2):
        model = trained(OPTIMIZERS["Momentum"], replicas, epochs=1)
        model.set_weights(start)
        fit(model)
        results.append(model.get_weights())
    assert_same_weights(*results, 1e-6)


@pytest.mark.slow
def test_freezing_and_compiling_again():
    results = []
    for replicas in (0, 2):
        model = trained(OPTIMIZERS["Momentum"], replicas, epochs=1)
        model.get_layer("words").trainable = False
        before = model.get_layer("words").get_weights()
        model.compile(model.optimizer, LOSS)
        fit(model)
        assert_same_weights(model.get_layer("words").get_weights(), before, 0)
        with model.distribute_strategy.scope():
            model.compile(OPTIMIZERS["Adam"](), LOSS)
        fit(model)
        results.append(model.get_weights())
    assert_same_weights(*results, 1e-6)


@pytest.mark.exhaustive
def test_an_optimizer_that_was_built_before_keeps_its_slots():
    results = []
    for replicas in (0, 2):
        with scope(replicas):
            model = network(kdist.Model if replicas else keras.Model)
            adam = OPTIMIZERS["Adam"]()
            adam.build(model.trainable_variables)
            adam.set_weights([np.full(v.shape, 0.1, v.dtype) for v in adam.variables])
            model.compile(adam, LOSS)
        fit(model)
        results.append(model.get_weights())
    assert_same_weights(*results, 1e-6)


@pytest.mark.slow
def test_files_are_those_of_one_device(tmp_path):
    """Sharded training continues in plain Keras, and the reverse."""
    expected = trained(OPTIMIZERS["Adam"], epochs=4)
    trained(OPTIMIZERS["Adam"], 2).save(tmp_path / "sharded.keras")
    opened = keras.saving.load_model(tmp_path / "sharded.keras")
    assert type(opened.optimizer.variables[2].numpy()) is np.ndarray
    fit(opened, epochs=2)
    assert_same_weights(opened.get_weights(), expected.get_weights(), 1e-6)

    trained(OPTIMIZERS["Adam"]).save(tmp_path / "whole.keras")
    with scope(4):
        continued = kdist.Model.of(keras.saving.load_model(tmp_path / "whole.keras"))
    fit(continued, epochs=2)
    assert_same_weights(continued.get_weights(), expected.get_weights(), 1e-6)
    assert len({held.optimizer for held in state_bytes(continued).values()}) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "callback", [AveragedWeights, lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
)
def test_averages_are_swapped_in(callback):
    """At the end of an epoch weights and whole averages are exchanged, and then back."""
    results = []
    for replicas in (0, 2):
        model = trained(OPTIMIZERS["moving average"], replicas, callbacks=[callback()])
        results.append(model.get_weights())
    assert_same_weights(*results, 1e-6)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: optimizers.ScheduleFreeAdamW(), "ScheduleFreeAdamW"),
        (lambda: optimizers.LossScaleOptimizer(optimizers.ScheduleFreeAdamW()), "ScheduleFree"),
        (lambda: optimizers.Muon(use_ema=True), "use_ema"),
        (lambda: optimizers.Lamb(gradient_accumulation_steps=2), "give accumulate to compile"),
        (lambda: WithMeanNorm(0.1), "belongs to no single weight"),
    ],
)
def test_optimizers_that_need_the_state_of_all_weights_are_refused(optimizer, message):
    with pytest.raises(ValueError, match=message):
        trained(optimizer, 2)


def with_two_optimizers(model_class):
    """Returns a class of models that train the embedding and the rest by an optimizer each."""

    class Twice(model_class):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            words, rest = self.trainable_variables[:1], self.trainable_variables[1:]
            of_words, of_rest = tape.gradient(loss, (words, rest))
            self.optimizer.apply(of_rest, rest)
            self.second.apply(of_words, words)
            return {"loss": loss}

    return Twice


@pytest.mark.slow
def test_two_optimizers_of_which_one_needs_whole_weights():
    results = []
    for replicas in (0, 2):
        with scope(replicas):
            model = network(with_two_optimizers(kdist.Model if replicas else keras.Model))
            model.second = optimizers.Adam(0.01, epsilon=EPSILON, clipnorm=0.02)
            model.compile(optimizers.Muon(0.02, clipnorm=0.02), LOSS)
        fit(model, epochs=2)
        results.append(model.get_weights())
    assert_same_weights(*results, OF_MUON)


def test_owners_hold_about_as_much():
    sizes = [100, 7, 30, 30, 40, 1, 100]
    owners = assign_owners(sizes, 3)
    totals = [sum(itertools.compress(sizes, map(each.__eq__, owners))) for each in range(3)]
    assert totals == [107, 101, 100]


def test_a_device_without_a_weight_is_reported():
    with scope(4):
        inputs = keras.Input((8,))
        model = kdist.Model(inputs, layers.Dense(8, use_bias=False)(inputs))
        model.compile("muon", "mse")
    with pytest.raises(ValueError, match="fewer weights"):
        model.fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0)


class Decaying(optimizers.SGD):
    """An optimizer that decays matrices, and trains the head slowly, as programs write it."""

    def update_step(self, gradient, variable, learning_rate):
        if len(variable.shape) > 1:
            gradient = tf.convert_to_tensor(gradient) + 0.1 * variable
        factor = 0.1 if "head/" in variable.name else 1.0
        super().update_step(gradient, variable, factor * learning_rate)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shard", [None, "optimizer", "weights"])
def test_an_update_of_ones_own_receives_names_and_numbers_of_axes(shard):
    expected, model = (trained(lambda: Decaying(0.1), n, shard) for n in (0, 2))
    assert_same_weights(model.get_weights(), expected.get_weights(), 1e-6)


def test_an_update_of_ones_own_in_every_second_step():
    def optimizer():
        return Decaying(0.1, gradient_accumulation_steps=2, global_clipnorm=0.05)

    expected, model = (without_embedding(optimizer, n, "optimizer") for n in (0, 2))
    assert_same_weights(model.get_weights(), expected.get_weights(), 1e-6)


def test_an_update_that_cannot_be_tried_receives_whole_weights():
    expected, model = (trained(lambda: Inimitable(1.0), n) for n in (0, 2))
    assert shards_of(model.optimizer).have_owners
    assert_same_weights(model.get_weights(), expected.get_weights(), 1e-6)


def test_local_steps_are_refused():
    with scope(2), pytest.raises(ValueError, match="leave one of them out"):
        network().compile("sgd", LOSS, local_steps=2)


@pytest.mark.slow
def test_files_that_would_hold_one_part_of_a_slot_are_refused(tmp_path):
    model = trained(OPTIMIZERS["Adam"], 2, epochs=1)
    with pytest.raises(ValueError, match="include_optimizer=False"):
        model.save(tmp_path / "model.h5")
    model.save(tmp_path / "model.h5", include_optimizer=False)
    with pytest.raises(ValueError, match=r"kdist.callbacks.Checkpoint"):
        tf.train.Checkpoint(optimizer=model.optimizer).save(tmp_path / "checkpoint")


def test_looked_up_rows_need_parts_of_whole_rows():
    with scope(4):
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Flatten()(layers.Embedding(7, 40)(inputs))
        model = kdist.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))
        model.compile("sgd", LOSS)
    x, y = examples()
    with pytest.raises(ValueError, match="min_shard_bytes=1121"):
        model.fit(x % 7, y, verbose=0)


@pytest.mark.parametrize("shape", [(8, 3), (9, 3), (50, 7), (3, 3, 4), (5,)])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_parts_are_equal_and_merge(shape, count):
    division = EqualParts(shape, count)
    value = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    parts = [division.part(value, number) for number in range(count)]
    assert {tuple(part.shape) for part in parts} == {division.part_shape}
    np.testing.assert_array_equal(division.merge(parts), value)
    np.testing.assert_array_equal(division.stacked(value), parts)


def test_one_device_has_nothing_to_shard():
    strategy = kdist.create_strategy("mirrored", 1, shard="optimizer")
    assert sharded_state(strategy) is None


def test_a_shard_that_is_not_refreshed_would_be_found():
    """The comparisons above can fail: one step less differs by far more than their tolerance."""
    results = [trained(OPTIMIZERS["Adam"], epochs=epochs).get_weights() for epochs in (1, 2)]
    assert largest_difference(*results) > 1e-3
