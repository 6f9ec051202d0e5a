"""Layouts and placements on Keras's JAX backend, compared with one device on TensorFlow.

A process has one backend: this one has TensorFlow, and starts others for JAX.
"""

import functools
import json
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import kdist
from kdist.parallel import column, heads, row, write_placement
from kdist.testing import assert_same_weights
from tests.parallel import jax_programs
from tests.tiers import seldom

pytestmark = pytest.mark.slow  # each worker of pytest-xdist starts a process of half a minute

MODELS = {
    "mlp": lambda: kdist.models.mlp((4, 4, 2), 4, widths=(16, 8)),
    "transformer": lambda: kdist.models.transformer(
        (8,), 4, vocabulary_size=32, width=16, heads=2, depth=1, dropout=0.0
    ),
}
# The axis along which a weight of the transformer is divided, by the end of its name.
BY_NAME = {
    "token_embedding_embeddings": 1,
    "position_embedding_embeddings": 0,
    **{f"_{part}_kernel": 1 for part in ("query", "key", "value")},
    **{f"_{part}_bias": 0 for part in ("query", "key", "value")},
    "attention_output_kernel": 0,
    "ffn_up_kernel": 1,
    "ffn_up_bias": 0,
    "ffn_down_kernel": 0,
}
# And one of the MLP, by its shape: its layers have no names of their own.
BY_SHAPE = {(32, 16): 1, (16,): 0, (16, 8): 0}


def placement_of(name, model):
    if name == "mlp":
        first, second, _ = (each.name for each in model.layers if hasattr(each, "kernel"))
        return {first: column(), second: row()}
    return {
        "token_embedding": column(),
        "position_embedding": row(),
        ".*_attention": heads(),
        ".*_ffn_up": column(),
        ".*_ffn_down": row(),
    }


def expected_axis(name, path, shape):
    """Returns the divided axis of a weight or of its momentum; None if it is whole."""
    if name == "mlp":
        return BY_SHAPE.get(tuple(shape))
    flat = path.replace("/", "_").removesuffix("_momentum")
    return next((axis for end, axis in BY_NAME.items() if flat.endswith(end)), None)


