"""A model's workload against TensorFlow's profiler, its weights, and values computed by hand."""

import collections
import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.planner import read_workload
from tests.tiers import seldom

# More of the same blocks as in a smaller network of the family.
LARGER = re.compile(
    "ConvNeXt(Small|Base|X?Large)|DenseNet(169|201)|EfficientNet(B[1-7]|V2B[1-3]|V2M|V2L)"
    "|NASNetLarge|ResNet(101|152)(V2)?|VGG19"
)
APPLICATIONS = sorted(
    name
    for name, builder in vars(keras.applications).items()
    if inspect.isfunction(builder) and not LARGER.fullmatch(name)
)
FAST = {"VGG16"}
SLOW = {"MobileNetV2", "ResNet50"}
IN_CI = sorted(FAST | SLOW)


def by_name(work):
    return {layer.name: layer for layer in work.layers}


def built(name):
    """Returns the application without weights, and the shape of its images."""
    keras.utils.clear_session()
    model = getattr(keras.applications, name)(weights=None)
    height, width, channels = model.input_shape[1:]
    return model, (height or 224, width or 224, channels)


def profiled(model, shape):
    """Returns the FLOPs of a forward pass by layer, as TensorFlow's profiler counts them.

    Its scopes are those of the graph: the model's, in it the layer's, each with a number behind it.
    What stands in none of them has the name "".
    """
    spec = tf.TensorSpec([1, *shape], tf.float32)
    tf.config.run_functions_eagerly(True)  # grouped convolutions are functions, not counted else
    try:
        graph = tf.function(lambda x: model(x, training=True)).get_concrete_function(spec).graph
    finally:
        tf.config.run_functions_eagerly(False)
    options = tf.compat.v1.profiler.ProfileOptionBuilder
    root = tf.compat.v1.profiler.profile(
        graph,
        cmd="scope",
        options=options(options.float_operation()).with_empty_output().build(),
    )
    names = {layer.name for layer in model.layers}
    counts: collections.Counter[str] = collections.Counter()

    def count(node):
        parts = [re.sub(r"_\d+$", "", part) for part in node.name.split("/")]
        counts[next((part for part in parts if part in names), "")] += node.float_ops
        for child in node.children:
            count(child)

    count(root)
    return counts


def parts_of(layer, work):
    """Returns the work of a layer and of the layers in it."""
    path = layer.path or layer.name
    return [x for x in work.layers if x.name == path or x.name.startswith(path + "/")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in IN_CI),
        *seldom(APPLICATIONS, other_than=IN_CI),
    ],
)
def test_applications_agree_with_the_profiler(name):
    model, shape = built(name)
    work = read_workload(model, shape)
    assert work.parameters == model.count_params()
    assert work.trainable_parameters == sum(np.prod(w.shape) for w in model.trainable_weights)
    for layer in model.layers:
        assert sum(x.parameters for x in parts_of(layer, work)) == layer.count_params(), layer.name

    theirs = profiled(model, shape)
    assert work.forward_flops == pytest.approx(theirs.total(), rel=0.01)
    for layer in model.layers:
        ours = sum(x.forward_flops for x in parts_of(layer, work))
        assert ours == pytest.approx(theirs[layer.name], rel=0.01), layer.name
    assert theirs[""] < 0.02 * theirs.total()  # additions by "+", and the like
    assert not work.uncounted


def test_a_convolution_by_hand():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, use_bias=False, name="first")(inputs)  # 6 × 6 × 4 come out
    x = keras.layers.Conv2D(5, 3, use_bias=False, name="second")(x)  # 4 × 4 × 5
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    work = read_workload(kdist.Model(inputs, keras.layers.Dense(2, name="classes")(x)))
    first, second, classes = (by_name(work)[name] for name in ("first", "second", "classes"))
    multiplications = 36 * 4 * 27
    # No gradient of the input of the first layer: one product in the backward pass, not two.
    assert (first.forward_flops, first.backward_flops) == (2 * multiplications,) * 2
    assert second.forward_flops == 2 * 16 * 5 * 36
    assert second.backward_flops == 2 * second.forward_flops
    assert classes.forward_flops == 2 * 5 * 2 + 2
    assert [layer.kind for layer in (first, second, classes)] == [
        "convolution",
        "convolution",
        "matmul",
    ]
    assert (first.kept_bytes, second.kept_bytes) == (36 * 4 * 4, 0)
    assert (first.spatial, classes.spatial) == (True, False)
    assert work.input_bytes == 8 * 8 * 3 * 4
    assert work.gradients_as_ready() == [("classes", 12.0), ("second", 180.0), ("first", 108.0)]


