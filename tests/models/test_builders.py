import inspect
import socket

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist import models
from kdist.testing import python
from tests.tiers import seldom

SMALL = {  # name -> the smallest sensible arguments
    "mlp": {"input_shape": (8, 8, 1), "num_classes": 10},
    "lenet": {"input_shape": (8, 8, 1), "num_classes": 10},
    "resnet18": {"input_shape": (8, 8, 1), "num_classes": 10},
    "mobilenet_v2": {"input_shape": (32, 32, 3), "num_classes": 2},
    "inception": {"input_shape": (8, 8, 1), "num_classes": 10, "blocks": 1, "width": 4},
    "transformer": {"input_shape": (6,), "num_classes": 10, "vocabulary_size": 20, "depth": 1},
}


def trainable(model):
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def batch_for(name, number=4):
    rng = np.random.default_rng(0)
    if name == "transformer":
        return rng.integers(0, 20, (number, 6))
    return rng.integers(0, 256, (number, *SMALL[name]["input_shape"])).astype("uint8")


def test_every_builder_has_a_small_version_here():
    assert SMALL.keys() == models.BUILDERS.keys()


def test_every_builder_shows_the_arguments_they_share():
    for builder in models.BUILDERS.values():
        parameters = inspect.signature(builder).parameters
        assert list(parameters)[:2] == ["input_shape", "num_classes"]
        assert parameters["precision"].default == "float32"
        assert parameters["sync_batch_norm"].default is False


def test_parameter_counts():
    assert trainable(models.resnet18((28, 28, 1), 10)) == 11_175_818
    assert trainable(models.resnet18((28, 28, 1), 10, width=8)) == 176_634
    assert models.mlp((28, 28, 1), 10).count_params() == (784 + 1) * 256 + (256 + 1) * 10
    lenet = 6 * 26 + 16 * (6 * 25 + 1) + 120 * (16 * 25 + 1) + 84 * 121 + 10 * 85
    assert models.lenet((28, 28, 1), 10).count_params() == lenet


def test_parameter_counts_of_blocks():
    # Convolutions without bias; gamma and beta of BatchNorm in brackets.
    stem = 9 * 8 + (16)
    one_one, into_three, into_five = 8 * 4 + (8), 8 * 2 + (4), 8 * 2 + (4)
    block = one_one + into_three + 9 * 2 * 4 + (8) + into_five + 25 * 2 * 4 + (8) + 8 * 4 + (8)
    inception = models.inception(**SMALL["inception"])
    assert trainable(inception) == stem + block + (16 + 1) * 10
    width, embeddings = 64, (20 + 6) * 64
    attention = 4 * (width + 1) * width
    feed_forward = (width + 1) * 4 * width + (4 * width + 1) * width
    norms = 3 * 2 * width  # two in the block, one after it
    transformer = embeddings + attention + feed_forward + norms + (width + 1) * 10
    assert trainable(models.transformer(**SMALL["transformer"])) == transformer


def test_mobilenet_has_160_trainable_variables_and_4_when_frozen():
    model = models.mobilenet_v2((224, 224, 3), 2)
    assert len(model.trainable_variables) == 160
    assert model.output_shape == (None, 1)
    frozen = models.mobilenet_v2((32, 32, 3), 2, trainable_extractor=False)
    assert len(frozen.trainable_variables) == 4
    assert models.mobilenet_v2((32, 32, 3), 5).output_shape == (None, 5)
    assert models.mobilenet_v2((32, 32, 3), 1).output_shape == (None, 1)


@pytest.mark.slow
def test_frozen_extractor_does_not_change():
    model = models.mobilenet_v2((32, 32, 3), 2, trainable_extractor=False)
    extractor = next(layer for layer in model.layers if isinstance(layer, keras.Model))
    before = extractor.get_weights()
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True), run_eagerly=True)
    bias = model.get_layer("logit").bias.numpy()
    model.fit(batch_for("mobilenet_v2"), np.array([1, 1, 1, 0]), verbose=0)
    assert all(np.array_equal(a, b) for a, b in zip(before, extractor.get_weights(), strict=True))
    assert not np.array_equal(bias, model.get_layer("logit").bias.numpy())


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", SMALL)
def test_bytes_and_floats_give_the_same_float32(name):
    model = models.create(name, **SMALL[name])
    batch = batch_for(name)
    outputs = model.predict(batch, verbose=0)
    assert outputs.dtype == np.float32
    floats = batch if name == "transformer" else batch.astype("float32")
    np.testing.assert_allclose(model.predict(floats, verbose=0), outputs, rtol=1e-5, atol=1e-6)
    if name != "mobilenet_v2":
        np.testing.assert_allclose(outputs.sum(1), 1.0, rtol=1e-5)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", ["lenet", "resnet18", "transformer"])
