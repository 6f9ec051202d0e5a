import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.platform import tf_logging

import kdist
from kdist.cluster import heartbeat
from kdist.compat.keras import MULTI_OPTIMIZERS
from kdist.testing import assert_same_weights
from kdist.training.groups.step_groups import GroupTuner
from tests.caught import no_warnings
from tests.forked import python
from tests.tiers import covering, seldom


def linear(model_class=kdist.Model, **compile_arguments):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    model = model_class(inputs, keras.layers.Dense(3, activation="softmax")(inputs))
    model.compile(
        keras.optimizers.SGD(0.1),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **compile_arguments,
    )
    return model


def arrays(number=100):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(number, 4)).astype("float32")
    return x, np.argmax(x[:, :3] + 0.3 * generator.normal(size=(number, 3)), axis=1)


def endless(batch=4):
    x, y = arrays()
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch, drop_remainder=True)


class Steps(keras.callbacks.Callback):
    """Records the batch numbers that callbacks receive."""

    def __init__(self):
        super().__init__()
        self.begins, self.ends = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begins.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(batch)


@pytest.mark.parametrize(
    ("k", "data"), covering([1, 7, 40], ["endless", "finite", "arrays", "unknown length"])
)
def test_an_epoch_has_its_steps_with_any_group_length(mirrored, k, data):
    with mirrored.scope():
        model = linear(steps_per_execution=k)
    steps = Steps()
    fit = {"epochs": 2, "verbose": 0, "callbacks": [steps]}
    if data == "endless":
        model.fit(endless(), steps_per_epoch=25, **fit)
    elif data == "finite":
        model.fit(endless().take(25), **fit)
    elif data == "arrays":
        model.fit(*arrays(), batch_size=4, **fit)
    else:
        model.fit(endless().take(25).filter(lambda x, y: True), **fit)
    assert int(model.optimizer.iterations.numpy()) == 50
    begins = list(range(0, 25, k))
    assert steps.begins[: len(begins)] == begins
    if data != "unknown length":
        assert steps.begins == begins * 2
        assert steps.ends == [first + k - 1 for first in begins] * 2  # as Keras counts


class Positions(keras.callbacks.Callback):
    """Records the position and the optimizer's updates after each call and each epoch."""

    def __init__(self):
        super().__init__()
        self.calls, self.epochs = [], []

    def _now(self):
        position = self.model.training_state.position
        assert position.batch == int(self.model.optimizer.iterations.numpy())
        return position.step

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(self._now())

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(self._now())


def of_unknown_length(batches):
    return endless().take(batches).filter(lambda x, y: True)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_execution": 4},
        {"steps_per_execution": 4, "accumulate": 2},
        {"steps_per_execution": 4, "local_steps": 3},
        {"steps_per_execution": 4, "run_eagerly": True},
        {"steps_per_execution": "auto"},
    ],
    ids=str,
)
def test_a_call_counts_the_steps_that_it_ran_before_the_data_ended(mirrored, options, monkeypatch):
    timed = []

    def note(tuner, steps, seconds):
        timed.append(steps)
        tuner.length = 4

    monkeypatch.setattr(GroupTuner, "note", note)
    with mirrored.scope():
        model = linear(**options)
    positions = Positions()
    with no_warnings():  # nobody has promised a number of batches
        model.fit(of_unknown_length(6), epochs=2, verbose=0, callbacks=[positions], shuffle=False)
    if options["steps_per_execution"] == 4:
        assert positions.calls == [4, 6] * 2
    else:
        assert timed == [1, 4, 1, 4, 2]
    assert positions.epochs == [6, 6]
    assert model.training_state.clock.take().steps == 12
    assert heartbeat._process_heartbeat._activity[0] == "between steps, after step 6"
    for call in (model.evaluate, model.predict):
        call(of_unknown_length(6), verbose=0)
        assert heartbeat._process_heartbeat._activity[0] == "between steps, after step 6"


@pytest.mark.parametrize("k", [1, 4])
def test_data_that_end_within_an_epoch_begin_again_in_the_next_one(k):
    model, positions = linear(steps_per_execution=k), Positions()
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(
            of_unknown_length(5), epochs=4, steps_per_epoch=4, verbose=0, callbacks=[positions]
        )
    assert positions.epochs == [4, 1, 4, 1]