def on_jax(directory, *names):
    process = subprocess.run(
        [sys.executable, jax_programs.__file__, directory, *names],
        env={**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.strip().splitlines()[-1])


def data(name, steps):
    draw = np.random.default_rng(steps)
    rows = steps * jax_programs.BATCH
    x = draw.integers(0, 32, (rows, 8)) if name == "transformer" else None
    x = draw.uniform(0, 255, (rows, 4, 4, 2)).astype("float32") if x is None else x
    return x, draw.integers(0, 4, rows)


def trained(directory, name):
    """Returns the model after some steps, saved to a file, and the same steps as on JAX."""
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy")
    jax_programs.fit(model, *data(name, 3))
    model.save(directory / f"{name}.keras")
    write_placement(placement_of(name, model), directory / f"{name}.json")
    x, y = data(name, jax_programs.STEPS)
    np.savez(directory / f"{name}.npz", x=x, y=y)
    jax_programs.fit(model, x, y)
    return model


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Returns (directory, the model trained here, results of the program on JAX)."""
    directory = tmp_path_factory.mktemp("few")
    return directory, trained(directory, "mlp"), on_jax(directory, "mlp", "misuse", "suggested")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    directory = tmp_path_factory.mktemp("many")
    return directory, trained(directory, "transformer"), on_jax(directory, "transformer")


layouts = pytest.mark.parametrize(
    "layout", [jax_programs.LAYOUTS[-1], *seldom(jax_programs.LAYOUTS[:-1])]
)
models = pytest.mark.parametrize(
    ("name", "runs"),
    [("mlp", "few"), pytest.param("transformer", "many", marks=pytest.mark.exhaustive)],
)


@layouts
@models
def test_a_file_goes_to_a_mesh_and_back_as_though_it_had_stayed(name, runs, layout, request):
    """Ten steps on the mesh equal ten steps on one device: weights, slots and step count."""
    directory, reference, _ = request.getfixturevalue(runs)
    back = keras.saving.load_model(directory / f"{name} {layout}.keras")
    assert type(back).__module__.startswith("keras.")
    assert_same_weights(back.get_weights(), reference.get_weights())
    states = [[np.asarray(v) for v in m.optimizer.variables] for m in (back, reference)]
    assert_same_weights(*states)
    assert int(back.optimizer.iterations) == 3 + jax_programs.STEPS


@layouts
@models
def test_parts_of_weights_and_slots_are_on_their_devices(name, runs, layout, request):
    *_, found = request.getfixturevalue(runs)
    parts, layout = found[name][layout]["parts"], kdist.Layout.parse(layout)
    divided = []
    for path, (shape, shards, different) in parts.items():
        axis = expected_axis(name, path, shape) if layout.tensor > 1 else None
        expected = list(shape)
        if axis is not None:
            expected[axis] //= layout.tensor
            divided.append(path)
        assert shards == [expected] * layout.devices, path
        assert different == (1 if axis is None else layout.tensor), path
    count = {"mlp": 3, "transformer": 12}[name] if layout.tensor > 1 else 0
    assert len(divided) == 2 * count  # each with its momentum


def test_a_device_of_two_holds_half_of_what_is_divided(few):
    _, reference, found = few
    whole = sum(4 * np.prod(weight.shape) for weight in reference.weights)
    half = whole - sum(4 * np.prod(shape) for shape in BY_SHAPE) / 2
    held = {layout: found["mlp"][layout]["bytes"] for layout in jax_programs.LAYOUTS}
    assert held["data=2"] == {"cpu:0": whole, "cpu:1": whole}
    assert held["tensor=2"] == {"cpu:0": half, "cpu:1": half}
    assert held["data=2,tensor=2"] == {f"cpu:{n}": half for n in range(4)}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("pipeline", "ValueError: pipeline=2: .*use Keras's TensorFlow backend"),
        ("branch", "ValueError: branch=2: .*--backend=tensorflow"),
        ("too many", "RuntimeError: data=5 is for 5 devices, .*started with 4 CPU devices"),
        ("too few named", "ValueError: data=2 is for 2 devices and there are 1 .cpu:0."),
        ("no match", "ValueError: 'middle' matches no layer. The layers are up, down"),
        ("two match", "ValueError: 'up' and 'u.' both match 'up'"),
        ("device", r"TypeError: 'up' is placed on device 1, .*column\(\), row\(\) or heads\(\)"),
        ("stage", "ValueError: 'up' is placed on stage 1, and tensor=2 has 1"),
        ("uneven", "ValueError: 'down' has 3 units, which tensor=2 does not divide"),
        ("kind", r"TypeError: 'up' is a Dense. Place it with column\(\) or row\(\)"),
        ("nothing divided", "ValueError: tensor=2 is for layers whose weights are divided"),
        ("no tensor", "ValueError: up: cannot be divided, because data=2 has tensor=1"),
        ("synchronized", "ValueError: 'batch_normalization.*layer.synchronized = False"),
        ("not built", "ValueError: 'sequential.* is not built"),
        ("uneven batch", "ValueError: a batch of 3 rows, which data=2 does not divide"),
        ("kdist.Model", "RuntimeError: kdist.Model requires Keras on TensorFlow, and .* is jax"),
        ("Model.of", "RuntimeError: kdist.Model requires Keras on TensorFlow, and .* is jax"),
        ("strategy", "RuntimeError: kdist.create_strategy requires Keras on TensorFlow"),
    ],
)
def test_wrong_uses_on_jax(few, wrong, expected):
    messages = few[-1]["misuse"]
    assert re.match(expected, messages[wrong]), messages[wrong]


def test_all_wrong_uses_are_refused(few):
    assert "no error" not in few[-1]["misuse"].values()


def test_what_is_divided_is_suggested_as_on_tensorflow(few):
    assert few[-1]["suggested"] == {"up": "column", "down": "row"}


def test_a_mesh_is_for_jax():
    with pytest.raises(RuntimeError, match="KERAS_BACKEND is tensorflow: set KERAS_BACKEND=jax"):
        kdist.parallel.Mesh(kdist.Layout(data=2))


@pytest.fixture
def distribution():
    """Sets a Keras distribution, as a user of JAX would."""
    given = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    keras.distribution.set_distribution(given)
    yield
    keras.distribution.set_distribution(None)


def test_keras_distribution_is_refused_on_tensorflow(distribution):
    model = MODELS["mlp"]()
    refused = functools.partial(
        pytest.raises, RuntimeError, match=r"DataParallel\(…\)\) does nothing .*kdist.Layout\(…\)"
    )
    with refused():
        kdist.create_strategy("one_device")
    with refused():
        model.compile("sgd", "mse")
    keras.distribution.set_distribution(None)
    model.compile("sgd", "sparse_categorical_crossentropy")
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    with refused():
        model.fit(*data("mlp", 1))


@pytest.mark.exhaustive
def test_every_builder_works_on_jax(tmp_path):
    found = on_jax(tmp_path, "builders")["builders"]
    assert set(found) == set(kdist.models.BUILDERS)
    for is_tensorflows, loss in found.values():
        assert not is_tensorflows
        assert np.isfinite(loss)
