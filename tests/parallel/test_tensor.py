"""Divided weights train like whole ones, and files hold the plain model."""

import collections
import functools
import re

import keras
import numpy as np
import pytest

import kdist
from kdist.checkpoint.snapshot import capture, restore
from kdist.compat.keras import MULTI_OPTIMIZERS, get_keras_mask
from kdist.parallel import column, device, heads, row, split, stage
from kdist.parallel.inspect.operation_devices import devices_of, operations_that_run
from kdist.testing import assert_same_weights
from tests.parallel.in_place import assert_in_place
from tests.tiers import seldom

layers = keras.layers

STEPS, BATCH = 10, 16

TENSOR_2 = kdist.Layout(tensor=2)
TENSOR_4 = kdist.Layout(tensor=4)
HYBRID = kdist.Layout(data=2, tensor=2)
STAGES = kdist.Layout(pipeline=2, tensor=2)


def adamw():
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=5.0, epsilon=1e-3)
    optimizer.exclude_from_weight_decay(var_names=["up/kernel", "norm"])
    return optimizer


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.02),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-3),
    "adamw": adamw,
}


def mlp(**arguments):
    """Columns, then rows, with an activation and a dropout layer between; gathered columns."""
    inputs = keras.Input((12,))
    x = layers.Dense(16, name="up", **arguments)(inputs)
    x = layers.Activation("gelu", name="gelu")(x)
    x = layers.Dropout(0.0, name="drop")(x)
    x = layers.Dense(8, name="down")(x)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(8, activation="softmax", name="head")(x))


def cnn():
    """Gathered filters, BatchNormalization; then filters, pooling and input channels."""
    inputs = keras.Input((8, 8, 4))
    x = layers.Conv2D(8, 3, name="first")(inputs)
    x = layers.BatchNormalization(name="norm", synchronized=True)(x)
    x = layers.Conv2D(8, 3, padding="same", activation="relu", name="up")(x)
    x = layers.MaxPooling2D(name="pool")(x)
    x = layers.Conv2D(8, 1, activation="relu", name="down")(x)
    x = layers.Flatten(name="flat")(x)
    return keras.Model(inputs, layers.Dense(4, activation="softmax", name="head")(x))


def transformer():
    return kdist.models.transformer(
        (6,), 3, vocabulary_size=20, width=16, heads=4, depth=1, dropout=0.0
    )


MODELS = {
    "mlp": (mlp, (12,), {"up|head": column(), "down": row()}, {"down": row(1), "norm": stage(1)}),
    "cnn": (
        cnn,
        (8, 8, 4),
        {"first|up": column(), "down|head": row()},
        {"down": row(1), "head": row(1)},
    ),
    "transformer": (
        transformer,
        (6,),
        {
            "token_embedding": row(),
            "position_embedding": column(),
            ".*_attention": heads(),
            ".*_up": column(),
            ".*_down": row(),
        },
        {".*_up": column(1), "block1_ffn_norm": stage(1)},
    ),
}


def placement_of(name, layout):
    """Returns the placement of a model; with stages, some layers are on the second one."""
    _, _, placement, later = MODELS[name]
    if layout.pipeline == 1:
        return placement
    kept = {}
    for pattern, where in placement.items():
        left = "|".join(part for part in pattern.split("|") if part not in later)
        if left:
            kept[left] = where
    return {**kept, **later}


def examples(shape, classes=3, rows=STEPS * BATCH):
    generator = np.random.default_rng(0)
    y = generator.integers(0, classes, rows)
    if len(shape) == 1 and shape[0] == 6:
        return generator.integers(0, 20, (rows, *shape)), y
    return generator.normal(size=(rows, *shape)).astype("float32"), y


def compiled(model, optimizer="sgd", **arguments):
    make = OPTIMIZERS.get(optimizer, optimizer)
    model.compile(make(), "sparse_categorical_crossentropy", **arguments)
    return model


def split_in(layout, model, placement, optimizer="sgd"):
    with kdist.create_strategy(layout).scope():
        return compiled(split(model, placement), optimizer)


def trained(model, shape, rows=STEPS * BATCH):
    x, y = examples(shape, rows=rows)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


# Equality and placement.

