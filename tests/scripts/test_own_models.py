"""Training of users' models and data by `train.py`, and of keras.applications."""

import inspect
import json
import re
import types
import urllib.error

import keras
import numpy as np
import pytest

from kdist.commands.training_run import compiled_model, fine_tuning, user_code
from kdist.commands.training_run.applications import APPLICATIONS, build_application
from tests.scripts.test_train import program

MY_CODE = """
import keras
import numpy as np
from sklearn.datasets import load_digits

def load():
    digits = load_digits()
    images, labels = (digits.images * 15).astype("uint8"), digits.target[:, None]
    return (images[:512], labels[:512]), (images[512:640], labels[512:640])

def words():
    (images, labels), test = load()
    return (images, labels.astype(str)), (test[0], test[1].astype(str))

def logits(input_shape, num_classes, width=4):
    return keras.Sequential([
        keras.Input(input_shape),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Flatten(),
        keras.layers.Dense(width, "relu"),
        keras.layers.Dense(num_classes),
    ])

def full(*_, **__):
    raise OSError(28, "No space left on device")

def saved_to_a_full_disk(input_shape, num_classes):
    keras.Model.save = full
    return logits(input_shape, num_classes)

save = keras.Model.save

def save_first(self, path, **options):
    if "0002" in str(path):
        full()
    save(self, path, **options)

def saved_until_the_disk_is_full(input_shape, num_classes):
    keras.Model.save = save_first
    return logits(input_shape, num_classes)

def exported_to_a_full_disk(input_shape, num_classes):
    from kdist.serving.exporting import export
    export.export = full
    return logits(input_shape, num_classes)

class Mean(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(keras.ops.mean(x, (1, 2)) / 255)

class Doubled(keras.layers.Layer):
    def call(self, x):
        return 2 * x

def compiled():
    model = Mean()
    model.compile("adam", "mse", metrics=["mae"])
    return model

def broken():
    raise KeyError("missing")

def nothing():
    pass
"""


@pytest.fixture
def train(tmp_path):
    """Returns a function that trains a model of my_code.py on two replicas; see `program`."""
    (tmp_path / "my_code.py").write_text(MY_CODE)
    own = f"{tmp_path / 'my_code.py'}:"

    def run(model, *flags):
        return program(
            *("train", f"--model={own}{model}", f"--dataset={own}load"),
            *(f"--run_dir={tmp_path / 'run'}", "--verbose=0", "--local_batch_size=16"),
            *("--strategy=mirrored", "--num_devices=2", *flags),
        )

    return run


@pytest.mark.slow
def test_a_model_with_logits_is_a_classifier_that_is_exported(train, tmp_path):
    models = f"file://{tmp_path}/models/mine"
    flags = ["--model_args=width=32", "--epochs=6", "--optimizer=adam", "--learning_rate=0.01"]
    flags += ["--freeze=dense", "--unfreeze_after_epochs=1", "--ema=0.5", "--clip_norm=1"]
    process = train("logits", *flags, "--save_best", "--early_stopping=5", f"--export={models}")
    assert process.returncode == 0, process.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.6  # chance is 0.1
    assert summary["parameters"] == 65 * 32 + 33 * 10
    best = tmp_path / "run" / "best.keras"
    assert f"best model: {best}, of epoch {summary['best_epoch']}" in process.stdout
    assert summary["best_loss"] <= summary["test_loss"]
    assert keras.saving.load_model(best).count_params() == summary["parameters"]
    assert f"kdist serve --model_dir={models}" in process.stdout
    for version in (tmp_path / "models" / "mine" / "1", tmp_path / "run" / "export" / "mine" / "1"):
        assert (version / "saved_model.pb").exists()


@pytest.mark.slow
def test_a_model_with_layers_of_its_own_is_exported_with_their_code(tmp_path):
    (tmp_path / "my_code.py").write_text(MY_CODE)
    code = user_code.custom_objects(str(tmp_path / "my_code.py"))
    model = keras.Sequential([keras.Input((2,)), code["Doubled"]()])
    model.save(tmp_path / "m.keras")
    flags = (tmp_path / "m.keras", f"--output={tmp_path / 'm'}", "--nowarm_up")
    process = program("export", *flags)
    assert process.returncode == 1
    assert "contains Doubled, which is not Keras's and unknown here" in process.stderr
    process = program("export", *flags, f"--code={tmp_path / 'my_code.py'}")
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "m" / "1" / "saved_model.pb").exists()


def test_a_compiled_model_keeps_its_loss_and_metrics(train, tmp_path):
    process = train("compiled")
    assert process.returncode == 0, process.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"test_loss", "test_mae"} < summary.keys()
    assert process.stdout.count("test loss") == process.stdout.count("test mae") == 1


def dense(units=3, activation=None):
    return keras.layers.Dense(units, activation)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (lambda x: dense()(x), "linear"),
        (lambda x: keras.layers.Dropout(0.1)(dense()(x)), "linear"),
        (lambda x: dense(3, "softmax")(x), "softmax"),
        (lambda x: keras.Sequential([dense(), keras.layers.Softmax()])(x), "softmax"),
        (lambda x: keras.ops.softmax(dense()(x)), "softmax"),
        (lambda x: keras.ops.sigmoid(dense(1)(x)), "sigmoid"),
        # As for mixed precision, in ensembles, and after a change of form.
        (lambda x: keras.layers.Activation("linear")(dense(3, "softmax")(x)), "softmax"),
        (lambda x: keras.layers.Average()([dense(3, "softmax")(x) for _ in "ab"]), "softmax"),
        (lambda x: keras.layers.Reshape((3,))(keras.ops.softmax(dense()(x))), "softmax"),
    ],
)
def test_probabilities_are_told_from_logits_wherever_they_are_computed(head, expected):
    inputs = keras.Input((4,))
    assert compiled_model.output_activation(keras.Model(inputs, head(inputs))) == expected


