"""Local SGD, compared with copies of the model that plain Keras trains in a loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.testing import assert_same_weights
from tests.tiers import covering, seldom

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.2),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "nadam, clipped": lambda: keras.optimizers.Nadam(0.01, global_clipnorm=0.3),
}
BATCH = 12


@pytest.fixture(autouse=True)
def _float64():
    """Returns data on which right averages agree to the last digits, and wrong ones do not."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def arrays(number):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(number, 4))
    return x, np.argmax(x[:, :3] + 0.3 * generator.normal(size=(number, 3)), axis=1)


def network(model_class, has_batch_norm=False):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8, activation="tanh")(inputs)
    if has_batch_norm:
        x = keras.layers.BatchNormalization(momentum=0.8)(x)
    return model_class(inputs, keras.layers.Dense(3, activation="softmax")(x))


def trained(
    replicas, number=120, epochs=1, optimizer="momentum", callbacks=(), batch_norm=False, **compiled
):
    """Returns a kdist model after `fit`, its strategy, and the history."""
    strategy = kdist.create_strategy("mirrored", replicas)
    with strategy.scope():
        model = network(kdist.Model, batch_norm)
        model.compile(
            OPTIMIZERS[optimizer](),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            **compiled,
        )
    # The number of batches is known, so that one call runs a group.
    dataset = tf.data.Dataset.from_tensor_slices(arrays(number)).batch(BATCH)
    history = model.fit(dataset, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model, strategy, history.history


def by_hand(replicas, k, slots, number=120, epochs=1, optimizer="momentum", batch_norm=False):
    """Returns weights and slots of copies that plain Keras trains one after the other."""
    copies = []
    for _ in range(replicas):
        model = network(keras.Model, batch_norm)
        model.compile(OPTIMIZERS[optimizer](), "sparse_categorical_crossentropy")
        model.optimizer.build(model.trainable_variables)
        copies.append(model)
    first = [slot.numpy() for slot in slots_of(copies[0])]
    x, y = arrays(number)
    for _ in range(epochs):
        steps = -(-number // BATCH)
        for step in range(steps):
            rows = np.arange(step * BATCH, min((step + 1) * BATCH, number))
            for copy, own in zip(
                copies, np.split(rows, split_at(len(rows), replicas)), strict=True
            ):
                copy.train_on_batch(x[own], y[own])
            if (step + 1) % k == 0 or step + 1 == steps:
                averaged(copies, slots, first)
    return copies[0].get_weights(), [[s.numpy() for s in slots_of(copy)] for copy in copies]


def split_at(rows, parts):
    return [rows * part // parts for part in range(1, parts)]


def slots_of(model):
    return model.optimizer.variables[2:]  # after the counter and the learning rate


def averaged(copies, slots, first):
    weights = [np.mean(parts, 0) for parts in zip(*(c.get_weights() for c in copies), strict=True)]
    for copy in copies:
        copy.set_weights(weights)
    for position, begins in enumerate(first):
        parts = [slots_of(copy)[position] for copy in copies]
        mean = np.mean([part.numpy() for part in parts], 0)
        for part in parts:
            if slots != "keep":
                part.assign(mean if slots == "average" else begins)


def copies_of(strategy, variables):
    """Returns each replica's list of arrays."""
    results = [strategy.experimental_local_results(variable.value) for variable in variables]
    return [[part.numpy() for part in parts] for parts in zip(*results, strict=True)]


def assert_weights_are_equal(strategy, model):
    first, *others = copies_of(strategy, model.variables)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("of", "slots"),
    covering([*((2, name) for name in OPTIMIZERS), (3, "momentum")], ["keep", "average", "reset"]),
)
def test_replicas_are_averaged_after_k_steps(of, slots):
    """The end of an epoch of ten batches ends the third round of 4."""
    replicas, optimizer = of
    options = {"epochs": 2, "optimizer": optimizer}
    model, strategy, _ = trained(replicas, local_steps=4, local_slots=slots, **options)
    weights, slots_by_hand = by_hand(replicas, 4, slots, **options)
    assert_same_weights(model.get_weights(), weights, 1e-12)
    assert_weights_are_equal(strategy, model)
    assert int(model.optimizer.iterations.numpy()) == 20
    ours = copies_of(strategy, slots_of(model))
    for own, expected in zip(ours or [[]] * replicas, slots_by_hand, strict=True):
        assert_same_weights(own, expected, 1e-12)


@pytest.mark.slow
def test_the_comparison_detects_wrong_averages():
    others = [(3, "keep"), (20, "keep"), (4, "average"), (4, "reset")]
    model, *_ = trained(2, local_steps=4, epochs=2)
    for k, slots in others:
        with pytest.raises(AssertionError, match="weights differ by"):
            assert_same_weights(model.get_weights(), by_hand(2, k, slots, epochs=2)[0], 1e-4)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_local_step_is_the_synchronous_step(accumulate):
    options = {"optimizer": "sgd", "epochs": 2, "accumulate": accumulate}
    local, _, history = trained(2, local_steps=1, **options)
    synchronous, _, expected = trained(2, **options)
    assert_same_weights(local.get_weights(), synchronous.get_weights(), 1e-13)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-9)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_one_local_step_of_a_sum_over_rows_is_the_synchronous_one(mirrored, reduction):
    def weights(local_steps):
        with mirrored.scope():
            model = network(kdist.Model)
            loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
            model.compile(keras.optimizers.SGD(0.01), loss, local_steps=local_steps)
        history = model.fit(*arrays(120), batch_size=BATCH, shuffle=False, verbose=0).history
        return [*model.get_weights(), *history["loss"]]

    assert_same_weights(weights(1), weights(None), 1e-9)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "compiled",
    [
        {"steps_per_execution": 7},
        {"run_eagerly": True},
        {"accumulate": 2, "steps_per_execution": 4},
        *seldom(
            [
                {"steps_per_execution": 4},
                {"steps_per_execution": "auto"},
                {"accumulate": 3},
                {"jit_compile": True, "steps_per_execution": 4},
            ]
        ),
    ],
    ids=str,
)
def test_groups_and_micro_steps_change_nothing(compiled):
    """113 examples leave five in the last batch: two for one replica, three for the other."""
    number = 113
    options = {"number": number, "epochs": 2, "local_steps": 3}
    model, strategy, history = trained(2, **compiled, **options)
    expected, _, expected_history = trained(2, **options)
    # Row fractions are float32 if the size of the batch is not static.
    tolerance = 1e-7 if "accumulate" in compiled else 1e-12
    assert_same_weights(model.get_weights(), expected.get_weights(), tolerance)
    assert_weights_are_equal(strategy, model)
    assert_same_weights(model.get_weights(), by_hand(2, 3, "keep", number, 2)[0], tolerance)
    for name, values in expected_history.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6)