CASES = [
    ("mlp", TENSOR_4, "adam"),
    ("mlp", STAGES, "adamw"),
    ("cnn", HYBRID, "momentum"),
    ("transformer", TENSOR_2, "momentum"),
    ("transformer", HYBRID, "sgd"),
]
MORE_CASES = [
    ("mlp", TENSOR_4, "sgd"),
    ("mlp", HYBRID, "momentum"),
    ("cnn", TENSOR_4, "adam"),
    ("transformer", TENSOR_4, "adam"),
    ("transformer", STAGES, "sgd"),
]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("name", "layout", "optimizer"), [*CASES, *seldom(MORE_CASES)], ids=str)
def test_weights_are_those_of_one_device_and_everything_is_in_its_place(name, layout, optimizer):
    build, shape, *_ = MODELS[name]
    plain = build()
    model = split_in(layout, plain, placement_of(name, layout), optimizer)
    assert_same_weights(model.get_weights(), plain.get_weights(), 0)
    before = plain.get_weights()
    trained(compiled(plain, optimizer), shape)
    with operations_that_run() as operations:
        trained(model, shape)
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-5)
    assert max(np.abs(a - b).max() for a, b in zip(before, plain.get_weights(), strict=True)) > 1e-3
    assert_in_place(model, operations)
    if (layout, optimizer) == (TENSOR_4, "adam"):
        assert_takes_its_share(model, plain)


@pytest.mark.parametrize("name", MODELS)
def test_columns_are_joined_only_for_what_needs_them_whole(name):
    build, shape, placement, _ = MODELS[name]
    model = split_in(TENSOR_2, build(), placement)
    with operations_that_run() as operations:
        model.predict(examples(shape)[0][:BATCH], verbose=0)
    joining = {
        re.sub(r"_\d+$", "", operation.name.split("/")[-2])
        for operation in operations
        if operation.type.startswith("Concat") and "/shard_" not in operation.name
    }
    joined = {"mlp": {"head"}, "cnn": {"first"}, "transformer": {"position_embedding"}}
    assert joining & set(model.places) == joined[name]


def assert_takes_its_share(model, plain):
    """Each of four devices holds at most 0.30 of the bytes of divided weights and slots."""
    on: collections.Counter = collections.Counter()
    for variable in (*model.variables, *model.optimizer.variables):
        if is_divided(model, variable.path):
            (where,) = devices_of(model.distribute_strategy, variable)
            on[where] += bytes_of(variable)
    whole = sum(
        bytes_of(variable)
        for variable in (*plain.variables, *plain.optimizer.variables)
        if is_divided(model, variable.path)
    )
    assert sum(on.values()) == whole
    assert len(on) == 4
    assert max(on.values()) <= 0.30 * whole, (on, whole)


def is_divided(model, path):
    """Returns whether a variable or a slot belongs to a divided layer."""
    names = "|".join(model.divisions)
    ends = "/|_(shard|kernel|bias|embed|query|key|value|attention_output)"
    return bool(re.match(rf"(adam\w*/)?({names})({ends})", path))


def bytes_of(variable):
    return variable.value.shape.num_elements() * variable.value.dtype.size


# What layers are given.


def dense(inputs=(12,), **arguments):
    x = keras.Input(inputs)
    y = layers.Dense(8, name="it", **arguments)(x)
    return keras.Model(x, layers.Dense(3, activation="softmax", name="head")(y))


DENSE = {
    "no_bias": ({"use_bias": False}, row()),
    "activated": ({"activation": "tanh"}, row()),
    "penalized": ({"kernel_regularizer": "l1l2", "bias_regularizer": "l2"}, column()),
    "active": ({"activity_regularizer": "l2"}, column()),
    "positive": ({"kernel_constraint": "non_neg", "use_bias": False}, row()),
    "bounded": ({"bias_constraint": "max_norm"}, row()),
    "frozen": ({"trainable": False}, column()),
    "softmax": ({"activation": "softmax"}, column()),
}


def dense_of_all_kinds():
    x = inputs = keras.Input((12,))
    for name, (arguments, _) in DENSE.items():
        x = layers.Dense(8, name=name, **arguments)(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(x))


def convolution(rank, **arguments):
    x = keras.Input((*[6] * rank, 4))
    kind = getattr(layers, f"Conv{rank}D")
    y = kind(8, 3, name="it", **arguments)(x)
    return keras.Model(x, layers.Dense(3, activation="softmax", name="head")(layers.Flatten()(y)))


def embedding(**arguments):
    x = keras.Input((6,), dtype="int32")
    y = layers.Embedding(20, 8, name="it", **arguments)(x)
    y = layers.GlobalAveragePooling1D(name="pool")(y)
    return keras.Model(x, layers.Dense(3, activation="softmax", name="head")(y))


