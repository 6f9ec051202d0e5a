"""Checkpoints written under one layout and resumed under another."""

import contextlib
import functools

import keras
import numpy as np
import pytest

import kdist
from kdist.callbacks import Checkpoint
from kdist.checkpoint import CheckpointError, CheckpointFiles
from kdist.checkpoint.snapshot import capture, restore
from kdist.compat.keras import MULTI_OPTIMIZERS
from kdist.parallel import column, heads, row, split, stage
from kdist.testing import assert_same_weights, largest_difference
from tests.tiers import seldom

layers = keras.layers

BATCH, STEPS, KILLED = 16, 8, 4  # steps of the whole run, and of the one that ends early
TOLERANCE = 1e-6

DIVIDED = {"it": heads(), "up": column(), "down": row(), "head": column()}
ON_STAGES = {"up": stage(0), "down": stage(1)}
LAYOUTS = {
    "one device": (None, None),
    "mirrored": (kdist.Layout(data=2), None),
    "sharded=2": (kdist.Layout(data=2, shard="optimizer", min_shard_bytes=64), None),
    "sharded=4": (kdist.Layout(data=4, shard="optimizer", min_shard_bytes=64), None),
    "weights=2": (kdist.Layout(data=2, shard="weights", min_shard_bytes=64), None),
    "weights=4": (kdist.Layout(data=4, shard="weights", min_shard_bytes=64), None),
    "pipeline": (kdist.Layout(pipeline=2, micro_batches=2), ON_STAGES),
    "tensor=2": (kdist.Layout(tensor=2), DIVIDED),
    "tensor=4": (kdist.Layout(tensor=4), DIVIDED),
    "data and tensor": (kdist.Layout(data=2, tensor=2), DIVIDED),
    "pipeline and tensor": (
        kdist.Layout(pipeline=2, tensor=2),
        {**DIVIDED, "down": row(1), "head": column(1)},
    ),
}


def adam():
    return keras.optimizers.Adam(1e-3, epsilon=1e-3)


def two_optimizers():
    """Returns momentum for attention and Adam for the other layers."""
    if not MULTI_OPTIMIZERS:
        pytest.skip("Keras 3.14 has no MultiOptimizer")
    attention, others = keras.optimizers.SGD(0.02, momentum=0.9), adam()
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(others, {"it/.*": attention})
    )


OPTIMIZERS = {
    "two optimizers": two_optimizers,
    "Adam": adam,
    "moving average": lambda: keras.optimizers.SGD(0.02, momentum=0.9, use_ema=True),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(adam(), dynamic_growth_steps=3),
}


def built(dropout=0.0, units=16):
    inputs = keras.Input((4, 8))
    x = layers.MultiHeadAttention(4, 4, dropout=dropout, name="it")(inputs, inputs)
    x = layers.Flatten(name="flat")(x)
    x = layers.Dense(units, activation="relu", name="up")(x)
    x = layers.Dropout(dropout, name="drop")(x)
    x = layers.Dense(8, name="down")(x)
    return keras.Model(inputs, layers.Dense(4, activation="softmax", name="head")(x))


def compiled(name, optimizer="Adam", model=None, **options):
    """Builds the same model under a layout, as in a restarted program."""
    keras.utils.set_random_seed(5)
    keras.utils.clear_session(free_memory=False)
    layout, plan = LAYOUTS[name]
    plain = built() if model is None else model()
    with kdist.create_strategy("one_device" if layout is None else layout).scope():
        model = kdist.Model.of(plain) if plan is None else split(plain, plan)
        loss = "sparse_categorical_crossentropy"
        model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"], **options)
    return model


class Interruption(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    comes_last = True

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == KILLED:
            raise Interruption


def fit(model, *callbacks):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(STEPS * BATCH, 4, 8)).astype("float32")
    y = generator.integers(0, 4, STEPS * BATCH)
    with contextlib.suppress(Interruption):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


