"""Split models of all kinds, for tests of the export and the server."""

import keras
import numpy as np

import kdist
from kdist.parallel import column, device, heads, row, split, stage

layers = keras.layers


def tokens():
    return kdist.models.transformer(
        (6,), 3, vocabulary_size=20, width=16, heads=4, depth=1, dropout=0.1
    )


def branches():
    """Returns a model with two inputs and branches with separate statistics."""
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    a = layers.BatchNormalization(name="a_norm")(layers.Dense(8, "relu", name="a")(left))
    b = layers.BatchNormalization(name="b_norm")(layers.Dense(8, "relu", name="b")(right))
    return keras.Model({"left": left, "right": right}, layers.Dense(3, name="head")(a + b))


MODELS = {
    "stages": (tokens, "data=2,pipeline=2,micro_batches=2", {"block1_ffn_norm": stage(1)}),
    "tensors": (
        tokens,
        "tensor=2",
        {"token_embedding": row(), ".*_attention": heads(), ".*_up": column(), ".*_down": row()},
    ),
    "branches": (branches, "branch=2", {"b|b_norm": device(1)}),
}


def split_model(kind, scale=1.0):
    """Returns a split model with random weights and statistics."""
    build, layout, plan = MODELS[kind]
    with kdist.create_strategy(kdist.Layout.parse(layout)).scope():
        model = split(build(), plan)
    generator = np.random.default_rng(0)
    model.set_weights([scale * generator.uniform(0.5, 1, w.shape) for w in model.get_weights()])
    return model


def inputs_of(model, rows=5):
    generator = np.random.default_rng(1)
    return {
        name: generator.integers(0, 20, (rows, 6)).astype(
            "int32" if name == "inputs" else "float32"
        )
        for name in (["inputs"] if len(model.inputs) == 1 else ["left", "right"])
    }


def predicted(model, inputs):
    return model.predict(inputs.get("inputs", inputs), verbose=0)