def attention(scores=False, causal=False, mask_zero=False, **arguments):
    x = keras.Input((6,), dtype="int32")
    y = layers.Embedding(20, 8, mask_zero=mask_zero, name="embedding")(x)
    y = layers.MultiHeadAttention(4, 3, name="it", **arguments)(
        y, y, return_attention_scores=scores, use_causal_mask=causal
    )
    if scores:
        y = layers.Concatenate(name="both")([layers.Flatten()(y[0]), layers.Flatten()(y[1])])
    else:
        y = layers.GlobalAveragePooling1D(name="pool")(y)
    return keras.Model(x, layers.Dense(3, activation="softmax", name="head")(y))


GIVEN = {
    "Dense": (dense_of_all_kinds, {name: how for name, (_, how) in DENSE.items()}),
    "Conv1D by column": (functools.partial(convolution, 1, strides=2), {"it": column()}),
    "Conv2D by row": (functools.partial(convolution, 2, padding="same", strides=2), {"it": row()}),
    "masked tokens, by row": (functools.partial(embedding, mask_zero=True), {"it": row()}),
    "masked tokens, by column": (
        functools.partial(embedding, mask_zero=True, embeddings_regularizer="l2"),
        {"it": column()},
    ),
    "causal attention": (functools.partial(attention, causal=True, value_dim=5), {"it": heads()}),
    "masked attention": (
        functools.partial(attention, mask_zero=True, use_bias=False),
        {"it": heads()},
    ),
    "gate and scores": (functools.partial(attention, use_gate=True, scores=True), {"it": heads()}),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("build", "placement"), GIVEN.values(), ids=GIVEN)
def test_what_a_layer_is_given_counts(build, placement):
    plain = build()
    model = split_in(TENSOR_2, plain, placement, "adam")
    compiled(plain, "adam")
    shape = plain.input_shape[1:]
    assert_trains_alike(model, plain, shape)
    trainable = [bool(each.trainable_variables) for each in plain.layers]
    assert [bool(each.trainable_variables) for each in model.layers] == trainable


def test_heads_leave_the_masks_that_the_plain_layer_leaves():
    """It detaches those of its inputs, so that a sum with them, and its loss, are not masked."""
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(tokens)
    y = layers.MultiHeadAttention(4, 3, name="it")(x, x)
    plain = keras.Model(tokens, [x, y, layers.Add()([x, y])])
    model = split_in(TENSOR_2, plain, {"it": heads()})
    masked = [
        [get_keras_mask(output) is not None for output in each(np.array([[3, 0, 0, 0, 0, 0]]))]
        for each in (plain, model)
    ]
    assert masked == [[False, True, False]] * 2


def test_models_that_extract_features():
    """Keras's recipe with layers whose output stays divided; the next one has its input by name."""
    inputs = keras.Input((12,))
    x = layers.ReLU(name="relu")(layers.Dense(8, name="up")(inputs))
    x = layers.Dense(8, name="down")(inputs=x)
    plain = keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(x))
    model = split_in(TENSOR_2, plain, {"up": column(), "down": row()})
    compiled(plain)
    x = examples((12,))[0][:BATCH]
    for name in ("up", "relu", "down"):
        features = [keras.Model(m.inputs, m.get_layer(name).output)(x) for m in (plain, model)]
        np.testing.assert_allclose(*features, atol=1e-6)
    assert_trains_alike(model, plain, (12,))


def test_penalties_are_computed_where_the_weights_are():
    plain = dense(kernel_regularizer="l1")
    model = split_in(TENSOR_2, plain, {"it": column()})
    with operations_that_run() as operations:
        assert_trains_alike(model, compiled(plain), (12,))
    on = {o.device for o in operations if o.type == "Abs" and not o.is_backward}
    assert on == {"CPU:0", "CPU:1"}


def assert_trains_alike(model, plain, shape, tolerance=1e-5):
    x = examples(shape)[0][:BATCH]
    for each in (plain, model):
        trained(each, shape, 3 * BATCH)
    assert_same_weights(model.get_weights(), plain.get_weights(), tolerance)
    outputs = [np.asarray(each(x, training=False), "float32") for each in (model, plain)]
    np.testing.assert_allclose(*outputs, atol=2 * tolerance)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    try:
        plain = mlp()
        model = split_in(TENSOR_2, plain, placement_of("mlp", TENSOR_2))
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.get_layer("up").compute_dtype == policy.removeprefix("mixed_")
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    assert_trains_alike(model, compiled(plain), (12,), 5e-3)