@pytest.mark.slow
def test_data_of_unknown_length_end_a_round(mirrored):
    def weights(dataset):
        with mirrored.scope():
            model = network(kdist.Model)
            model.compile(
                "sgd", "sparse_categorical_crossentropy", local_steps=4, steps_per_execution=3
            )
        model.fit(dataset, epochs=2, verbose=0)
        assert_weights_are_equal(mirrored, model)
        return model.get_weights()

    dataset = tf.data.Dataset.from_tensor_slices(arrays(120)).batch(BATCH)
    unknown = dataset.filter(lambda x, y: True)
    assert_same_weights(weights(unknown), weights(dataset), 1e-13)


def test_statistics_of_a_batch_norm_are_averaged_with_the_weights():
    options = {"optimizer": "sgd", "epochs": 2, "batch_norm": True}
    model, strategy, _ = trained(2, local_steps=4, **options)
    weights, _ = by_hand(2, 4, "keep", **options)
    assert_same_weights(model.get_weights(), weights, 1e-12)
    assert_weights_are_equal(strategy, model)


@pytest.mark.slow
@pytest.mark.parametrize("number", [121, *seldom([122])])
def test_a_replica_without_rows_has_a_gradient_of_zero(number):
    """The last batch has one example, so that three of four replicas have none."""
    options = {"optimizer": "sgd", "batch_norm": True, "number": number}
    model, strategy, _ = trained(4, local_steps=20, **options)
    assert_weights_are_equal(strategy, model)
    seen = {}

    class Parts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen[batch] = copies_of(self.model.distribute_strategy, self.model.variables)

    model, _, _ = trained(4, local_steps=20, callbacks=[Parts()], **options)
    before, after = ([np.concatenate([w.ravel() for w in r]) for r in seen[b]] for b in (9, 10))
    rows = [number % BATCH * (p + 1) // 4 - number % BATCH * p // 4 for p in range(4)]
    for own_rows, was, now in zip(rows, before, after, strict=True):
        assert np.array_equal(was, now) == (own_rows == 0)
    averaged = np.mean(after, 0)
    np.testing.assert_allclose(
        np.concatenate([w.ravel() for w in model.get_weights()]), averaged, rtol=1e-12
    )


def test_reads_at_the_end_of_an_epoch_return_the_mean(mirrored):
    class Reads(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.differ, self.evaluated = [], []

        def note(self):
            first, other = copies_of(mirrored, self.model.trainable_variables)
            self.differ.append(not np.array_equal(first[0], other[0]))

        def on_train_batch_end(self, batch, logs=None):
            self.note()

        def on_test_begin(self, logs=None):
            self.note()

        def on_epoch_end(self, epoch, logs=None):
            self.note()

    reads = Reads()
    with mirrored.scope():
        model = network(kdist.Model)
        model.compile("sgd", "sparse_categorical_crossentropy", local_steps=3)
    x, y = arrays(60)
    history = model.fit(
        x, y, batch_size=BATCH, verbose=0, validation_data=(x, y), callbacks=[reads]
    )
    assert reads.differ == [True, True, False, True, True, False, False]
    plain = network(keras.Model)
    plain.compile("sgd", "sparse_categorical_crossentropy")
    plain.set_weights(model.get_weights())
    assert history.history["val_loss"][0] == pytest.approx(plain.evaluate(x, y, verbose=0))


def test_a_stop_in_mid_epoch_ends_the_round():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch >= 4

    model, strategy, _ = trained(2, local_steps=4, callbacks=[Stop()])
    assert int(model.optimizer.iterations.numpy()) == 5
    assert_weights_are_equal(strategy, model)


def test_custom_loops_average_replicas_before_they_read(mirrored):
    x, y = arrays(BATCH)
    with mirrored.scope():
        model = network(kdist.Model)
        model.compile("sgd", "sparse_categorical_crossentropy", local_steps=8)
    for read in (
        model.training_state.average_replicas,
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.predict(x, verbose=0),
        lambda: model.compile("sgd", "sparse_categorical_crossentropy", local_steps=8),
    ):
        model.train_on_batch(x, y)
        with pytest.raises(AssertionError):
            assert_weights_are_equal(mirrored, model)
        read()
        assert_weights_are_equal(mirrored, model)


def test_moving_averages_of_weights_are_averaged():
    OPTIMIZERS["ema"] = lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7)
    options = {"optimizer": "ema", "epochs": 2}
    try:
        model, strategy, _ = trained(2, local_steps=4, **options)
        assert_weights_are_equal(strategy, model)
        mean, other = copies_of(strategy, slots_of(model))
        assert_same_weights(mean, other, 0.0)
        assert_same_weights(model.get_weights(), mean, 0.0)  # the end of fit writes them
    finally:
        del OPTIMIZERS["ema"]


def test_replicas_agree_on_a_loss_scale(mirrored):
    """One replica's first gradient is not finite, and only that replica skips an update."""
    x, y = arrays(3 * BATCH)
    x[BATCH - 1] = np.inf
    with mirrored.scope():
        model = network(kdist.Model)
        model.compile(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
            "sparse_categorical_crossentropy",
            local_steps=3,
        )
    seen = []

    class Scales(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            inner = self.model.optimizer.inner_optimizer._iterations
            seen.append(copies_of(mirrored, [self.model.optimizer.dynamic_scale, inner]))

    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Scales()])
    initial = model.optimizer.initial_scale
    assert seen[0] == [[initial, 1], [initial / 2, 0]]
    assert seen[2] == [[initial / 2, 3], [initial / 2, 3]]
    assert_weights_are_equal(mirrored, model)
    assert all(np.all(np.isfinite(w)) for w in model.get_weights())


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "name",
    [
        *("AdamW", "Ftrl", "Muon", "Adafactor"),
        *seldom(["Adadelta", "Adamax", "Lion", "Lamb", "RMSprop"]),
    ],
)
def test_slots_of_all_optimizers_can_be_reset(mirrored, name):
    with mirrored.scope():
        model = network(kdist.Model)
        optimizer = getattr(keras.optimizers, name)(0.01)
        optimizer.build(model.trainable_variables)
        first = [slot.numpy() for slot in optimizer.variables[2:]]
        model.compile(
            optimizer, "sparse_categorical_crossentropy", local_steps=4, local_slots="reset"
        )
    model.fit(*arrays(60), batch_size=BATCH, verbose=0)
    for copy in copies_of(mirrored, optimizer.variables[2:]):
        assert_same_weights(copy, first, 1e-12)