@pytest.mark.parametrize("k", [1, 4])
def test_epochs_of_unknown_length_may_differ(k):
    lengths = itertools.cycle([5, 8])
    examples = list(endless().take(8))
    data = tf.data.Dataset.from_generator(
        lambda: iter(examples[: next(lengths)]), output_signature=endless().element_spec
    )
    model, positions = linear(steps_per_execution=k), Positions()
    model.fit(data, epochs=4, verbose=0, callbacks=[positions])
    assert positions.epochs == [5, 8, 5, 8]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("k", [1, 7])
def test_groups_change_neither_weights_nor_history(strategy, k):
    reference = linear(keras.Model)
    expected = reference.fit(endless(), steps_per_epoch=25, epochs=2, verbose=0).history
    with strategy.scope():
        model = linear(steps_per_execution=k)
    history = model.fit(endless(), steps_per_epoch=25, epochs=2, verbose=0).history
    assert_same_weights(model.get_weights(), reference.get_weights(), 1e-6)
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


def test_a_model_without_strategy_trains_as_on_one_device():
    model, reference = linear(), linear(keras.Model)
    for each in (model, reference):
        each.fit(endless(), steps_per_epoch=25, verbose=0)
    assert_same_weights(model.get_weights(), reference.get_weights(), 1e-6)