def test_precision_reaches_the_layers_but_not_the_output(name, precision):
    before = keras.config.dtype_policy().name
    model = models.create(name, precision=precision, **SMALL[name])
    assert keras.config.dtype_policy().name == before
    weighted = [layer for layer in model.layers if layer.weights and layer.name != "logits"]
    assert {layer.dtype_policy.name for layer in weighted} == {precision}
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    assert model.dtype_policy.name == precision
    assert model.outputs[0].dtype == "float32"
    assert np.isfinite(model.predict(batch_for(name), verbose=0)).all()


@pytest.mark.parametrize("name", ["mlp", "mobilenet_v2", "inception"])
def test_precision_reaches_nested_layers(name):
    model = models.create(name, precision="mixed_bfloat16", **SMALL[name])
    weighted = [layer for layer in model._flatten_layers(include_self=False) if layer.weights]
    inner = [layer for layer in weighted if layer.name not in ("logits", "logit")]
    assert len(inner) == len(weighted) - 1
    assert {layer.dtype_policy.name for layer in inner} == {"mixed_bfloat16"}
    assert {layer.compute_dtype for layer in inner} == {"bfloat16"}
    assert model.outputs[0].dtype == "float32"


@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_output_is_float32_where_the_variables_are_not(precision):
    model = models.mlp((8, 8, 1), 10, precision=precision)
    assert model.trainable_variables[0].dtype == precision
    assert model(batch_for("mlp")).dtype == "float32"


def test_raw_pixels():
    scaled = models.mlp((8, 8, 1), 10)
    plain = models.mlp((8, 8, 1), 10, rescale=None)
    kinds = [type(layer) for layer in plain.layers]
    assert keras.layers.Rescaling not in kinds
    plain.set_weights(scaled.get_weights())
    batch = batch_for("mlp").astype("float32")
    np.testing.assert_allclose(plain(batch / 255), scaled(batch), rtol=1e-5)
    extractor_input = models.mobilenet_v2((32, 32, 3)).get_layer("rescale")
    assert (extractor_input.scale, extractor_input.offset) == (1 / 127.5, -1.0)


def batch_norms(model):
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    ]


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet18", "mobilenet_v2", "inception"])
def test_all_batch_norm_layers_are_synchronized(name):
    options = {"batch_normalization": True} if name in ("mlp", "lenet") else {}
    for sync in (False, True):
        model = models.create(name, sync_batch_norm=sync, **options, **SMALL[name])
        assert batch_norms(model)
        assert {layer.synchronized for layer in batch_norms(model)} == {sync}


def test_initializers_of_resnet():
    normal = models.resnet18((8, 8, 1), 10, initializer="normal_0.01")
    kernels = [v.numpy() for v in normal.trainable_variables if v.path.endswith("kernel")]
    assert len(kernels) == 21
    for kernel in kernels:
        if kernel.size > 1000:
            assert kernel.std() == pytest.approx(0.01, rel=0.1)
    same_shape = [k for k in kernels if k.shape == (3, 3, 64, 64)]
    assert not np.array_equal(same_shape[0], same_shape[1])
    he = models.resnet18((8, 8, 1), 10, initializer="he_normal")
    kernel = he.get_layer("stage2_block2_conv1").kernel.numpy()
    assert kernel.std() == pytest.approx(np.sqrt(2 / (9 * 128)), rel=0.1)


def test_initializers_given_to_resnet_are_not_shared():
    mine = keras.initializers.RandomNormal(stddev=0.05)
    model = models.resnet18((8, 8, 1), 10, initializer=mine)
    first, second = (model.get_layer(f"stage1_block1_conv{i}").kernel.numpy() for i in (1, 2))
    assert first.std() == pytest.approx(0.05, rel=0.05)
    assert not np.array_equal(first, second)
    with pytest.raises(ValueError, match="seed=3"):
        models.resnet18((8, 8, 1), 10, initializer=keras.initializers.RandomNormal(seed=3))
    with pytest.raises(ValueError, match="channels"):
        models.resnet18((8, 8, 1), 10, width=0)


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_logits_of_any_size_have_a_finite_loss(precision):
    model = models.mlp((8, 8, 1), 10, rescale=1e6, precision=precision)
    model.compile(keras.optimizers.SGD(1e-9), "sparse_categorical_crossentropy")
    images, labels = batch_for("mlp", 64), np.arange(64) % 10
    loss = model.evaluate(images, labels, verbose=0)
    assert np.isfinite(loss)
    assert loss > 100  # beyond what probabilities clipped at 1e-7 can give
    model.fit(images, labels, verbose=0)
    assert all(np.isfinite(weights).all() for weights in model.get_weights())


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet18", "inception", "transformer"])
def test_the_last_operation_is_the_softmax(name, precision):
    """Keras finds the logits by the softmax, for a stable loss."""
    model = models.create(name, precision=precision, **SMALL[name])
    seen = []

    @tf.function
    def call(batch):
        seen.append(model(batch).op.type)

    call(tf.constant(batch_for(name)))
    assert seen == ["Softmax"]


@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_learns(name):
    from kdist.data.arrays import load_digits

    train, _ = load_digits()
    model = models.create(name, **SMALL[name])
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy")
    history = model.fit(train.images, train.labels, batch_size=64, epochs=4, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]