@pytest.fixture(scope="module")
def whole():
    """Returns a function that trains with an optimizer on one device without interruption."""
    return functools.cache(lambda optimizer: fit(compiled("one device", optimizer)))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns a function that writes a checkpoint of an interrupted run under a layout."""

    @functools.cache
    def of(name, optimizer="Adam", **options):
        directory = tmp_path_factory.mktemp("checkpoints")
        # Runs before the interruption, by the order of callbacks.
        fit(compiled(name, optimizer, **options), Checkpoint(directory, every_steps=1), Interrupt())
        return CheckpointFiles(directory).newest()

    return of


def resumed(name, saved, directory, optimizer="Adam", **options):
    callback = Checkpoint(directory, resume=saved.path)
    model = fit(compiled(name, optimizer, **options), callback)
    assert callback.resumed_from == saved.step
    return model


def slots(model):
    """Returns the slots of the plain model."""
    return [array for name, array in capture(model).items() if name.startswith("optimizer/")]


PAIRS = [
    ("tensor=2", "one device"),
    ("one device", "sharded=4"),
    ("weights=2", "one device"),
    ("tensor=2", "sharded=2"),
]
MORE_PAIRS = [
    ("sharded=2", "weights=2"),
    ("one device", "pipeline and tensor"),
]
RARE_PAIRS = [
    ("weights=4", "weights=2"),
    ("data and tensor", "pipeline"),
    ("one device", "tensor=2"),
    ("tensor=2", "tensor=4"),
    ("sharded=2", "one device"),
    ("one device", "weights=4"),
    ("sharded=4", "sharded=2"),
    ("weights=2", "tensor=2"),
    ("pipeline", "one device"),
    ("mirrored", "tensor=4"),
    ("tensor=4", "data and tensor"),
    ("pipeline and tensor", "tensor=4"),
    ("data and tensor", "mirrored"),
    ("one device", "pipeline"),
    ("mirrored", "data and tensor"),
    ("pipeline", "tensor=2"),
    ("tensor=4", "tensor=2"),
    ("data and tensor", "one device"),
    ("pipeline and tensor", "one device"),
]


def ids(pair):
    return " to ".join(pair)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "pair",
    [
        *PAIRS,
        *(pytest.param(pair, marks=pytest.mark.slow) for pair in MORE_PAIRS),
        *seldom([(pair,) for pair in RARE_PAIRS]),
    ],
    ids=ids,
)
def test_resume_under_another_layout(pair, written, whole, tmp_path):
    before, after = pair
    saved = written(before)
    assert 0 < saved.step < STEPS
    model, expected = resumed(after, saved, tmp_path), whole("Adam")
    assert_same_weights(model.get_weights(), expected.get_weights(), TOLERANCE)
    assert_same_weights(slots(model), slots(expected), TOLERANCE)
    assert int(model.optimizer.iterations.numpy()) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "optimizer"),
    [
        (("sharded=2", "sharded=4"), "moving average"),
        *seldom(
            [
                (("tensor=2", "one device"), "two optimizers"),
                (("one device", "data and tensor"), "loss scale"),
                (("tensor=2", "one device"), "moving average"),
                (("sharded=2", "one device"), "loss scale"),
                (("weights=2", "mirrored"), "moving average"),
                (("tensor=2", "one device"), "loss scale"),
                (("one device", "data and tensor"), "moving average"),
                (("one device", "tensor=2"), "two optimizers"),
            ]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else ids(value),
)
def test_resume_restores_all_optimizer_state(pair, optimizer, written, whole, tmp_path):
    before, after = pair
    model = resumed(after, written(before, optimizer), tmp_path, optimizer)
    expected = whole(optimizer)
    assert_same_weights(model.get_weights(), expected.get_weights(), TOLERANCE)
    assert_same_weights(slots(model), slots(expected), TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "pair", [("data and tensor", "mirrored"), ("mirrored", "data and tensor")], ids=ids
)
def test_resume_between_averagings_of_local_sgd(pair, written, tmp_path):
    """Per-replica weights and slots, one step after the last averaging."""
    before, after = pair
    saved = written(before, local_steps=3)
    assert saved.step % 3
    model = resumed(after, saved, tmp_path, local_steps=3)
    expected = fit(compiled(after, local_steps=3))
    assert_same_weights(model.get_weights(), expected.get_weights(), TOLERANCE)
    kept = [capture(each)["optimizer/5"] for each in (model, expected)]
    assert largest_difference(kept[0][:1], kept[0][1:]) > 10 * TOLERANCE  # each replica has its own
    assert_same_weights(*kept, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["weights=2", *seldom(["sharded=2"])])
def test_a_sharded_run_resumes_bit_by_bit(layout, written, tmp_path):
    expected = fit(compiled(layout))
    model = resumed(layout, written(layout), tmp_path)
    assert_same_weights(model.get_weights(), expected.get_weights(), 0)
    assert_same_weights(slots(model), slots(expected), 0)


def test_slots_count(written, whole, tmp_path):
    """Without slots, weights differ far more than the tolerance of the tests above."""

    class Forgetting(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            for slot in self.model.optimizer.variables[2:]:
                slot.assign(np.zeros(slot.shape, slot.dtype))

    checkpoint = Checkpoint(tmp_path, resume=written("tensor=2").path)
    model = fit(compiled("tensor=2"), checkpoint, Forgetting())
    assert checkpoint.resumed_from
    difference = largest_difference(model.get_weights(), whole("Adam").get_weights())
    assert difference > 100 * TOLERANCE


@pytest.mark.slow
def test_divided_variables_stay_on_their_devices(written, tmp_path):
    model = resumed("tensor=2", written("one device"), tmp_path)
    parts = [each for each in model.trainable_variables if each.path.startswith("up/shard_")]
    assert [each.value.values[0].device[-5:] for each in parts] == 2 * ["CPU:0"] + 2 * ["CPU:1"]
    slots = [each for each in model.optimizer.variables if "_up_shard_" in f"_{each.name}"]
    assert len(slots) == 2 * len(parts)
    assert {each.value.values[0].device[-5:] for each in slots if "shard_1" in each.name} == {
        "CPU:1"
    }


@pytest.mark.parametrize("name", ["tensor=2", "pipeline and tensor"])
def test_arrays_are_those_of_the_plain_model(name):
    """Compares names, shapes, and dtypes, including random number generators."""
    of = functools.partial(compiled, model=lambda: built(dropout=0.1))
    models = [of("one device"), of(name)]
    for model in models:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    plain, divided = ([(n, a.shape, a.dtype) for n, a in capture(m).items()] for m in models)
    assert divided == plain
    assert [shape for _, shape, kind in plain if kind == np.int64 and shape] == 2 * [(2,)]


@pytest.mark.slow
def test_random_numbers_continue_under_the_same_layout(written, tmp_path):
    of = functools.partial(compiled, "tensor=2", model=lambda: built(dropout=0.2))
    expected = fit(of())
    fit(of(), Checkpoint(tmp_path, every_steps=1), Interrupt())
    model = fit(of(), Checkpoint(tmp_path))
    assert_same_weights(model.get_weights(), expected.get_weights(), 0)
    generators = [
        part._dropout_layer.seed_generator.state.numpy()
        for part in model.get_layer("it").shards.parts
    ]
    seeds, counts = zip(*generators, strict=True)
    assert len(set(seeds)) == 2
    assert len(set(counts)) == 1


@pytest.mark.parametrize(
    ("optimizer", "units", "expected"),
    [
        ("Adam", 32, r"up/kernel is float32 \(32, 32\), but float32 \(32, 16\)"),
        ("moving average", 16, "model or optimizer: .*/it_query_bias_average is float32"),
        ("loss scale", 16, "of another model, optimizer, or metrics"),
    ],
)
def test_checkpoint_of_another_model_is_rejected(optimizer, units, expected, written, tmp_path):
    model = compiled("tensor=2", optimizer, model=lambda: built(units=units))
    with pytest.raises(CheckpointError, match=expected):
        fit(model, Checkpoint(tmp_path, resume=written("tensor=2").path))


def test_rejected_arrays_change_nothing():
    model = fit(compiled("tensor=2"))
    weights, arrays = model.get_weights(), capture(model)
    arrays["weights/0"] = arrays["weights/0"][:1]
    with pytest.raises(CheckpointError):
        restore(model, arrays)
    assert_same_weights(model.get_weights(), weights, 0)


def towers():
    """Returns two nested models with equal layer names, and hence equal variable paths."""
    inputs = keras.Input((8,))

    def tower(name):
        inner = keras.Input((8,))
        x = layers.Dense(8, activation="relu", name="up")(inner)
        return keras.Model(inner, layers.Dense(8, name="down")(x), name=name)

    x = layers.Add(name="add")([tower("a")(inputs), tower("b")(inputs)])
    return keras.Model(inputs, layers.Dense(4, activation="softmax", name="head")(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        {"[ab]/up": column(), "[ab]/down": row()},
        *seldom([{"head": column()}, {"b/up": column()}]),
    ],
    ids=["both towers", "the head", "one tower"],
)
def test_layers_of_equal_names(plan, tmp_path):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(4 * BATCH, 8)), generator.integers(0, 4, 4 * BATCH)

    def trained(model):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return model.get_weights()

    keras.utils.set_random_seed(5)
    plain = towers()
    with kdist.create_strategy(kdist.Layout(tensor=2)).scope():
        model = split(plain, plan)
        model.compile(adam(), "sparse_categorical_crossentropy")
    trained(model)
    model.save(tmp_path / "model.keras")
    arrays = capture(model)
    other = kdist.Model.of(towers())
    other.compile(adam(), "sparse_categorical_crossentropy")
    other.optimizer.build(other.trainable_variables)
    assert len(arrays) == len(capture(other))
    restore(other, arrays)
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert int(opened.optimizer.iterations) == 4
    expected = trained(model)
    assert_same_weights(trained(other), expected, TOLERANCE)
    assert_same_weights(trained(opened), expected, TOLERANCE)