def test_callbacks_that_read_see_the_state_after_their_step(mirrored):
    class Losses(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.losses = []

        def on_train_batch_end(self, batch, logs=None):
            self.losses.append(logs["loss"])

    def losses(model):
        callback = Losses()
        model.fit(endless(), steps_per_epoch=6, verbose=0, callbacks=[callback])
        return callback.losses

    with mirrored.scope():
        model = linear()
    np.testing.assert_allclose(losses(model), losses(linear(keras.Model)), rtol=1e-5)


def test_training_stops_within_an_epoch(mirrored):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch >= 9:
                self.model.stop_training = True

    with mirrored.scope():
        model = linear(steps_per_execution=5)
    model.fit(endless(), steps_per_epoch=25, epochs=3, verbose=0, callbacks=[Stop()])
    assert int(model.optimizer.iterations.numpy()) == 10


def test_data_that_ends_early_warns(mirrored):
    with mirrored.scope():
        model = linear(steps_per_execution=4)
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(endless().take(10), steps_per_epoch=25, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 10


def test_validation_evaluates_on_the_whole_of_its_data(strategy):
    x, y = arrays()
    with strategy.scope():
        model = linear()
    history = model.fit(
        x, y, batch_size=20, validation_data=(x[:33], y[:33]), epochs=2, verbose=0
    ).history
    predicted = model.predict(x[:33], verbose=0)
    accuracy = np.mean(predicted.argmax(1) == y[:33])
    loss = -np.mean(np.log(predicted[np.arange(33), y[:33]]))
    assert history["val_accuracy"][-1] == pytest.approx(accuracy, abs=1e-6)
    assert history["val_loss"][-1] == pytest.approx(loss, rel=1e-5)


class Shuffled(keras.utils.PyDataset):
    """Batches that are shuffled at the end of each epoch, as in Keras's own examples."""

    def __init__(self):
        super().__init__()
        (self.x, self.y), self.rng = arrays(47), np.random.default_rng(1)
        self.order, self.ends = np.arange(47), 0

    def __len__(self):
        return 5

    def __getitem__(self, batch):
        rows = self.order[10 * batch : 10 * batch + 10]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        self.rng.shuffle(self.order)
        self.ends += 1


@pytest.mark.slow
def test_a_py_dataset_is_told_of_the_ends_that_keras_tells(mirrored):
    def trained(model):
        data, validation = Shuffled(), Shuffled()
        history = model.fit(
            data, epochs=3, shuffle=False, validation_data=validation, verbose=0
        ).history
        predictions = model.predict(data, verbose=0)
        return history, predictions, data.ends, validation.ends

    expected = trained(linear(keras.Model))
    with mirrored.scope():
        found = trained(linear())
    assert found[2:] == expected[2:]
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4)
    for name, values in expected[0].items():
        np.testing.assert_allclose(found[0][name], values, rtol=1e-4)


def padded(number, batch):
    """Yields batches of equal size, with padding in the last one that would change every metric."""
    x, y = arrays(number)
    rows = -(-number // batch) * batch
    x = np.concatenate([x, np.full((rows - number, 4), 1e6, "float32")])
    y = np.concatenate([y, np.full(rows - number, 2)])
    return tf.data.Dataset.from_tensor_slices((x, y, np.arange(rows) < number)).batch(batch)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_padding_leaves_outputs_their_masks_and_logits(mirrored, run_eagerly):
    def build(model_class):
        keras.utils.set_random_seed(0)
        x = keras.Input((4,))
        certain = keras.layers.Dense(3, "softmax", kernel_initializer="random_normal")(900 * x)
        steps = keras.layers.Masking()(keras.layers.ReLU()(keras.layers.Reshape((4, 1))(x)))
        model = model_class(x, [certain, steps])
        losses = ["sparse_categorical_crossentropy", "mse"]
        model.compile(loss=losses, run_eagerly=run_eagerly)
        return model

    def labeled(x, y, *valid):
        return (x, (y, tf.ones((tf.shape(x)[0], 4, 1))), *valid)

    data = tf.data.Dataset.from_tensor_slices(arrays(11)).batch(8).map(labeled)
    expected = build(keras.Model).evaluate(data, verbose=0)
    with mirrored.scope():
        model = build(kdist.Model)
    found = model.evaluate(padded(11, 8).map(labeled), verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# One model evaluates all sizes: building and tracing it takes most of the time.


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_padding_counts_nowhere(strategy, run_eagerly):
    with strategy.scope():
        model = linear()
        model.compile(
            run_eagerly=run_eagerly,
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")],
        )
    reference = linear(keras.Model)
    for number in (1, 5, 8, 9, 11, 16):
        x, y = arrays(number)
        result = model.evaluate(padded(number, 8), verbose=0, return_dict=True)
        predicted = reference.predict(x, verbose=0)
        accuracy = pytest.approx(np.mean(predicted.argmax(1) == y), abs=1e-6)
        assert result["accuracy"] == result["weighted"] == accuracy, number
        best = np.argsort(predicted)[:, -2:]
        top2 = np.mean([label in labels for labels, label in zip(best, y, strict=True)])
        assert result["top2"] == pytest.approx(top2, abs=1e-6), number
        loss = -np.mean(np.log(predicted[np.arange(number), y]))
        assert result["loss"] == pytest.approx(loss, rel=1e-5), number
        ours = model.predict(padded(number, 8), verbose=0)
        np.testing.assert_allclose(ours, predicted, rtol=1e-5, err_msg=f"{number} rows")


@pytest.mark.fast_cases(1)
def test_convolutions_accept_batches_smaller_than_the_replicas(strategy):
    """17 examples in batches of 8 leave one, so that some replicas have none."""

    def build(model_class):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((8, 8, 1))
        z = keras.layers.Conv2D(4, 3, strides=2, padding="same")(inputs)
        z = keras.layers.ReLU()(keras.layers.BatchNormalization()(z))
        outputs = keras.layers.Dense(3, activation="softmax")(keras.layers.Flatten()(z))
        model = model_class(inputs, outputs)
        model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    with strategy.scope():
        model = build(kdist.Model)
    reference = build(keras.Model)
    batch = kdist.Batch.from_global(8, replicas=strategy.num_replicas_in_sync)
    for number in (16, 17, 18, 31):
        x = np.random.default_rng(0).normal(size=(number, 8, 8, 1)).astype("float32")
        y = np.arange(number) % 3
        pipeline = kdist.data.Pipeline(kdist.data.from_arrays(x, y), batch, training=False)
        evaluated = pytest.approx(reference.evaluate(x, y, verbose=0), rel=1e-5)
        predicted = reference.predict(x, verbose=0)
        assert model.evaluate(pipeline, verbose=0) == evaluated, number
        assert model.evaluate(x, y, 8, verbose=0) == evaluated, number
        for ours in (
            model.predict(pipeline, verbose=0),
            model.predict(x, batch_size=8, verbose=0),
        ):
            message = f"{number} rows"
            np.testing.assert_allclose(ours, predicted, rtol=1e-4, atol=1e-6, err_msg=message)


def test_boolean_sample_weights_are_weights(mirrored):
    x, y = arrays(16)
    with mirrored.scope():
        model = linear()
    weights = np.arange(16) < 4
    ours = model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
    plain = linear(keras.Model)
    expected = plain.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
    assert ours == pytest.approx(expected, rel=1e-5)


def test_a_custom_step_returns_its_own_logs(mirrored):
    class Own(kdist.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "mine": tf.constant(7.0)}

    with mirrored.scope():
        model = Own()
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=3,
        )
    history = model.fit(endless(), steps_per_epoch=8, verbose=0).history
    assert history["mine"] == [7.0]
    assert int(model.optimizer.iterations.numpy()) == 8


def test_run_eagerly_trains_the_same(mirrored, monkeypatch):
    logged = []
    monkeypatch.setattr(tf_logging, "log_first_n", lambda level, text, *_: logged.append(text))
    with mirrored.scope():
        eager = linear(run_eagerly=True, steps_per_execution=3)
    eager.fit(endless(), steps_per_epoch=5, verbose=0)
    assert not any("eagerly" in text for text in logged)  # is slow: the program has chosen it
    reference = linear(keras.Model)
    reference.fit(endless(), steps_per_epoch=5, verbose=0)
    assert_same_weights(eager.get_weights(), reference.get_weights(), 1e-6)


@pytest.mark.parametrize("k", [1, 5])
def test_the_first_nonfinite_step_is_known(strategy, k):
    x, y = arrays(100)
    x[4 * 12 + 3] = np.nan  # within the thirteenth batch, on the last replica
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    with strategy.scope():
        model = linear(steps_per_execution=k)
    assert model.training_state.first_nonfinite_step() is None
    model.fit(dataset.take(12), verbose=0)
    assert model.training_state.first_nonfinite_step() is None
    good = model.get_weights()
    model.fit(dataset, verbose=0)
    assert model.training_state.first_nonfinite_step() == 12 + 13
    model.set_weights(good)
    model.fit(dataset.take(12), verbose=0)
    assert model.training_state.first_nonfinite_step() is None


def test_the_first_nonfinite_step_of_an_optimizer_that_accumulates():
    x, y = arrays(20)
    x[2 * 4] = np.nan
    model = linear()
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert model.training_state.first_nonfinite_step() == 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_train_on_batch_and_test_on_batch(mirrored, accumulate):
    x, y = arrays(8)
    with mirrored.scope():
        model = linear(accumulate=accumulate)
    reference = linear(keras.Model)
    assert model.train_on_batch(x, y, return_dict=True) == pytest.approx(
        reference.train_on_batch(x, y, return_dict=True), rel=1e-5
    )
    assert model.test_on_batch(x, y) == pytest.approx(reference.test_on_batch(x, y), rel=1e-5)
    assert_same_weights(model.get_weights(), reference.get_weights(), 1e-6)


def test_xla_computes_the_same_weights():
    with kdist.create_strategy("one_device").scope():
        model = linear(jit_compile=True, steps_per_execution=4)
    model.fit(endless(), steps_per_epoch=10, verbose=0)
    reference = linear(keras.Model, jit_compile=False)
    reference.fit(endless(), steps_per_epoch=10, verbose=0)
    assert model.jit_compile
    assert_same_weights(model.get_weights(), reference.get_weights(), 1e-5)


STRIDED = """
import kdist
strategy = kdist.create_strategy("mirrored", int(sys.argv[1])) if sys.argv[1] != "0" else None
import keras, numpy as np
kdist.patch_keras()
keras.utils.set_random_seed(0)
with strategy.scope() if strategy else contextlib.nullcontext():
    layers = [keras.Input((16, 16, 4)), keras.layers.Conv2D(4, 3, padding="same")]
    layers += [keras.layers.Conv2D(6, 1, strides=2), keras.layers.Conv2D(6, 1, 2, padding="same")]
    layers += [keras.layers.Reshape((4, 24)), keras.layers.Conv1D(3, 1, strides=3)]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(24, 16, 16, 4))
model.fit(x, x[:, 0, 0, :1], batch_size=8, epochs=5, verbose=0, shuffle=False)
print(json.dumps([weight.tolist() for weight in model.get_weights()]))
"""


@pytest.mark.slow
def test_strided_convolutions_by_1_x_1_kernels():
    """Two devices on two cores have one thread for each operation, for which oneDNN has a bug."""
    code = "import contextlib, json, sys\n" + STRIDED
    one, two = (python(code, [str(devices)]) for devices in (0, 2))
    assert_same_weights([*map(np.array, two)], [*map(np.array, one)], 1e-5)


def test_xla_divides_batches(mirrored):
    """The graph of a compiled forward pass is hidden, and its losses are means nevertheless."""
    x, y = np.linspace(-1, 1, 64).reshape(16, 4), np.arange(16) % 3
    with mirrored.scope():
        model = linear(jit_compile=True)
    reference = linear(keras.Model, jit_compile=False)
    for trained in (model, reference):
        trained.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(model.get_weights(), reference.get_weights(), 1e-6)


def test_a_batch_of_one_row_is_not_taken_for_its_second_axis(mirrored):
    def attention(model_class):
        inputs = keras.Input((3, 4))
        outputs = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
        return model_class(inputs, outputs)

    x = np.linspace(-1, 1, 12).reshape(1, 3, 4)
    expected = attention(keras.Model)
    with mirrored.scope():
        model = attention(kdist.Model)
    model.set_weights(expected.get_weights())
    found = model.predict(x, batch_size=1, verbose=0)
    np.testing.assert_allclose(found, expected.predict(x, verbose=0), rtol=1e-5)


def normalised(synchronized):
    inputs = keras.Input((4,))
    x = keras.layers.BatchNormalization(synchronized=synchronized)(keras.layers.Dense(8)(inputs))
    model = kdist.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    return model


def test_xla_compiles_the_passes_of_each_replica(mirrored):
    with mirrored.scope():
        model = normalised(synchronized=False)
    model.fit(*arrays(), batch_size=20, verbose=0)
    assert_replicas_agree(mirrored, model)


def test_xla_rejects_synchronized_layers(mirrored):
    with mirrored.scope():
        model = normalised(synchronized=True)
    with pytest.raises(ValueError, match="replicas meet.*synchronized BatchNorm.*jit_compile"):
        model.fit(*arrays(), batch_size=20, verbose=0)


def assert_replicas_agree(strategy, model):
    """Asserts that the copies of every variable have the same bits on all replicas."""
    for variable in [*model.variables, *model.optimizer.variables]:
        first, *others = strategy.experimental_local_results(variable.value)
        for other in others:
            np.testing.assert_array_equal(first.numpy(), other.numpy(), err_msg=variable.path)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("number", "accumulate"), covering([100, 101], [1, 3]))
def test_replicas_hold_the_same_bits(number, accumulate):
    """The variables include the statistics of a BatchNorm, which each replica writes."""
    four = kdist.create_strategy("mirrored", 4)
    with four.scope():
        inputs = keras.Input((4,))
        x = keras.layers.BatchNormalization(momentum=0.5)(keras.layers.Dense(8)(inputs))
        x = keras.layers.Dropout(0.2)(x)
        model = kdist.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))
        model.compile(
            keras.optimizers.Adam(global_clipnorm=1.0, use_ema=True, ema_overwrite_frequency=2),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            accumulate=accumulate,
        )
    before = model.layers[2].moving_mean.numpy()
    model.fit(*arrays(number), batch_size=25, epochs=2, verbose=0)
    assert_replicas_agree(four, model)
    moved = model.layers[2].moving_mean.numpy()
    assert np.all(np.isfinite(moved))
    assert not np.array_equal(moved, before)


