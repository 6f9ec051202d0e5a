"""Split models train to the weights of one device, and everything is on its device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.parallel import device, split, stage
from kdist.parallel.inspect.operation_devices import devices_of, groups_of, operations_that_run
from kdist.testing import assert_same_weights
from tests.parallel.in_place import (
    assert_in_place,
    assert_updates_in_place,
    parts_of,
)
from tests.tiers import covering, seldom

ROWS, BATCH = 90, 16  # twelve steps in two epochs; the last batch of each is smaller

LAYOUTS = {
    "one device": kdist.Layout(),
    "two branches": kdist.Layout(branch=2),
    "two stages": kdist.Layout(pipeline=2),
    "data 2 x branches 2": kdist.Layout(data=2, branch=2),
    "data 2 x stages 2": kdist.Layout(data=2, pipeline=2),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.02),
    "momentum": lambda: keras.optimizers.SGD(0.005, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-3),
}


def branches(model_class=keras.Model):
    """Two branches, one of them nested, and a common head."""
    layers = keras.layers
    inputs = keras.Input((6, 6, 2))
    left = layers.Conv2D(4, 3, name="left_conv", activation="relu")(inputs)
    left = layers.LayerNormalization(name="left_norm")(left)
    inner = keras.Input((6, 6, 2))
    right = keras.Model(
        inner,
        layers.Conv2D(4, 3, name="conv")(layers.Activation("tanh", name="act")(inner)),
        name="right",
    )(inputs)
    x = layers.Flatten(name="flat")(left * 2.0 + right)
    return model_class(inputs, layers.Dense(5, activation="softmax", name="head")(x))


PLACEMENTS = {
    "one device": {},
    "branch": {"right": device(1), "head": device(0), "flat": device(0), "add.*": device(0)},
    "stage": {"head": stage(1)},
}


def placement_of(layout):
    if layout.branch > 1:
        return PLACEMENTS["branch"]
    return PLACEMENTS["stage"] if layout.pipeline > 1 else PLACEMENTS["one device"]


def examples(rows=ROWS):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 6, 6, 2)).astype("float32")
    return x, generator.integers(0, 5, rows)


def compiled(model, optimizer="sgd", **arguments):
    model.compile(
        OPTIMIZERS[optimizer](),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **arguments,
    )
    return model


def split_in(layout, model=None, placement=None, **arguments):
    model = model or branches()
    with kdist.create_strategy(layout).scope():
        return compiled(
            split(model, placement_of(layout) if placement is None else placement), **arguments
        )


def trained(model, **arguments):
    x, y = examples()
    return model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **arguments)


OFTEN = [
    ("one device", "sgd"),
    ("two branches", "sgd"),
    ("data 2 x branches 2", "momentum"),
    ("data 2 x stages 2", "adam"),
]
CASES = [*OFTEN, *seldom([(layout, "sgd") for layout in LAYOUTS], other_than=OFTEN)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("layout", "optimizer"), CASES)
def test_weights_and_history_are_those_of_one_device(layout, optimizer):
    plain = branches()
    model = split_in(LAYOUTS[layout], plain, optimizer=optimizer)
    compiled(plain, optimizer)
    x, y = examples()
    validation = {"validation_data": (x[:33], y[:33])}
    expected, got = trained(plain, **validation).history, trained(model, **validation).history
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, atol=1e-5, err_msg=name)
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-5)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulate": 2},
        *seldom([{"steps_per_execution": 4}, {"local_steps": 1}]),
    ],
    ids=str,
)
def test_the_ways_of_training(arguments):
    plain = branches()
    model = split_in(LAYOUTS["data 2 x branches 2"], plain, **arguments)
    trained(compiled(plain))
    trained(model)
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-5)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("data", "options"),
    covering(
        [2, 1],
        [
            {"global_clipnorm": 0.05},
            {"clipnorm": 0.05},
            {"use_ema": True, "ema_momentum": 0.9},
            {"weight_decay": 0.01},
        ],
    ),
    ids=str,
)
def test_what_optimizers_do_besides(options, data):
    def compiled_so(model):
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9, **options)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    plain = branches()
    with kdist.create_strategy(kdist.Layout(data=data, branch=2)).scope():
        model = compiled_so(split(plain, PLACEMENTS["branch"]))
    compiled_so(plain)
    trained(plain)
    with operations_that_run() as operations:
        trained(model)
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-5)
    assert_updates_in_place(model, operations)


@pytest.mark.slow
def test_mixed_precision_with_a_loss_scale():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        plain = branches()
        model = split_in(LAYOUTS["data 2 x branches 2"], plain)
    finally:
        keras.config.set_dtype_policy("float32")
    compiled(plain)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    trained(plain)
    trained(model)
    assert_same_weights(model.get_weights(), plain.get_weights(), 3e-3)


# Placement.


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("layout", ["two branches", "data 2 x branches 2"])
def test_everything_is_where_it_was_asked_to_be(layout):
    model = split_in(LAYOUTS[layout], optimizer="adam")
    x, y = examples(BATCH)
    with operations_that_run() as operations:
        model.fit(x, y, batch_size=BATCH, verbose=0)
    groups = groups_of(model.distribute_strategy)
    for part in parts_of(model):
        assert part.place == int(part.name == "right/conv")
        for variable in part.variables:
            expected = [group[part.place] for group in groups]
            assert devices_of(model.distribute_strategy, variable) == expected, variable.path
    assert_in_place(model, operations)


# Files.


@pytest.mark.slow
def test_a_file_is_that_of_the_plain_model(tmp_path):
    plain = branches()
    model = split_in(LAYOUTS["data 2 x branches 2"], plain)
    trained(model)
    model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert type(opened) is type(plain)
    assert_same_weights(opened.get_weights(), model.get_weights(), 0)
    model.save_weights(tmp_path / "model.weights.h5")
    plain.load_weights(tmp_path / "model.weights.h5")
    assert_same_weights(plain.get_weights(), model.get_weights(), 0)


def test_a_sequential_model():
    layers = keras.layers
    plain = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Flatten(name="flat"),
            layers.Dense(8, activation="relu", name="first"),
            layers.Dropout(0.0, name="drop"),
            layers.Dense(5, activation="softmax", name="last"),
        ]
    )
    model = split_in(kdist.Layout(pipeline=2), plain, {"drop|last": stage(1)})
    trained(compiled(plain))
    with operations_that_run() as operations:
        trained(model)
    assert isinstance(model, keras.Sequential)
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-5)
    products = [o for o in operations if o.type.endswith("MatMul")]
    assert {o.device for o in products if "last" in o.name} == {"CPU:1"}
    assert {o.device for o in products if "first" in o.name} == {"CPU:0"}


# What is refused.


def test_eager_and_compiled_steps_are_refused():
    model = split_in(LAYOUTS["two branches"])
    with pytest.raises(ValueError, match="jit_compile"):
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="debug the model before it is split"):
        model.compile("sgd", "mse", run_eagerly=True)


def test_steps_of_programs_are_refused():
    """A split model is a part of a model that trains it, such as a session's."""
    model = split_in(LAYOUTS["two branches"])
    step = kdist.step(model.distribute_strategy)(lambda batch: {})
    data = tf.data.Dataset.from_tensors(examples()[0])
    refused = pytest.raises(ValueError, match="only by their own fit")
    with kdist.session(model, model.optimizer) as session, refused:
        list(session.run(step, data, epochs=1))