def test_inception_branches_do_not_meet_before_the_join():
    model = models.inception(**SMALL["inception"])
    join = model.get_layer("block1_join")
    assert [tensor._keras_history[0].name for tensor in join.input] == [
        f"block1_{branch}_relu" for branch in "abcd"
    ]


@pytest.mark.slow
def test_saved_models_open_in_plain_keras_without_kdist(tmp_path):
    predictions = {}
    mixed = {**SMALL["resnet18"], "precision": "mixed_bfloat16", "sync_batch_norm": True}
    for stem, arguments in {**SMALL, "resnet18-mixed": mixed}.items():
        name = stem.removesuffix("-mixed")
        model = models.create(name, **arguments)
        model.compile("adam", "mse")
        model.save(tmp_path / f"{stem}.keras")
        predictions[stem] = model.predict(batch_for(name), verbose=0)
        np.save(tmp_path / f"{stem}.npy", batch_for(name))
    code = """
import json, pathlib, sys
sys.modules["kdist"] = None  # importing it fails
import keras, numpy as np
outputs = {}
for path in pathlib.Path(sys.argv[1]).glob("*.keras"):
    model = keras.saving.load_model(path)
    outputs[path.stem] = model.predict(np.load(path.with_suffix(".npy")), verbose=0).tolist()
print(json.dumps(outputs))
"""
    opened = python(code, [str(tmp_path)])
    assert opened.keys() == predictions.keys()
    for name, outputs in opened.items():
        np.testing.assert_allclose(outputs, predictions[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("resnet81", {}, "unknown model 'resnet81'; did you mean 'resnet18'"),
        ("resnet18", {"input_shape": (28, 28)}, "images are .height, width, channels."),
        ("resnet18", {"input_shape": (4, 4, 1)}, r"needs at least 8 × 8 pixels.*resize\(8, 8\)"),
        ("resnet18", {"num_classes": 1}, "at least 2 classes"),
        ("resnet18", {"input_shape": (8, 8, None)}, "at least 1 channel"),
        ("mlp", {"input_shape": (None, 8, 1)}, "needs a fixed height and width"),
        ("lenet", {"input_shape": (None, None, 1)}, "needs a fixed height and width"),
        ("resnet18", {"initializer": "zeros"}, "one of glorot_uniform"),
        ("lenet", {"precision": "fp16"}, "one of float32, mixed_bfloat16"),
        ("inception", {"blocks": 0}, "at least 1 block"),
        ("transformer", {"input_shape": (None,)}, "fixed .length"),
        ("transformer", {"heads": 5}, "must be a multiple of heads=5"),
        ("transformer", {"depth": 0}, "depth=0.*at least 1"),
    ],
)
def test_refuses(name, arguments, expected):
    with pytest.raises(ValueError, match=expected):
        models.create(name, **{**SMALL.get(name, {}), **arguments})
    assert keras.config.dtype_policy().name == "float32"


def test_missing_weights(monkeypatch):
    with pytest.raises(FileNotFoundError, match="nowhere.h5'.*no such file"):
        models.mobilenet_v2((32, 32, 3), weights="nowhere.h5")

    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("keras.src.utils.file_utils.get_file", refuse)
    with pytest.raises(ConnectionError, match="no network.*weights="):
        models.mobilenet_v2((96, 96, 3), weights="imagenet")


def test_download_timeout(monkeypatch, tmp_path):
    monkeypatch.setattr("keras.src.backend.config._KERAS_DIR", str(tmp_path))  # nothing cached
    monkeypatch.setattr("kdist.models.images.DOWNLOAD_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setattr("keras.src.applications.mobilenet_v2.BASE_WEIGHT_PATH", address)
        with pytest.raises(ConnectionError, match="timed out.*weights="):
            models.mobilenet_v2((96, 96, 3), weights="imagenet")
    assert socket.getdefaulttimeout() is None


def test_weights_file_of_another_format(tmp_path):
    (tmp_path / "notes.h5").write_text("not weights")
    with pytest.raises(ValueError, match="notes.h5'.*include_top=False"):
        models.mobilenet_v2((32, 32, 3), weights=tmp_path / "notes.h5")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".weights.h5", *seldom([".keras"])])
def test_weights_from_a_file(tmp_path, suffix):
    extractor = keras.applications.MobileNetV2((32, 32, 3), include_top=False, weights=None)
    path = tmp_path / f"extractor{suffix}"
    extractor.save(path) if suffix == ".keras" else extractor.save_weights(path)
    model = models.mobilenet_v2((32, 32, 3), weights=path, sync_batch_norm=True)
    twin = next(layer for layer in model.layers if isinstance(layer, keras.Model))
    for ours, theirs in zip(twin.get_weights(), extractor.get_weights(), strict=True):
        assert np.array_equal(ours, theirs)
    assert tf.reduce_all(tf.math.is_finite(model(np.zeros((1, 32, 32, 3)))))