def test_statistics_are_the_mean_of_all_replicas(mirrored):
    x = np.concatenate([np.zeros((4, 2)), np.ones((4, 2))]).astype("float32")
    with mirrored.scope():
        inputs = keras.Input((2,))
        normalise = keras.layers.BatchNormalization(momentum=0.0)
        model = kdist.Model(inputs, keras.layers.Dense(1)(normalise(inputs)))
        model.compile("sgd", "mse")
    model.fit(x, np.zeros((8, 1)), batch_size=8, shuffle=False, verbose=0)
    np.testing.assert_allclose(normalise.moving_mean.numpy(), [0.5, 0.5])


def of_sparse_codes(model_class=kdist.Model):
    """Returns losses and weights after a sparse layer of preprocessing within the model."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,), dtype="int32")
    codes = keras.layers.IntegerLookup(vocabulary=[*range(7)], output_mode="count", sparse=True)
    model = model_class(inputs, keras.layers.Dense(2)(codes(inputs)))
    model.compile(keras.optimizers.Adam(0.05, epsilon=1e-3), "mse")
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 7, (47, 5)), generator.normal(size=(47, 2))
    history = model.fit(x, y, batch_size=10, shuffle=False, epochs=2, verbose=0).history
    return history["loss"], model.get_weights()


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*every replica computes the whole batch")
def test_rows_of_sparse_codes_stay_apart(mirrored):
    losses, weights = of_sparse_codes(keras.Model)
    with mirrored.scope():
        own_losses, own_weights = of_sparse_codes()
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
    assert_same_weights(own_weights, weights, 1e-5)


class Scale(keras.layers.Layer):
    """Scales columns by a weight whose copies TensorFlow would add up."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones", aggregation="sum")

    def call(self, x):
        return self.scale * x


