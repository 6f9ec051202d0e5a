"""Suggested divisions: the largest weights, in pairs without a gather."""

import re

import keras
import numpy as np
import pytest

import kdist
from kdist import Layout
from kdist.parallel import column, heads, resolve_placement, row, split, stage, suggest
from kdist.parallel.inspect.operation_devices import groups_of, operations_that_run, profile_devices
from kdist.parallel.search.costs import LINK_BYTES_PER_SECOND, ModelWork
from kdist.parallel.search.divide import choose_divisions
from kdist.testing import assert_same_weights
from tests.tiers import seldom

layers = keras.layers

STEPS, BATCH, TOKENS, VOCABULARY = 10, 16, 6, 400


def transformer(depth=1):
    return kdist.models.transformer(
        (TOKENS,), 3, vocabulary_size=VOCABULARY, width=16, heads=4, depth=depth, dropout=0.0
    )


def gated():
    """Two columns whose product feeds the rows, as in gated feed-forward parts; then a pair."""
    inputs = keras.Input((16,))
    gate = layers.Dense(64, activation="silu", name="gate")(inputs)
    up = layers.Dense(64, name="up")(inputs)
    x = layers.Multiply(name="product")([gate, up])
    x = layers.Dropout(0.0, name="drop")(x)
    x = layers.LayerNormalization(name="norm")(layers.Dense(64, name="down")(x))
    x = layers.Dense(64, activation="relu", name="first")(x)
    x = layers.Dense(64, activation="relu", name="second")(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(x))


def cnn():
    """A pair of convolutions with pooling between; another between normalizations."""
    inputs = keras.Input((8, 8, 16))
    x = layers.Conv2D(32, 3, padding="same", activation="relu", name="up")(inputs)
    x = layers.MaxPooling2D(name="pool")(x)
    x = layers.Conv2D(32, 3, padding="same", name="down")(x)
    x = layers.LayerNormalization(name="norm1")(x)
    x = layers.Conv2D(64, 3, padding="same", name="alone")(x)
    x = layers.LayerNormalization(name="norm2")(x)
    x = layers.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(x))


def nested():
    inner_input = keras.Input((16,))
    x = layers.Dense(64, activation="gelu", name="up")(inner_input)
    block = keras.Model(inner_input, layers.Dense(16, name="down")(x), name="block")
    inputs = keras.Input((16,))
    x = layers.LayerNormalization(name="norm")(block(inputs))
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(x))


# Model -> (builder, divisions of its layers over four devices, gathered layers).
MODELS = {
    "transformer": (
        transformer,
        {
            "token_embedding": column(),
            "block1_attention": heads(),
            "block1_ffn_up": column(),
            "block1_ffn_down": row(),
        },
        {"token_embedding"},
    ),
    "gated": (
        gated,
        {
            **{name: column() for name in ("gate", "up", "first")},
            **{name: row() for name in ("down", "second")},
        },
        set(),
    ),
    "cnn": (cnn, {"up": column(), "down": row(), "alone": column()}, {"alone"}),
    "nested": (nested, {"block/up": column(), "block/down": row()}, set()),
}


def examples(model, rows=STEPS * BATCH):
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, rows)
    shape = model.input_shape[1:]
    if len(shape) == 1 and shape[0] == TOKENS:
        return generator.integers(0, VOCABULARY, (rows, *shape)), y
    return generator.normal(size=(rows, *shape)).astype("float32"), y


def split_as_suggested(plain, layout):
    with kdist.create_strategy(layout).scope():
        model = split(plain, suggest(plain, layout))
        return compiled(model)


def compiled(model):
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-3), "sparse_categorical_crossentropy")
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_largest_layers_are_divided_in_pairs(name):
    build, expected, gathered = MODELS[name]
    placement = suggest(build(), Layout(tensor=4))
    assert placement == {re.escape(pattern): how for pattern, how in expected.items()}
    assert set(placement.gathered) == gathered


@pytest.mark.parametrize("name", MODELS)
def test_what_is_gathered_is_what_the_placement_says(name):
    build, _, gathered = MODELS[name]
    plain = build()
    model = split_as_suggested(plain, Layout(tensor=4))
    with operations_that_run() as operations:
        model.predict(examples(plain, BATCH)[0], verbose=0)
    joining = {
        re.sub(r"_\d+$", "", operation.name.split("/")[-2])
        for operation in operations
        if operation.type.startswith("Concat") and "/shard_" not in operation.name
    }
    names = {path.rpartition("/")[2] for path in model.places}
    assert joining & names == gathered


SLOW = pytest.mark.slow
CASES = [
    pytest.param("transformer", "pipeline=2,tensor=2,micro_batches=2", marks=SLOW),
    ("gated", "pipeline=2,tensor=2"),
    pytest.param("cnn", "tensor=4", marks=SLOW),
    ("nested", "pipeline=2,tensor=2"),
    *seldom([("transformer", "tensor=4"), ("transformer", "data=2,tensor=2")]),
]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_weights_are_those_of_one_device_and_each_part_is_in_its_place(name, layout):
    layout = Layout.parse(layout)
    plain = MODELS[name][0]()
    model = split_as_suggested(plain, layout)
    x, y = examples(plain)
    compiled(plain).fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    with operations_that_run() as operations:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-5)
    groups = groups_of(model.distribute_strategy)
    looked_at = set()
    for operation in operations:
        found = re.search(r"([^/]+?)(?:_\d+)?/shard_(\d)(_\d+)?/", operation.name)
        if found and re.search("MatMul|Conv2D|Einsum", operation.type):
            (path,) = (path for path in model.divisions if path.rpartition("/")[2] == found[1])
            place = model.places[path] + int(found[2])
            group = groups["replica_1" in operation.name]
            assert operation.device == group[place], operation
            looked_at.add((path, operation.device, operation.is_backward))
    kernels = [path for path in model.divisions if "embedding" not in path]
    assert len(looked_at) == len(kernels) * layout.tensor * layout.data * 2