def test_a_layer_that_is_called_twice_computes_twice_with_the_same_weights():
    inputs = keras.Input((4,))
    dense = keras.layers.Dense(4, name="shared", use_bias=False)
    once = read_workload(keras.Model(inputs, dense(inputs)))
    twice = read_workload(keras.Model(inputs, dense(dense(inputs))))
    assert by_name(twice)["shared"].forward_flops == 2 * by_name(once)["shared"].forward_flops
    assert twice.parameters == once.parameters == 16


def test_attention_is_counted_by_its_einsums():
    inputs = keras.Input((10, 16))
    attention = keras.layers.MultiHeadAttention(2, 8, use_bias=False, name="attention")
    work = read_workload(keras.Model(inputs, attention(inputs, inputs)))
    projections = 4 * 2 * 10 * 16 * 16
    scores = 2 * 2 * (2 * 10 * 10 * 8)
    layers = [layer for layer in work.layers if layer.name.startswith("attention")]
    of_each_score = 1 + 5  # scaled, and its part in the softmax
    counted = sum(layer.forward_flops for layer in layers)
    assert counted == projections + scores + of_each_score * 2 * 10 * 10
    assert sum(layer.parameters for layer in layers) == 4 * 16 * 16


def test_frozen_layers_have_no_gradient():
    inputs = keras.Input((4,))
    frozen = keras.layers.Dense(8, name="frozen")
    x = frozen(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="trained")(x))
    frozen.trainable = False
    work = read_workload(model)
    assert by_name(work)["frozen"].backward_flops == 0
    assert (work.parameters, work.trainable_parameters) == (40 + 18, 18)
    assert [name for name, _ in work.gradients_as_ready()] == ["trained"]


def test_loop_is_uncounted():
    inputs = keras.Input((5, 3))
    work = read_workload(keras.Model(inputs, keras.layers.LSTM(4)(inputs)))
    assert "While" in work.uncounted


def test_memory_of_a_chain_by_hand():
    """Each of three tanh of 1,000 numbers keeps its output for its own gradient."""
    inputs = keras.Input((1000,))
    x = inputs
    for _ in range(3):
        x = keras.layers.Activation("tanh")(x)
    dense = keras.layers.Dense(1, use_bias=False)
    work = read_workload(keras.Model(inputs, dense(x)))
    # The gradient of the weights reads the last tanh; nobody asks for those of what is before it.
    assert work.activation_bytes == 4000 + 4  # and the output, for the loss
    first = keras.layers.Dense(1000, use_bias=False)
    x = first(inputs)
    for _ in range(3):
        x = keras.layers.Activation("tanh")(x)
    work = read_workload(keras.Model(inputs, dense(x)))
    assert work.activation_bytes == 4 * 4000 + 4  # the input, and three tanh
    # Of many examples the activations weigh, of one the gradient of a million weights.
    assert 4 * 4000 <= work.step_bytes(10_000) / 10_000 <= 6 * 4000
    assert 4 * 1000 * 1001 <= work.step_bytes(1) <= 4 * 1000 * 1001 + 6 * 4000


def test_gradients_of_weights_do_not_grow_with_the_batch():
    def dense(times):
        inputs = keras.Input((1000,))
        shared = keras.layers.Dense(1000, activation="tanh", use_bias=False)
        x = inputs
        for _ in range(times):
            x = shared(x)
        return keras.Model(inputs, x)

    three = read_workload(dense(3)).step_bytes(64)
    assert three < 3 * 4e6 + 64 * 4000 * 10  # at most a gradient of each call before they are added
    keras.config.set_dtype_policy("mixed_float16")
    try:
        mixed = read_workload(dense(1)).step_bytes(64)
    finally:
        keras.config.set_dtype_policy("float32")
    # The gradient in 16 bits and in 32, and what the weights were cast to.
    assert 4e6 < mixed < 2e6 + 4e6 + 2e6 + 64 * 4000 * 10