def test_an_update_of_a_weight_with_an_aggregation_is_made_once(mirrored):
    def trained(model_class):
        inputs = keras.Input((4,))
        model = model_class(
            inputs, keras.layers.Dense(3, kernel_initializer="ones")(Scale()(inputs))
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x, _ = arrays(40)
        model.fit(x, x[:, :3], batch_size=10, shuffle=False, verbose=0)
        return model.get_weights()

    expected = trained(keras.Model)
    with mirrored.scope():
        assert_same_weights(trained(kdist.Model), expected, 1e-5)


def float8(model_class=kdist.Model, **options):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    model = model_class(inputs, keras.layers.Dense(3, dtype="float8_from_float32")(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, **options)
    model.fit(*arrays(40), batch_size=10, shuffle=False, epochs=2, verbose=0)
    return model.layers[-1]


@pytest.mark.slow
def test_scales_of_float8_are_those_of_the_batch(mirrored):
    expected = float8(keras.Model)
    with mirrored.scope():
        layer = float8()
        with pytest.raises(ValueError, match="accumulate"):
            float8(accumulate=2)
    for own, others in zip(layer.variables, expected.variables, strict=True):
        np.testing.assert_allclose(own.numpy(), others.numpy(), rtol=1e-2, atol=1e-9)


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, "2"])
def test_accumulate_must_be_positive(accumulate):
    with pytest.raises(ValueError, match="accumulate must be a positive integer"):
        linear(accumulate=accumulate)