@pytest.mark.parametrize(
    ("model", "flags", "expected"),
    [
        ("compiled", ["--learning_rate=0.1"], "--learning_rate has no effect"),
        ("nothing", [], "returned NoneType; return a keras.Model"),
        ("logits", ["--model_args=depth=3"], "unexpected keyword argument 'depth'"),
        ("broken", [], "my_code.py"),  # the line that raised
    ],
)
def test_what_does_not_fit_is_refused(train, model, flags, expected):
    process = train(model, *flags)
    assert process.returncode == 1
    assert expected in process.stderr


def test_a_model_that_no_disk_has_is_an_error(train):
    process = train("saved_to_a_full_disk")
    assert process.returncode == 1
    assert "model of epoch 1 could not be written" in process.stderr
    assert "next:" not in process.stdout


def test_a_training_whose_last_model_no_disk_has_is_continued(train, tmp_path):
    """It was a finished run, of whose models the one of an earlier epoch was exported."""
    process = train("saved_until_the_disk_is_full", "--epochs=2")
    assert process.returncode == 1
    assert re.search("of epoch 2 could not .* newest there is of epoch 1", process.stderr)
    (tmp_path / "my_code.py").write_text(MY_CODE.replace("    keras.Model.save = save_first", ""))
    process = train("saved_until_the_disk_is_full", "--epochs=2")
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "checkpoints" / "epoch-0002.keras").exists()


def test_an_export_that_fails_names_the_trained_model(train, tmp_path):
    models = tmp_path / "models"
    process = train("exported_to_a_full_disk", f"--export={models}")
    assert process.returncode == 1
    assert "No space left on device; free disk space" in process.stderr
    model = tmp_path / "run" / "checkpoints" / "epoch-0001.keras"
    assert f"export {model} --output={models}" in process.stdout
    assert model.exists()


def test_arguments_that_a_function_does_not_have_are_one_line(train):
    (line,) = train("logits", "--model_args=widht=3").stderr.splitlines()[-1:]
    assert "unexpected keyword argument 'widht'" in line
    assert "logits(input_shape, num_classes, width=4)" in line
    process = train("broken", "--model_args=x=1")
    assert "Traceback" not in process.stderr


def test_labels_that_are_words_are_refused(train, tmp_path):
    process = train("logits", f"--dataset={tmp_path / 'my_code.py'}:words")
    assert process.returncode == 1
    assert "pass integers" in process.stderr
    assert "Traceback" not in process.stderr


def test_all_applications_are_there():
    functions = {n for n, f in vars(keras.applications).items() if inspect.isfunction(f)}
    assert functions == set(APPLICATIONS)


@pytest.mark.parametrize("name", ["MobileNet", "EfficientNetB0", "ResNet50V2"])
def test_applications_scale_pixels_to_probabilities(name):
    model = build_application(name, (32, 32, 3), 5, "mixed_bfloat16")
    assert model.output_shape == (None, 5)
    assert model.output.dtype == "float32"
    scaled = [layer for layer in model.layers if isinstance(layer, keras.layers.Rescaling)]
    assert scaled
    with pytest.raises(ValueError, match="weights"):
        build_application(name, (32, 32, 3), 5, "float32", weights="imagenet")
    with pytest.raises(ValueError, match=r"\(28, 28\) pixels are too small.*--operations"):
        build_application(name, (28, 28, 1), 5, "float32")


def test_a_file_of_keras_starts_a_model_with_gray_images_and_another_last_layer(
    tmp_path, monkeypatch
):
    path = str(tmp_path / "mobilenet.keras")
    options = {"weights": None, "input_shape": (32, 32, 3), "alpha": 0.25}
    known = keras.applications.MobileNet(classes=7, **options)
    known.save(path)
    model = build_application("MobileNet", (32, 32, 1), 5, "float32", start=path, alpha=0.25)
    report = fine_tuning.load_weights(model, path)
    assert report.startswith("54 of 55 layers start from ")
    assert report.endswith("; new: logits")
    assert "load_own_variables" not in vars(model.get_layer("conv1"))

    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 1)).astype("float32")
    expected = keras.Model(known.inputs, known.get_layer("conv_pw_13_relu").output)(
        keras.applications.mobilenet.preprocess_input(np.repeat(pixels, 3, axis=-1))
    )
    outputs = keras.Model(model.inputs, model.get_layer("conv_pw_13_relu").output)(pixels)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)

    monkeypatch.setattr(fine_tuning, "FLAGS", types.SimpleNamespace(model="my_code.py:build"))
    other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=r"fits no layer of my_code\.py:build"):
        fine_tuning.load_weights(other, path)


def test_weights_that_cannot_be_downloaded_are_reported_with_their_place(monkeypatch):
    def fail(*_):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("keras.src.utils.file_utils.urlretrieve", fail)
    with pytest.raises(ConnectionError, match=r"mobilenet_2_5_.*no network.*MobileNet\.weights"):
        build_application("MobileNet", (32, 32, 3), 5, "float32", start="imagenet", alpha=0.25)