def test_applied_gradients_do_not_coexist():
    """Of two layers with a million weights each, one gradient exists while the next is computed."""
    inputs = keras.Input((1000,))
    first, second = (keras.layers.Dense(1000, use_bias=False) for _ in range(2))
    work = read_workload(keras.Model(inputs, second(first(inputs))))
    assert 8e6 <= work.step_bytes(1) < 8.2e6
    assert 4e6 <= work.step_bytes(1, gradients_stay=False) < 8.2e6
    thin = keras.Model(inputs, keras.Sequential([first, *_tanh(4), second])(inputs))
    assert 4e6 <= read_workload(thin).step_bytes(1, gradients_stay=False) < 4.2e6


def _tanh(times):
    return [keras.layers.Activation("tanh") for _ in range(times)]


def test_dropout_keeps_its_mask():
    inputs = keras.Input((1000,))
    x = keras.layers.Dense(1000, use_bias=False)(inputs)
    plain = read_workload(keras.Model(inputs, x))
    dropped = read_workload(keras.Model(inputs, keras.layers.Dropout(0.5, name="drop")(x)))
    assert by_name(dropped)["drop"].kept_bytes >= 1000
    assert dropped.step_bytes(10_000) >= plain.step_bytes(10_000) + 10_000 * 1000


def test_gradient_of_linear_layers():
    """The gradient of logits without a softmax has their size."""
    inputs = keras.Input((10,))
    work = read_workload(keras.Model(inputs, keras.layers.Dense(5000, use_bias=False)(inputs)))
    assert work.step_bytes(1000) >= 1000 * 2 * 5000 * 4


def test_position_embeddings_do_not_grow_with_the_batch():
    class Position(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(1, *shape[1:]), name="table")

        def call(self, x):
            return x + self.table

    inputs = keras.Input((100, 10))
    work = read_workload(keras.Model(inputs, Position(name="position")(inputs)))
    assert by_name(work)["position"].backward_flops == 1000  # a sum over examples
    assert work.step_bytes(1) - work.step_bytes(0) < 3.1 * 4000
    assert work.step_bytes(0) >= 4000


def test_sequential_models_and_inputs_by_name():
    layers = [keras.Input((4,)), keras.layers.Dense(3, name="only", use_bias=False)]
    assert read_workload(keras.Sequential(layers)).forward_flops >= 24
    b, a = keras.Input((4,), name="b"), keras.Input((5,), name="a")
    both = keras.layers.Concatenate()([b, a])
    model = keras.Model({"b": b, "a": a}, keras.layers.Dense(1, use_bias=False)(both))
    work = read_workload(model)
    assert work.input_bytes == 9 * 4
    assert work.parameters == 9


def test_operations_in_a_loop_do_not_count_for_another_layer():
    class Loop(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = keras.layers.Dense(4)

        def build(self, shape):
            self.inner.build((None, 4))

        def call(self, x):
            return tf.map_fn(self.inner, x)

    inputs = keras.Input((3, 4))
    x = Loop(name="loop")(inputs)
    x = keras.layers.Dense(4, name="after", use_bias=False)(x)
    work = read_workload(keras.Model(inputs, x))
    assert by_name(work)["after"].forward_flops == 2 * 3 * 4 * 4
    assert work.uncounted


def test_weights_belong_to_the_layer_that_made_them():
    class Around(keras.layers.Layer):
        def __init__(self, inner, **kwargs):
            super().__init__(**kwargs)
            self.inner = inner

        def call(self, x):
            return self.inner(x)

    inputs = keras.Input((4,))
    shared = keras.layers.Dense(4, name="shared", use_bias=False)
    model = keras.Model(inputs, Around(shared, name="around")(shared(inputs)))
    (shared,) = (layer for layer in read_workload(model).layers if layer.parameters)
    assert (shared.name.split("/")[-1], shared.parameters) == ("shared", 16)


def test_model_is_unchanged():
    model = convolutions((32, 32, 3))
    model.layers[1].activity_regularizer = keras.regularizers.L2(0.1)
    own = model.layers[3].call = lambda x: x
    read_workload(model)
    assert [name for name, x in enumerate(model.layers) if "call" in vars(x)] == [3]
    assert model.layers[3].call is own
    assert not tf.config.functions_run_eagerly()
    assert model.losses == []


def test_model_is_unchanged_after_a_failure():
    class Fails(keras.layers.Layer):
        fails = False

        def call(self, x):
            if self.fails:
                raise RuntimeError("as asked")
            return x

    inputs = keras.Input((4,))
    layer = Fails()
    model = keras.Model(inputs, layer(inputs))
    layer.fails = True
    with pytest.raises(RuntimeError, match="as asked"):
        read_workload(model)
    assert "call" not in vars(layer)
    assert not tf.config.functions_run_eagerly()


def test_reading_in_a_strategy_scope_is_rejected(mirrored):
    with mirrored.scope():
        model = convolutions((8, 8, 3))
        with pytest.raises(ValueError, match=r"outside of strategy.scope"):
            read_workload(model)
    assert read_workload(model).forward_flops


def convolutions(shape):
    inputs = keras.Input(shape)
    x = keras.layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.DepthwiseConv2D(3, padding="same")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(100)(x))