@pytest.mark.parametrize("steps_per_execution", [0, -1, 1.5, None, "aut", True])
def test_steps_per_execution_must_be_positive(steps_per_execution):
    with pytest.raises(ValueError, match="steps_per_execution must be a positive integer"):
        linear(steps_per_execution=steps_per_execution)


def test_an_unbuilt_optimizer_of_ones_own_accumulates(mirrored):
    class Own(kdist.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.mine.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    def weights(accumulate):
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            inputs = keras.Input((4,))
            model = Own(inputs, keras.layers.Dense(3, activation="softmax")(inputs))
            model.mine = keras.optimizers.Adam(0.1)
            model.compile("sgd", "sparse_categorical_crossentropy", accumulate=accumulate)
        model.fit(endless(8), steps_per_epoch=2, verbose=0)
        assert int(model.mine.iterations) == 2
        return model.get_weights()

    assert_same_weights(weights(2), weights(1), 1e-6)


@pytest.mark.slow
def test_auto_finds_and_logs_the_steps_per_call(mirrored, capsys):
    with mirrored.scope():
        model = linear(steps_per_execution="auto")
    steps = Steps()
    # More steps than the longest search, 4 * (1 + 2 + ... + 128).
    model.fit(endless(), steps_per_epoch=1200, verbose=0, callbacks=[steps])
    assert int(model.optimizer.iterations.numpy()) == 1200
    assert steps.begins[0] == 0
    assert steps.ends[-1] >= 1199
    assert [last + 1 for last in steps.ends[:-1]] == steps.begins[1:]
    assert f"kdist: steps_per_execution={model.steps_per_execution} (" in capsys.readouterr().err
    reference = linear(keras.Model)
    reference.fit(endless(), steps_per_epoch=1200, verbose=0)
    assert_same_weights(model.get_weights(), reference.get_weights(), 1e-5)


@pytest.mark.fast_cases(1)
def test_losses_of_outputs_count_a_smaller_last_batch(strategy):
    """Arrays have an unknown cardinality, so each batch is fetched before its step is traced."""
    x = np.random.default_rng(0).normal(size=(41, 3)).astype("float32")
    y = x.sum(1, keepdims=True)

    def logs(model_class):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,))
        outputs = [keras.layers.Dense(1, name=name)(inputs) for name in ("one", "two")]
        model = model_class(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01), ["mse", "mae"])
        history = model.fit(x, [y, y], batch_size=16, epochs=2, verbose=0).history
        return {**history, "score": model.evaluate(x, [y, y], batch_size=15, verbose=0)}

    expected = logs(keras.Model)
    with strategy.scope():
        found = logs(kdist.Model)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5)