def test_parts_drop_different_features():
    inputs = keras.Input((8,))
    x = layers.Dense(64, use_bias=False, kernel_initializer="ones", name="up")(inputs)
    x = layers.Dropout(0.5, seed=3, name="drop")(x)
    down = layers.Dense(64, use_bias=False, kernel_initializer="identity", name="down")
    model = split_in(TENSOR_2, keras.Model(inputs, down(x)), {"up": column(), "down": row()})
    outputs = np.asarray(model(np.ones((4, 8), "float32"), training=True))
    dropped = outputs == 0
    assert 0.3 < dropped.mean() < 0.7
    assert (dropped[:, :32] != dropped[:, 32:]).any()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (TENSOR_4, {"global_clipnorm": 0.05}),
        (HYBRID, {"global_clipnorm": 0.05}),
        (TENSOR_2, {"clipvalue": 0.01}),
    ],
    ids=str,
)
def test_clipping(layout, options):
    plain = mlp()
    optimizer = functools.partial(
        keras.optimizers.SGD, 0.1, momentum=0.9, weight_decay=0.01, **options
    )
    model = split_in(layout, plain, placement_of("mlp", layout), optimizer)
    assert_trains_alike(model, compiled(plain, optimizer), (12,))


@pytest.mark.slow
def test_layers_that_are_nested_or_called_twice():
    inner = keras.Input((8,))
    block = keras.Model(inner, layers.Dense(8, name="up", activation="relu")(inner), name="block")
    shared = layers.Dense(8, name="shared")
    inputs = keras.Input((12,))
    x = layers.Dense(8, name="first")(inputs)
    x = shared(block(shared(x)))
    plain = keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(x))
    placement = {"first|shared": column(), "block/up": column(), "head": row()}
    model = split_in(TENSOR_2, plain, placement, "adam")
    assert_trains_alike(model, compiled(plain, "adam"), (12,))
    assert model.get_layer("block").get_layer("up").get_weights()[0].shape == (8, 8)


# Files.


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_that_of_the_plain_model(name, tmp_path):
    build, shape, placement, _ = MODELS[name]
    plain = build()
    model = trained(split_in(TENSOR_4, plain, placement, "adam"), shape, 2 * BATCH)
    model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert [type(layer) for layer in opened.layers] == [type(layer) for layer in plain.layers]
    for one, other in zip(opened.layers[1:], plain.layers[1:], strict=True):
        assert one.get_config() == other.get_config()
    assert_same_weights(opened.get_weights(), model.get_weights(), 0)
    x = examples(shape)[0][:BATCH]
    np.testing.assert_allclose(opened(x), model(x), atol=1e-5)
    model.save_weights(tmp_path / "split.weights.h5")
    plain.load_weights(tmp_path / "split.weights.h5")
    assert_same_weights(plain.get_weights(), model.get_weights(), 0)
    other = build()
    other.save_weights(tmp_path / "plain.weights.h5")
    model.load_weights(tmp_path / "plain.weights.h5")
    assert_same_weights(model.get_weights(), other.get_weights(), 0)
    model.load_weights(tmp_path / "model.keras")
    assert_same_weights(model.get_weights(), opened.get_weights(), 0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "make",
    [
        keras.optimizers.Adam,
        functools.partial(keras.optimizers.RMSprop, momentum=0.9, centered=True, use_ema=True),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    ],
    ids=["Adam", "RMSprop", "loss scale"],
)
def test_a_file_holds_the_slots_of_the_plain_model(make, tmp_path, recwarn):
    plain = mlp()
    model = split_in(TENSOR_2, plain, placement_of("mlp", TENSOR_2), make)
    for each in (compiled(plain, make), model):
        trained(each, (12,), 2 * BATCH)
    model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert not [each for each in recwarn if "Skipping" in str(each.message)]
    slots = [[slot.numpy() for slot in each.optimizer.variables] for each in (opened, plain)]
    assert_same_weights(*slots, 1e-5)
    assert len(slots[0]) < len(model.optimizer.variables)
    divided = [slot.numpy() for slot in model.optimizer.variables]
    trained(model, (12,), BATCH)
    model.load_weights(tmp_path / "model.keras")
    assert_same_weights([slot.numpy() for slot in model.optimizer.variables], divided, 0)


def test_weights_of_another_model_are_refused():
    model = split_in(TENSOR_2, mlp(), placement_of("mlp", TENSOR_2))
    weights = model.get_weights()
    with pytest.raises(ValueError, match="has 8 weights, and 7 were given"):
        model.set_weights(weights[1:])
    with pytest.raises(ValueError, match=r"a variable of shape \(12, 16\)"):
        model.set_weights([weights[0][:6], *weights[1:]])


