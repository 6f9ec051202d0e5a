"""Copies of layers behave like the originals, or are refused."""

import keras
import numpy as np
import pytest

import kdist
from kdist.parallel import device, merged, split, stage

TWO = kdist.Layout(branch=2)
layers = keras.layers


def examples(rows=24, features=4):
    generator = np.random.default_rng(0)
    return generator.normal(2.0, 3.0, (rows, features)).astype("float32"), generator.integers(
        0, 3, rows
    )


def chain(*middle):
    """Returns a model of inputs, the given layers, and a head."""
    x = inputs = keras.Input((4,))
    for layer in middle:
        x = layer(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(x))


def split_in(layout, plain, placement=None):
    with kdist.create_strategy(layout).scope():
        return split(plain, {"head": device(1)} if placement is None else placement)


def adapted():
    normalization = layers.Normalization(name="normal")
    normalization.adapt(examples()[0])
    return chain(normalization)


def test_what_a_layer_was_adapted_to():
    plain = adapted()
    x, _ = examples()
    expected = plain.predict(x, verbose=0)
    np.testing.assert_allclose(split_in(TWO, plain).predict(x, verbose=0), expected, atol=1e-6)


def test_a_model_that_is_taken_into_a_scope_keeps_what_it_was_adapted_to(mirrored):
    plain = adapted()
    x, _ = examples()
    with mirrored.scope():
        model = kdist.Model.of(plain)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-6)


class Own(kdist.Model):
    def train_step(self, data):
        raise AssertionError


class OwnCall(keras.Model):
    def call(self, inputs, training=None):
        return super().call(inputs, training=training)


@pytest.mark.parametrize(("kind", "what"), [(Own, "train_step"), (OwnCall, "call")])
@pytest.mark.parametrize("nested", [False, True])
def test_a_model_with_a_step_or_call_of_its_own(kind, what, nested):
    inputs = keras.Input((4,))
    x = layers.Dense(4, name="up")(inputs)
    plain = kind(inputs, layers.Dense(3, name="head")(x), name="own")
    if nested:
        plain = chain(layers.Dense(4, name="before"), plain)
    with pytest.raises(TypeError, match=f"'own' has a {what} of its own"):
        split_in(TWO, plain)


def test_a_model_that_was_compiled_is_compiled_anew():
    plain = chain(layers.Dense(4, name="up"))
    plain.compile(keras.optimizers.SGD(0.1, clipnorm=0.1), "mse")
    model = split_in(TWO, plain)
    assert model.optimizer is None
    with pytest.raises(ValueError, match="compile"):
        model.fit(*examples(), verbose=0)


@pytest.mark.parametrize("how", ["layer", "bias"])
def test_what_is_not_trained(how):
    up = layers.Dense(4, name="up")
    plain = chain(up)
    if how == "layer":
        up.trainable = False
    else:
        up.bias.trainable = False
    model = split_in(TWO, plain)
    names = [variable.path for variable in plain.trainable_variables]
    assert [variable.path for variable in model.trainable_variables] == names


@keras.saving.register_keras_serializable("test_copies")
class Normalized(keras.Model):
    """A model of its own class, used as a layer, with a weight and a layer of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.BatchNormalization(name="norm")

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.norm.build(shape)

    def call(self, x, training=None):
        return self.scale * self.norm(x, training=training)


def fine_tuned():
    """A frozen model in a model, a frozen layer in a layer, and dropout, in float16."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        up, own, other = (
            layers.Dense(4, name="up"),
            Normalized(name="own"),
            Normalized(name="other"),
        )
        base = keras.Sequential([keras.Input((4,)), up, own], name="base")
        model = chain(base, layers.Dropout(0.5, name="drop"), layers.Dense(4, name="down"), other)
    finally:
        keras.config.set_dtype_policy("float32")
    base.trainable = other.norm.trainable = False
    up.trainable = True
    return model


def kept(model):
    """Returns what a copy keeps of layers, of layers in them, and of variables."""
    inner = [each for each in model._flatten_layers() if not isinstance(each, layers.InputLayer)]
    flags = [(each.name, each.trainable, each.dtype_policy.name) for each in inner]
    return flags, [(v.name, v.trainable, v.numpy().tolist()) for v in model.variables]