@pytest.mark.slow
def test_stateful_layers_see_the_whole_batch(mirrored):
    def train(strategy, **options):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layers = [keras.Input(batch_shape=(4, 3, 1)), keras.layers.LSTM(2, stateful=True)]
            model = kdist.Model.of(keras.Sequential(layers))
            model.compile(keras.optimizers.SGD(0.5), "mse", **options)
        x = np.linspace(-1, 1, 24).reshape(8, 3, 1)
        model.fit(x, np.ones((8, 2)), batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    expected = train(kdist.create_strategy("one_device"))
    with pytest.warns(UserWarning, match="whole batch.*stateful"):
        assert_same_weights(train(mirrored), expected, 1e-6)
    with pytest.raises(ValueError, match="stateful"):
        train(mirrored, accumulate=2)


class Keys(keras.callbacks.Callback):
    """Records the names in the logs of each call, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(list(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(list(logs))

    on_test_batch_end = on_train_batch_end

    def on_test_end(self, logs=None):
        self.seen.append(list(logs))


def names_in_logs(model_class, custom):
    class Own(model_class):
        def train_step(self, data):
            logs = super().train_step(data)
            return {"zeta": logs["loss"], **logs, "beta": logs["loss"]}

    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    outputs = {name: keras.layers.Dense(3, name=name)(inputs) for name in ("b", "a")}
    model = (Own if custom else model_class)(inputs, outputs)
    model.compile("sgd", {"b": "mse", "a": "mae"}, metrics={"b": ["mse", "mae"], "a": ["mse"]})
    x = np.ones((8, 4), "float32")
    y = {"a": x[:, :3], "b": x[:, :3]}
    keys = Keys()
    history = model.fit(
        x, y, batch_size=4, validation_data=(x, y), verbose=0, callbacks=[keys]
    ).history
    results = [
        model.evaluate(x, y, verbose=0, return_dict=True),
        model.train_on_batch(x, y, return_dict=True),
        model.test_on_batch(x, y, return_dict=True),
    ]
    return [*keys.seen, list(history), *map(list, results)]


@pytest.mark.slow
@pytest.mark.parametrize("custom", [False, *seldom([True])])
def test_logs_have_the_order_of_keras(mirrored, custom):
    expected = names_in_logs(keras.Model, custom)
    with mirrored.scope():
        assert names_in_logs(kdist.Model, custom) == expected


@pytest.mark.slow
def test_many_models_cause_no_warning_of_retracing(monkeypatch, caplog):
    counts = polymorphic_function._FrequentTracingDetectorManager()
    monkeypatch.setattr(polymorphic_function, "_frequent_tracing_detector_manager", counts)
    monkeypatch.setattr(tf.get_logger(), "propagate", True)
    x, y = arrays(4)
    for _ in range(6):
        model = linear()
        model.fit(x, y, verbose=0)
        model.predict(x, verbose=0)
    assert "retracing" not in caplog.text
    retraced = tf.function(lambda x: x)  # the same counts see what is retraced
    for number in range(6):
        retraced(number)
    assert "retracing" in caplog.text


def decaying():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
    return keras.optimizers.SGD(schedule)


def averaging():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1, use_ema=True))


def several():
    if not MULTI_OPTIMIZERS:
        pytest.skip("Keras 3.14 has no MultiOptimizer")
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.1))
    )


@pytest.mark.parametrize(
    ("where", "new"),
    covering(["optimizer", "compile", "attribute"], [decaying, averaging, several]),
)
def test_an_optimizer_may_be_created_outside_of_the_scope(mirrored, new, where):
    def train(model_class, strategy):
        keras.utils.set_random_seed(3)
        optimizer = new()
        with strategy.scope():
            inputs = keras.Input((4,))
            model = model_class(inputs, keras.layers.Dense(3)(inputs))
            if where == "optimizer":
                model.compile(optimizer, "mse")
        if where != "optimizer":
            model.compile("sgd" if where == "attribute" else optimizer, "mse")
        if where == "attribute":  # as programs with two optimizers set them
            model.optimizer = optimizer
        x = arrays(32)[0]
        model.fit(x, x[:, :3], batch_size=8, epochs=2, shuffle=False, verbose=0)
        return [*model.get_weights(), optimizer.iterations.numpy()]

    expected = train(keras.Model, tf.distribute.get_strategy())
    assert_same_weights(train(kdist.Model, mirrored), expected, 1e-5)


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch"])
def test_metrics_may_be_created_outside_of_the_scope(mirrored, method):
    def logs(model_class, strategy):
        keras.utils.set_random_seed(3)
        metric = keras.metrics.MeanAbsoluteError()
        with strategy.scope():
            inputs = keras.Input((4,))
            model = model_class(inputs, keras.layers.Dense(3)(inputs))
        model.compile("sgd", "mse", metrics=[metric, "mse"])
        x = arrays(33)[0]
        y = x[:, :3]
        if method == "train_on_batch":
            return model.train_on_batch(x[:1], y[:1])
        if method == "evaluate":
            return model.evaluate(x, y, batch_size=8, verbose=0)
        # A replica has no rows of the last batch.
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return [value for values in history.history.values() for value in values]

    expected = logs(keras.Model, tf.distribute.get_strategy())
    assert logs(kdist.Model, mirrored) == pytest.approx(expected, 1e-5)


@pytest.mark.parametrize("is_normalized", [False, True], ids=["weight", "statistic"])
def test_layers_that_change_are_created_in_the_scope(mirrored, is_normalized):
    """Each replica would apply the gradient of the whole batch to the same variable."""
    inputs = keras.Input((4,))
    layer = keras.layers.BatchNormalization() if is_normalized else keras.layers.Dense(4)
    base = keras.Model(inputs, layer(inputs))
    with mirrored.scope():
        model = kdist.Model(inputs, keras.layers.Dense(3)(base(inputs)))
        model.compile("sgd", "mse")
    x = arrays(8)[0]
    with pytest.raises(ValueError, match="outside"):
        model.fit(x, x[:, :3], verbose=0)
    base.trainable = False
    model.compile("sgd", "mse")
    model.fit(x, x[:, :3], verbose=0)  # Replicas may share what they only read.


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_the_end_of_an_iterator_is_not_waited_for(method):
    """TensorFlow's threads can need a minute to notice it; here, they read a batch too many."""
    free, waited = threading.Event(), threading.Event()

    def read(number):
        if number >= 2 and not free.wait(30):
            waited.set()
        return np.float32([number])

    def batch(number):
        value = tf.py_function(read, [number], tf.float32)
        x = tf.ensure_shape(value, [1])[:, None] * tf.ones([1, 4])
        return x if method == "predict" else (x, tf.zeros([1]))

    data = tf.data.Dataset.range(100).map(batch).prefetch(4)
    steps = {"steps_per_epoch" if method == "fit" else "steps": 2}
    try:
        getattr(linear(), method)(data, verbose=0, **steps)
        assert not waited.is_set()
    finally:
        free.set()