def test_unknown_shapes_need_input_shape():
    model = convolutions((None, None, 3))
    with pytest.raises(ValueError, match="give input_shape"):
        read_workload(model)
    with pytest.raises(ValueError, match="inputs of shape"):
        read_workload(model, (224, 224, 1))
    with pytest.raises(ValueError, match="inputs of shape"):
        read_workload(model, (224, 224))
    assert read_workload(model, (64, 64, 3)).input_shape == (64, 64, 3)


def test_model_without_inputs_is_rejected():
    class Own(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(ValueError, match="inputs of the model"):
        read_workload(Own())


def test_resized_workload_matches_a_rebuilt_model():
    model = convolutions((None, None, 3))
    small, large = (read_workload(model, (size, size, 3)) for size in (32, 128))
    scaled = small.at_input_shape((128, 128, 3))
    assert scaled.training_flops == pytest.approx(large.training_flops, rel=0.01)
    assert scaled.activation_bytes == pytest.approx(large.activation_bytes, rel=0.02)
    assert scaled.step_bytes(64) == pytest.approx(large.step_bytes(64), rel=0.02)
    assert scaled.parameters == large.parameters
    assert scaled.input_bytes == large.input_bytes


def test_mixed_precision_keeps_less_but_not_half():
    """BatchNorm computes in float32 and keeps its inputs and their casts."""
    full = read_workload(convolutions((32, 32, 3)))
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        mixed = read_workload(convolutions((32, 32, 3)))
    finally:
        keras.config.set_dtype_policy("float32")
    assert (full.precision, mixed.precision) == ("float32", "mixed_bfloat16")
    assert 0.5 < mixed.activation_bytes / full.activation_bytes < 0.9
    assert mixed.gradient_bytes == full.gradient_bytes == full.trainable_parameters * 4


def test_weights_per_position_fix_the_image_size():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3)(inputs)
    flattens = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
    assert not read_workload(flattens).resizable
    assert read_workload(convolutions((8, 8, 3))).resizable


def test_bytes_that_cross_a_cut():
    x = keras.Input((4,))
    first = keras.layers.Dense(8, name="first")(x)
    second = keras.layers.Dense(8, name="second")(first)
    model = keras.Model(x, keras.layers.Add(name="add")([first, second]) * 2.0)
    crossing = {layer.name: layer.crossing_bytes for layer in read_workload(model).layers}
    # The skip connection crosses the cut after the second layer as well.
    assert crossing == {"first": 32, "second": 64, "add": 0, "": 0}


def test_no_cut_within_a_layer_that_is_called_again():
    x = keras.Input((8,))
    again = keras.layers.Dense(8, name="again")
    between = keras.layers.Dense(8, name="between")(again(x))
    model = keras.Model(x, keras.layers.Dense(8, name="last")(again(between)))
    crossing = {layer.name: layer.crossing_bytes for layer in read_workload(model).layers}
    assert crossing["again"] is None
    assert crossing["between"] == 32
