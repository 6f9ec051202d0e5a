"""Placements that name variables and their axes become placements of layers."""

import keras
import pytest

import kdist
from kdist.parallel import column, device, heads, read_placement, row, split, stage, write_placement
from kdist.parallel.placement import Division, layer_placement


def transformer():
    layers = keras.layers
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Embedding(8, 8, name="tokens")(inputs)
    x = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    block = keras.Sequential(
        [
            keras.Input((4, 8)),
            layers.Dense(16, "relu", name="ffn_up"),
            layers.Dense(8, name="ffn_down"),
        ],
        name="block",
    )
    x = layers.Reshape((4, 8, 1), name="image")(block(x))
    x = layers.Conv2D(4, 3, name="conv")(x)
    return keras.Model(inputs, x)


@pytest.mark.parametrize(
    ("placement", "layers"),
    [
        (
            {".*/ffn_up/kernel": (None, "model"), ".*/ffn_down/kernel": ("model", None)},
            {"block/ffn_up": column(), "block/ffn_down": row()},
        ),
        (
            {"block/ffn_up/kernel": (None, "model"), "block/ffn_up/bias": ("model",)},
            {"block/ffn_up": column()},
        ),
        ({"tokens/.*": ("model", None)}, {"tokens": row()}),
        ({"conv/kernel": (None, None, "model", None)}, {"conv": row()}),
        ({"conv/kernel": (None, None, None, "model")}, {"conv": column()}),
        (
            {
                "attention/(query|key|value)/kernel": (None, "model", None),
                "attention/(query|key|value)/bias": ("model", None),
                "attention/attention_output/kernel": ("model", None, None),
            },
            {"attention": heads()},
        ),
        (
            {"block/.*": stage(1), "block/ffn_up/kernel": (None, "model")},
            {"block/ffn_up": Division("column", 1), "block/ffn_down": stage(1)},
        ),
        ({"block": stage(1)}, {"block": stage(1)}),
    ],
)
def test_axes_of_variables(placement, layers):
    assert layer_placement(transformer(), placement) == layers


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            {"ffn_up/kernel": (None, "model")},
            r"The variables are tokens/embeddings",
        ),
        ({"tokens/.*": (None, "model"), ".*s": (None, "model")}, "both match 'tokens/embeddings'"),
        ({"conv/kernel": (None, "model")}, r"shape \(3, 3, 1, 4\)\. Write None or .* its 4 axes"),
        ({"tokens/.*": (None, "data")}, "Write None or"),
        ({"tokens/.*": (None, None)}, '"model" for one'),
        ({"tokens/.*": ("model", "model")}, "cannot be divided in this way"),
        ({"conv/kernel": ("model", None, None, None)}, "cannot be divided in this way. A kernel"),
        ({"attention/query/kernel": ("model", None, None)}, "attention by its heads"),
        (
            {"block/ffn_up/kernel": ("model", None), "block/ffn_up/bias": ("model",)},
            "divides 'block/ffn_up/bias' by column, and another pattern divides its layer by row",
        ),
        ({"tokens": device(0), "tokens/.*": (None, "model")}, "both place 'tokens'"),
    ],
)
def test_what_is_refused(placement, message):
    with pytest.raises(ValueError, match=message):
        layer_placement(transformer(), placement)


def test_a_model_is_split_so(tmp_path):
    placement = {".*/ffn_up/kernel": (None, "model"), ".*/ffn_down/kernel": ("model", None)}
    write_placement(placement, tmp_path / "placement.json")
    assert read_placement(tmp_path / "placement.json") == placement
    with kdist.create_strategy(kdist.Layout(tensor=2)).scope():
        model = split(transformer(), placement)
    assert model.divisions == {"block/ffn_up": "column", "block/ffn_down": "row"}


def test_a_nested_model_that_begins_as_its_layer_does():
    """Paths include both, and the layer's name may be part of the model's."""
    layers = keras.layers
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="up")], name="setup")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, inner(inputs))
    assert layer_placement(model, {"setup/up/kernel": (None, "model")}) == {"setup/up": column()}


def test_gates_of_attention_are_divided_by_heads():
    inputs = keras.Input((4, 8))
    attention = keras.layers.MultiHeadAttention(2, 4, name="it", use_gate=True)
    model = keras.Model(inputs, attention(inputs, inputs))
    assert layer_placement(model, {"it/gate/kernel": (None, "model", None)}) == {"it": heads()}