def test_another_strategy_is_refused(mirrored):
    with mirrored.scope(), pytest.raises(ValueError, match="groups of devices"):
        split(branches(), {})


def test_an_unbuilt_or_subclassed_model_is_refused():
    class Own(keras.Model):
        pass

    with kdist.create_strategy(kdist.Layout()).scope():
        with pytest.raises(TypeError, match="functional and Sequential"):
            split(Own(), {})
        with pytest.raises(ValueError, match="keras.Input"):
            split(keras.Sequential([keras.layers.Dense(1)]), {})


def test_too_few_devices():
    with pytest.raises(ValueError, match="is for 4 devices and there are 2"):
        kdist.create_strategy(kdist.Layout(data=2, branch=2), ["CPU:0", "CPU:1"])


def test_a_pipeline_of_data():
    """It feeds a split model like any other."""
    train, _ = kdist.data.load("digits", batch=kdist.Batch(16, 2))
    layers = keras.layers
    inputs = keras.Input(train.image_shape)
    x = layers.Rescaling(1 / 255, name="rescaled")(inputs)
    x = layers.Dense(8, name="up")(layers.Flatten(name="flat")(x))
    plain = keras.Model(inputs, layers.Dense(10, activation="softmax", name="down")(x))
    model = split_in(kdist.Layout(data=2, pipeline=2), plain, {"down": stage(1)})
    history = model.fit(train, epochs=2, verbose=0).history
    assert history["loss"][1] < history["loss"][0]


class Interrupted(Exception):
    pass


class InterruptAfter(keras.callbacks.Callback):
    """Ends training as a crash would."""

    def __init__(self, steps):
        super().__init__()
        self._steps = steps

    def on_train_batch_end(self, batch, logs=None):
        self._steps -= 1
        if not self._steps:
            raise Interrupted


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_layout(tmp_path):
    """Interrupted in mid-epoch under one layout and finished under another: like one device."""

    def fit(layout, *callbacks):
        keras.utils.set_random_seed(0)
        keras.utils.clear_session(free_memory=False)
        layers = keras.layers
        batch = kdist.Batch(32 // layout.data, layout.data)
        train, _ = kdist.data.load("digits", batch=batch, examples=320)
        inputs = keras.Input(train.image_shape)
        x = layers.Flatten(name="flat")(layers.Rescaling(1 / 255, name="scale")(inputs))
        x = layers.Dense(8, activation="relu", name="up")(x)
        plain = keras.Model(inputs, layers.Dense(10, activation="softmax", name="down")(x))
        placement = {"down": stage(1)} if layout.pipeline > 1 else {}
        with kdist.create_strategy(layout).scope():
            model = split(plain, placement)
            model.compile(OPTIMIZERS["adam"](), "sparse_categorical_crossentropy")
        model.fit(train, epochs=3, callbacks=callbacks, verbose=0)
        return model

    going_on = kdist.callbacks.Checkpoint(tmp_path, every_steps=2)
    with pytest.raises(Interrupted):
        fit(kdist.Layout(data=2, pipeline=2), going_on, InterruptAfter(15))
    model = fit(kdist.Layout(data=4), kdist.callbacks.Checkpoint(tmp_path))
    plain = fit(kdist.Layout())
    assert int(model.optimizer.iterations.numpy()) == 30
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-5)


@pytest.mark.parametrize("layout", ["stage", "two branches"])
def test_a_model_of_which_nothing_is_trained(layout):
    """Like Keras: it warns, and reports the loss."""
    plain = branches()
    plain.trainable = False
    model = split_in(kdist.Layout(pipeline=2, micro_batches=2), plain, PLACEMENTS["stage"])
    if layout == "two branches":
        model = split_in(LAYOUTS[layout], plain)
    before = model.get_weights()
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        assert np.isfinite(trained(model).history["loss"][0])
    assert_same_weights(model.get_weights(), before, 0)
