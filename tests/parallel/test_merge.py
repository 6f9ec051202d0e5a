"""The merged model equals the split one in all respects, on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.parallel import column, device, heads, merged, row, split, stage
from kdist.parallel.tensor.shards import plain_variables

layers = keras.layers

TENSOR = kdist.Layout(tensor=2)
STAGES = kdist.Layout(data=2, pipeline=2)


class Scaled(layers.Layer):
    """A custom layer that is not registered."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="scale")
        self.fixed = self.add_weight(shape=(), name="fixed", trainable=False)

    def call(self, inputs):
        return inputs * self.scale + self.fixed


def transformer():
    return kdist.models.transformer(
        (6,), 3, vocabulary_size=20, width=16, heads=4, depth=1, dropout=0.1
    )


def varied(kind=keras.Model):
    """Layers that are adapted, partly frozen, of another dtype, nested, called twice, or custom."""
    normalization = layers.Normalization(name="normal")
    normalization.adapt(examples((12,)))
    inner = keras.Input((8,))
    x = layers.Dropout(0.1, name="drop")(layers.Dense(8, name="up")(inner))
    block = kind(inner, x, name="block")
    shared = layers.Dense(8, name="shared", dtype="mixed_bfloat16")
    inputs = {"one": keras.Input((12,), name="one"), "two": keras.Input((8,), name="two")}
    x = layers.Dense(8, name="first", trainable=False)(normalization(inputs["one"]))
    x = layers.BatchNormalization(name="norm")(shared(block(shared(x)))) + inputs["two"]
    x = Scaled(name="own")(x)
    model = keras.Model(inputs, {"out": layers.Dense(3, activation="softmax", name="head")(x)})
    model.get_layer("own").scale.trainable = False
    return model


def sequential():
    return keras.Sequential([keras.Input((12,)), layers.Dense(8, name="up"), layers.Dense(3)])


MODELS = {
    "transformer by tensors": (
        transformer,
        TENSOR,
        {"token_embedding": row(), ".*_attention": heads(), ".*_up": column(), ".*_down": row()},
    ),
    "transformer by stages": (transformer, STAGES, {"block1_ffn_norm": stage(1)}),
    "varied by tensors": (varied, TENSOR, {"first|shared": column(), "block/up": column()}),
    "varied by branches": (varied, kdist.Layout(branch=2), {"block/up|head": device(1)}),
    "sequential": (sequential, TENSOR, {"up": column()}),
}


def examples(shape, rows=16):
    generator = np.random.default_rng(0)
    if shape == (6,):
        return generator.integers(0, 20, (rows, *shape)).astype("int32")
    return generator.normal(2.0, 3.0, (rows, *shape)).astype("float32")


def inputs_of(model):
    inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return keras.tree.map_structure(lambda x: examples(x.shape[1:]), inputs)


def split_in(name):
    """Returns (the original, the split model)."""
    build, layout, placement = MODELS[name]
    plain = build()
    with kdist.create_strategy(layout).scope():
        return plain, split(plain, placement)


def kinds(model):
    return [(v.shape, v.dtype, v.trainable) for v in model.variables]


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_plain_model(name):
    plain, model = split_in(name)
    whole = merged(model)
    for ours, theirs in zip(whole._flatten_layers(), plain._flatten_layers(), strict=True):
        assert isinstance(theirs, type(ours))
        assert not isinstance(ours, kdist.Model)
    assert whole._distribute_strategy is None
    assert not whole.compiled
    assert whole.get_config() == plain.get_config()
    assert [layer.name for layer in whole.layers] == [layer.name for layer in plain.layers]
    assert [w.name for w in whole.weights] == [w.name for w in plain.weights]
    assert kinds(whole) == kinds(plain)
    for ours, theirs in zip(whole.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for variable, division in zip(whole.variables, plain_variables(model), strict=True):
        np.testing.assert_array_equal(variable.numpy(), division.whole())
    policies = [layer.dtype_policy.name for layer in whole.layers]
    assert policies == [layer.dtype_policy.name for layer in plain.layers]
    x = inputs_of(plain)
    outputs = (keras.tree.flatten(each.predict(x, verbose=0))[0] for each in (whole, plain))
    np.testing.assert_allclose(*outputs, atol=1e-6)


def test_a_nested_model_of_kdist_is_one_of_keras():
    plain = varied(kdist.Model)
    _, layout, placement = MODELS["varied by tensors"]
    with kdist.create_strategy(layout).scope():
        whole = merged(split(plain, placement))
    assert type(whole.get_layer("block")) is type(whole)
    assert kinds(whole) == kinds(plain)


def test_it_has_what_was_learned_and_stays_as_it_is():
    _, model = split_in("sequential")
    x, y = examples((12,)), np.zeros((16, 3))
    with model.distribute_strategy.scope():
        model.compile("adam", "mse")
    model.fit(x, y, verbose=0)
    whole, expected = merged(model), model.predict(x, verbose=0)
    model.fit(x, y, verbose=0)
    np.testing.assert_allclose(whole.predict(x, verbose=0), expected, atol=1e-6)
    assert np.abs(model.predict(x, verbose=0) - expected).max() > 1e-4
    whole.compile("adam", "mse")
    whole.fit(x, y, verbose=0)  # by plain Keras


def test_within_a_scope_it_is_on_the_device_that_is_asked_for():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        plain, model = split_in("sequential")
        with model.distribute_strategy.scope():
            whole = merged(model, "CPU:2")
    finally:
        keras.config.set_dtype_policy(policy)
    assert whole.dtype_policy.name == plain.dtype_policy.name == "mixed_bfloat16"
    assert whole._distribute_strategy is None
    assert {type(v.value) for v in whole.variables} == {type(plain.variables[0].value)}
    assert {v.value.device[-5:] for v in whole.variables} == {"CPU:2"}


def test_what_is_not_split():
    with pytest.raises(TypeError, match="is not split"):
        merged(kdist.Model.of(sequential()))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["transformer by tensors", "transformer by stages"])
@pytest.mark.parametrize("is_in_scope", [False, True])
def test_what_is_exported_names_no_device(name, is_in_scope, tmp_path):
    plain, model = split_in(name)
    if is_in_scope:
        with model.distribute_strategy.scope():
            model.export(tmp_path / "served", verbose=False)
    else:
        model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    graph = served.signatures["serving_default"].graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    assert {node.device for node in nodes} == {""}
    assert len(served.variables) == len(plain.variables)
    x = examples((6,))
    np.testing.assert_allclose(served.serve(x), plain.predict(x, verbose=0), atol=1e-6)