def test_a_copy_has_the_state_of_the_original(mirrored):
    plain = fine_tuned()
    model = split_in(TWO, plain)
    with mirrored.scope():
        copies = [model, merged(model), kdist.Model.of(plain)]
    for copy in copies:
        assert kept(copy) == kept(plain)
    for each in (plain, *copies):
        each.get_layer("base").trainable = True
    for copy in copies:
        assert kept(copy) == kept(plain)
    with model.distribute_strategy.scope():
        model.compile("sgd", "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_functions_of_lambda_layers(mirrored):
    """Python lambdas with names of their module, local functions, and those in other layers."""

    def doubled(x, times):
        return times * x

    plain = chain(
        layers.Reshape((2, 2), name="pairs"),
        layers.TimeDistributed(layers.Lambda(lambda x: np.pi * x), name="each"),
        layers.Lambda(doubled, lambda shape: shape, arguments={"times": 2.0}, name="doubled"),
        layers.Flatten(name="flat"),
    )
    model = split_in(TWO, plain)
    with mirrored.scope():
        copies = [model, merged(model), kdist.Model.of(plain)]
    x, _ = examples()
    expected = plain.predict(x, verbose=0)
    for copy in copies:
        np.testing.assert_allclose(copy.predict(x, verbose=0), expected, atol=1e-6)
    assert model.get_config() == plain.get_config()


def test_a_nested_model_that_is_cut_takes_its_inputs_in_their_order():
    def plain_of(order):
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        first = layers.Dense(4, name="first")(layers.Concatenate(name="both")([a, 2.0 * b]))
        inner = keras.Model([b, a], layers.Dense(4, name="second")(first), name="inner")
        inputs = keras.Input((4,))
        p, q = layers.Dense(4, name="p")(inputs), layers.Dense(4, name="q")(inputs)
        return keras.Model(inputs, layers.Dense(3, name="head")(inner(order(p, q))))

    layout = kdist.Layout(pipeline=2, micro_batches=2)
    placement = {"inner/second|head": stage(1)}
    with pytest.raises(ValueError, match="'inner' is on several stages"):
        split_in(layout, plain_of(lambda p, q: {"a": p, "b": q}), placement)
    split_in(layout, plain_of(lambda p, q: [q, p]), placement)


def test_synchronised_statistics_in_a_pipeline_of_several_replicas():
    layout = kdist.Layout(data=2, pipeline=2, micro_batches=2)
    plain = chain(layers.BatchNormalization(synchronized=True, name="norm"))
    with pytest.raises(ValueError, match="'norm' is synchronized"):
        split_in(layout, plain, {"head": stage(1)})


class Counting(layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


def test_state_is_written_once_a_micro_batch():
    """Also with sample weights, whose sum must be known in advance."""
    layout = kdist.Layout(pipeline=2, micro_batches=2)
    model = split_in(layout, chain(Counting(name="counting")), {"head": stage(1)})
    with model.distribute_strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
        model.compile("sgd", loss)
    x, y = examples(8)
    model.train_on_batch(x, y, sample_weight=np.arange(8.0))
    assert float(model.get_layer("counting").calls.numpy()) == 2.0


class BuiltInCall(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.inner = layers.Dense(4)

    def get_config(self):
        return {"name": self.name}

    def call(self, x):
        return self.inner(x)


class Closed(layers.Layer):
    """Accepts no name, and no other arguments of Keras's."""

    def __init__(self):
        super().__init__()

    def call(self, x):
        return x


class Nameless(Closed):
    def get_config(self):
        return {}


class Forgetful(layers.Layer):
    """Has a weight that its copy lacks."""

    def __init__(self, biased=False, **kwargs):
        super().__init__(**kwargs)
        self.bias = self.add_weight(shape=(4,), name="bias") if biased else None

    def get_config(self):
        return {"name": self.name}

    def call(self, x):
        return x


class WithFunction(Forgetful):
    get_config = layers.Layer.get_config


class TiedHead(layers.Layer):
    """Returns the products with the rows of another layer's kernel."""

    def __init__(self, other, **kwargs):
        super().__init__(**kwargs)
        self.other = other

    def call(self, x):
        return x @ keras.ops.transpose(self.other.kernel)


def tied():
    first = layers.Dense(4, name="first")
    return chain(first, TiedHead(first, name="tied"))


def in_two_models():
    shared = layers.Dense(4, name="shared")
    ones = [keras.Sequential([keras.Input((4,)), shared], name=name) for name in ("one", "two")]
    return chain(*ones)


def lookup():
    found = layers.IntegerLookup(name="lookup", output_mode="multi_hot")
    found.adapt(np.arange(5))
    return keras.Sequential([keras.Input((4,), dtype="int64"), found, layers.Dense(3, name="head")])


@pytest.mark.parametrize(
    ("build", "placement", "message"),
    [
        (
            lambda: chain(BuiltInCall(name="late")),
            {"late": device(1), "head": device(0)},
            "'late' creates its weights",
        ),
        (lambda: chain(Closed()), None, "unexpected keyword argument.* Closed.__init__"),
        (lambda: chain(Nameless()), None, "'nameless' cannot be copied: its copy has the name"),
        (lambda: chain(Forgetful(True, name="less")), None, "'less' .* its copy has 0"),
        (lambda: chain(WithFunction(print, name="of")), None, "'of' .* no get_config"),
        (tied, None, "'first' and 'tied' have the same weight first/kernel"),
        (in_two_models, None, "'one/shared' and 'two/shared' have the same weight"),
        (lookup, None, "'lookup' uses a lookup table"),
    ],
)
def test_layers_that_cannot_be_copied(build, placement, message):
    with pytest.raises(ValueError, match=message):
        split_in(TWO, build(), placement)


def test_a_split_model_is_copied_when_it_is_merged():
    model = split_in(TWO, chain(layers.Dense(4, name="up")))
    with pytest.raises(TypeError, match="already split.*merged"):
        split_in(TWO, model)
    with pytest.raises(TypeError, match="is split.*merged"):
        keras.models.clone_model(model)


def test_a_model_that_is_not_split_in_a_layout_that_splits():
    with kdist.create_strategy(TWO).scope():
        model = kdist.Model.of(chain(layers.Dense(4)))
        with pytest.raises(ValueError, match="kdist.parallel.split"):
            model.compile("sgd", "mse")


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "nonsense"},
        {"num_packs": 2},
    ],
    ids=["reduction", "num_packs"],
)
def test_options_that_a_layout_has_not(options):
    with pytest.raises(ValueError, match="a layout"):
        kdist.create_strategy(TWO, **options)