def is_divided(where):
    return type(where).__name__ == "Division"


@pytest.mark.slow
def test_each_of_four_devices_holds_its_share():
    """At most 0.30 of the divided weights; 0.32 of all, as the first device has whole ones."""
    plain = transformer()
    model = split_as_suggested(plain, Layout(tensor=4))
    whole = sum(variable.value.shape.num_elements() * 4 for variable in plain.trainable_variables)
    rows = profile_devices(model, *examples(plain, BATCH))
    assert max(row.weight_bytes for row in rows) <= 0.32 * whole
    assert max(row.slot_bytes for row in rows) <= 0.32 * 2 * whole
    # The others have nothing but their parts.
    divided = 4 * sum(plain.get_layer(name).count_params() for name, how in model.divisions.items())
    assert max(row.weight_bytes for row in rows[1:]) <= 0.30 * divided
    # The computed bytes match: weights, gradients and two slots on the first device.
    counted = sum(
        piece.state_bytes for piece in ModelWork(plain).operation_costs(choose_divisions(plain, 4))
    )
    assert rows[0].weight_bytes == pytest.approx(counted / 4, rel=1e-3)
    assert rows[0].slot_bytes == pytest.approx(counted / 2, rel=1e-3)


def test_activations_are_kept_in_parts_where_they_stay_divided():
    model = transformer()
    divided = ModelWork(model).operation_costs(choose_divisions(model, 4))
    for whole, first in zip(ModelWork(model).operation_costs(), divided, strict=True):
        in_parts = whole.name in ("block1_attention", "block1_ffn_up")
        assert first.kept_bytes == whole.kept_bytes / (4 if in_parts else 1), whole.name


def test_a_divided_layer_computes_its_part_and_its_devices_meet():
    """Numbers per token: 16 features, 64 in the feed-forward part. Six tokens."""
    model = transformer()
    whole = {piece.name: piece.seconds for piece in ModelWork(model).operation_costs()}
    pieces = ModelWork(model).operation_costs(choose_divisions(model, 4))
    numbers_sent = {
        "block1_attention": 3 * (16 + 16),  # to three others, and their sums back
        "block1_ffn_up": 3 * 16,  # its output stays divided
        "block1_ffn_down": 3 * 16,
        "token_embedding": 3 * (1 + 16 / 4),  # the token id; three parts are gathered
    }
    for piece in pieces:
        seconds = whole[piece.name]
        if piece.name in numbers_sent:
            sent = 4 * TOKENS * numbers_sent[piece.name]
            seconds = seconds / 4 + 2 * sent / LINK_BYTES_PER_SECOND
        assert piece.seconds == pytest.approx(seconds, rel=1e-9), piece.name


def test_small_layers_stay_whole():
    placement = suggest(transformer(), Layout(tensor=2))
    assert "position_embedding" not in placement
    assert "logits" not in placement


def test_what_does_not_divide_stays_whole():
    inputs = keras.Input((30,))
    x = layers.Dense(27, name="odd")(inputs)
    x = layers.LayerNormalization(name="norm")(x)
    model = keras.Model(inputs, layers.Dense(16, name="even")(x))
    assert suggest(model, Layout(tensor=4)) == {"even": column()}
    with pytest.raises(ValueError, match="no layer whose weights tensor=7 could divide"):
        suggest(model, Layout(tensor=7))


def test_stages_are_balanced_and_layers_are_divided_within_them():
    model = transformer(depth=2)
    placement = suggest(model, Layout(pipeline=2, tensor=2))
    pieces = ModelWork(model).operation_costs(choose_divisions(model, 2))
    seconds = [0.0, 0.0]
    for piece in pieces:
        where = placement[re.escape(piece.name)]
        seconds[where.stage if is_divided(where) else where.number] += piece.seconds
    assert max(seconds) <= 0.6 * sum(seconds)
    for number in (1, 2):
        up, down = placement[f"block{number}_ffn_up"], placement[f"block{number}_ffn_down"]
        assert (up.how, down.how) == ("column", "row")
        assert up.stage == down.stage
    assert {where.stage for where in placement.values() if is_divided(where)} == {0, 1}
    assert placement["token_embedding"] == column(0)
    assert placement["logits"] == stage(1)


def test_a_column_whose_rows_are_on_the_next_stage_is_gathered():
    model = gated()
    names = [piece.name for piece in ModelWork(model).operation_costs()]
    stages = {name: int(names.index(name) > names.index("drop")) for name in names}
    divisions = choose_divisions(model, 4, stages)
    assert {"gate", "up"} <= set(divisions.gathered)
    assert divisions.how["second"] == "row"
    assert "first" not in divisions.gathered


def test_two_layers_on_two_stages_are_no_pair():
    """Each is then divided separately such that no gather follows."""
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(64, name="d0"), layers.Dense(64, name="d1")]
    )
    assert suggest(model, Layout(tensor=2)) == {"d0": column(), "d1": row()}
    placement = suggest(model, Layout(pipeline=2, tensor=2))
    assert placement == {"d0": row(0), "d1": row(1)}
    assert placement.gathered == ()


def test_programs_divide_weights_by_themselves():
    layout, plain = Layout(tensor=2), gated()
    with kdist.create_strategy(layout).scope():
        model = split(plain, resolve_placement(plain, layout, "auto"))
    assert set(model.divisions) == {"gate", "up", "down", "first", "second"}