def test_local_steps_have_no_effect_on_one_replica():
    with kdist.create_strategy("one_device").scope():
        model = network(kdist.Model)
        model.compile(OPTIMIZERS["momentum"](), "sparse_categorical_crossentropy", local_steps=4)
    model.fit(*arrays(120), batch_size=BATCH, shuffle=False, verbose=0)
    assert_same_weights(model.get_weights(), by_hand(1, 4, "keep")[0], 1e-12)


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        ({"local_steps": 0}, "local_steps .* positive integer, got 0"),
        ({"local_steps": 2.0}, "positive integer, got 2.0"),
        ({"local_slots": "reset"}, "without local_steps"),
        ({"local_steps": 2, "local_slots": "mean"}, "one of keep, average, reset, got 'mean'"),
    ],
)
def test_invalid_arguments(mirrored, compiled, message):
    with mirrored.scope(), pytest.raises(ValueError, match=message):
        network(kdist.Model).compile("sgd", "mse", **compiled)


def test_a_bound_on_staleness_without_servers_is_logged(mirrored, caplog):
    with mirrored.scope():
        network(kdist.Model).compile("sgd", "mse", max_staleness=0)
        assert not caplog.text
        network(kdist.Model).compile("sgd", "mse", max_staleness=2)
    assert "max_staleness=2 has no effect" in caplog.text


def test_replicas_that_share_variables_are_rejected():
    central = kdist.create_strategy("central_storage", 2)
    with central.scope(), pytest.raises(ValueError, match="--strategy=mirrored or multi_worker"):
        network(kdist.Model).compile("sgd", "mse", local_steps=2)


def test_synchronized_layers_are_rejected(mirrored):
    with mirrored.scope():
        normalised = keras.layers.BatchNormalization(synchronized=True, name="meets")
        inputs = keras.Input((4,))
        model = kdist.Model(inputs, keras.layers.Dense(3)(normalised(inputs)))
        model.compile("sgd", "mse", local_steps=2)
    with pytest.raises(ValueError, match="local_steps.*'meets' is synchronized.*--nosync_batch"):
        model.fit(*arrays(BATCH), verbose=0)