@pytest.mark.slow
def test_a_checkpoint_resumes_under_the_same_layout():
    make = functools.partial(
        split_in, HYBRID, placement=placement_of("mlp", HYBRID), optimizer="adam"
    )
    model = trained(make(mlp()), (12,), 2 * BATCH)
    arrays = capture(model)
    resumed = trained(make(mlp()), (12,), BATCH)
    restore(resumed, arrays)
    assert_same_weights(resumed.get_weights(), model.get_weights(), 0)
    for each in (model, resumed):
        trained(each, (12,), 2 * BATCH)
    assert_same_weights(resumed.get_weights(), model.get_weights(), 0)
    paths = [variable.path for variable in (*model.variables, *model.optimizer.variables)]
    assert len(paths) == len(set(paths))


# What is refused.


@pytest.mark.parametrize(
    ("build", "how", "error", "message"),
    [
        (mlp, {"norm": column()}, TypeError, "LayerNormalization, which cannot be divided"),
        (mlp, {"up": heads()}, TypeError, "'up' is a Dense. Place it with column.. or row"),
        (attention, {"it": column()}, TypeError, "Place it with heads"),
        (embedding, {"head": column()}, ValueError, "'head' has 3 units, which tensor=2 does not"),
        (
            lambda: dense((11,)),
            {"it": row()},
            ValueError,
            "'it' has 11 input features, which tensor=2 does not divide",
        ),
        (
            lambda: dense(kernel_constraint="max_norm"),
            {"it": column()},
            ValueError,
            "kernel_constraint=MaxNorm",
        ),
        (
            lambda: dense(kernel_regularizer=keras.regularizers.OrthogonalRegularizer()),
            {"it": column()},
            ValueError,
            "kernel_regularizer=OrthogonalRegularizer, which is not known to be a sum",
        ),
        (
            lambda: attention(kernel_constraint="unit_norm"),
            {"it": heads()},
            ValueError,
            "kernel_constraint=UnitNorm",
        ),
        (
            lambda: attention(activity_regularizer="l2"),
            {"it": heads()},
            ValueError,
            "activity_regularizer, which needs the sum over all heads",
        ),
        (lambda: convolution(2, groups=2), {"it": column()}, ValueError, "groups=2, which tie"),
        (mlp, {"up": stage(0)}, ValueError, "the placement divides none"),
        (mlp, {"up": column(2)}, ValueError, "is placed on stage 2, and tensor=2 has 1"),
        (mlp, {"up": "column"}, TypeError, "kdist.parallel.stage"),
    ],
)
def test_what_cannot_be_divided(build, how, error, message):
    with kdist.create_strategy(TENSOR_2).scope(), pytest.raises(error, match=message):
        split(build(), how)


def test_a_layout_that_divides_nothing():
    message = "down, up: cannot be divided, because branch=2 has tensor=1"
    strategy = kdist.create_strategy(kdist.Layout(branch=2))
    with strategy.scope(), pytest.raises(ValueError, match=message):
        split(mlp(), {"up": column(), "down": row(), "norm": device(1)})


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (keras.optimizers.Adafactor(), "Adafactor could act differently: it factors"),
        (keras.optimizers.Lamb(), "Lamb could act differently: its trust ratio"),
        (keras.optimizers.Muon(), "Muon could act differently: it orthogonalizes"),
        (keras.optimizers.SGD(clipnorm=1.0), "clipnorm=1.0 would clip each part by its own norm"),
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb()),
            "Lamb could act differently",
        ),
        *(
            (each(lambda variable: keras.optimizers.Lamb()), "keras.optimizers.OptimizerMap")
            for each in MULTI_OPTIMIZERS
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_optimizers_that_look_at_whole_weights(optimizer, message):
    with kdist.create_strategy(TENSOR_2).scope():
        model = split(mlp(), placement_of("mlp", TENSOR_2))
        with pytest.raises(ValueError, match=message):
            model.compile(optimizer, "mse")


class Centralized(keras.optimizers.SGD):
    """An optimizer that subtracts the mean of each gradient."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient - keras.ops.mean(gradient), variable, learning_rate)


class Inimitable(keras.optimizers.SGD):
    """An optimizer whose configuration lacks an argument."""

    def __init__(self, factor):
        super().__init__(factor * 0.1)

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)


def test_an_update_of_ones_own_that_needs_whole_weights():
    with kdist.create_strategy(TENSOR_2).scope():
        model = split(mlp(), placement_of("mlp", TENSOR_2))
        with pytest.raises(ValueError, match="update_step of Centralized"):
            model.compile(Centralized(0.1), "mse")
        with pytest.warns(UserWarning, match="update_step of Inimitable"):
            model.compile(Inimitable(0.1), "mse")
