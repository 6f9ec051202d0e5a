"""Real models, split as `suggest` says, have the weights of one device, on the devices asked for.

In float64: what differs is then no rounding. Statistics of BatchNorm are each replica's own, as
under `mirrored`; so its models are compared on one replica, and those that synchronise it on two.
"""

import functools
import re

import keras
import numpy as np
import pytest

import kdist
from kdist.parallel import split, suggest
from kdist.parallel.placement import devices_of, groups_of, operations_that_run
from kdist.testing import assert_same_weights

pytestmark = pytest.mark.slow

STEPS, BATCH, CLASSES = 10, 8, 10


def application(name):
    build = getattr(keras.applications, name)
    return build(weights=None, input_shape=(32, 32, 3), classes=CLASSES)


def ours(name, shape, **options):
    options = {"num_classes": CLASSES, "precision": "float64", **options}
    return kdist.models.create(name, input_shape=shape, **options)


IMAGES = (32, 32, 3)
MODELS = {
    "resnet18": (functools.partial(ours, "resnet18", IMAGES, sync_batch_norm=True), IMAGES),
    "inception": (
        functools.partial(ours, "inception", (28, 28, 1), sync_batch_norm=True),
        (28, 28, 1),
    ),
    "MobileNetV2": (functools.partial(application, "MobileNetV2"), IMAGES),
    "ResNet50": (functools.partial(application, "ResNet50"), IMAGES),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    # The output layer of kdist's models is float32: with a larger rate, its rounding grows from
    # step to step in this network, under `mirrored` as well (1.5e-8 after 3, 5e-4 after 10).
    "slow momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-3),
}
CASES = [
    ("resnet18", "pipeline=2", "sgd"),
    ("resnet18", "data=2,pipeline=2", "slow momentum"),
    ("inception", "branch=2", "adam"),
    ("inception", "data=2,branch=2", "sgd"),
    ("MobileNetV2", "pipeline=4", "momentum"),
    ("ResNet50", "pipeline=2", "adam"),
]


@pytest.fixture
def float64():
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(before)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "layout", "optimizer"), CASES)
def test_weights_are_those_of_one_device(name, layout, optimizer):
    build, shape = MODELS[name]
    layout = kdist.Layout.parse(layout)
    plain = build()
    with kdist.create_strategy(layout).scope():
        model = split(plain, suggest(plain, layout))
        model.compile(OPTIMIZERS[optimizer](), "sparse_categorical_crossentropy")
    plain.compile(OPTIMIZERS[optimizer](), "sparse_categorical_crossentropy")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(STEPS * BATCH, *shape))
    y = generator.integers(0, CLASSES, STEPS * BATCH)
    with operations_that_run() as operations:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-5)
    check_placement(model, operations)


def check_placement(model, operations):
    """Forward and backward operations of each layer with a convolution, and its variables."""
    strategy = model.distribute_strategy
    groups = groups_of(strategy)
    looked_at = 0
    for layer in model.layers:
        if "Conv" not in type(layer).__name__:
            continue
        expected = {group[model.places[layer.name]] for group in groups}
        for variable in layer.variables:
            assert set(devices_of(strategy, variable)) == expected
        scope = re.compile(rf"/{layer.name}(_\d+)?/")  # Keras numbers its calls
        mine = [o for o in operations if scope.search(o.name) and "Conv" in o.type]
        for is_backward in (False, True):
            ran = {o.device for o in mine if o.is_backward == is_backward}
            assert ran == expected, (layer.name, is_backward)
            looked_at += 1
    assert looked_at >= 20
