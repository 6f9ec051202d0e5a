import gzip
import os
import re
import struct

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from sklearn.datasets import load_digits

import kdist
from kdist.batch import Batch
from kdist.data import DatasetUnavailable, from_arrays
from kdist.data.arrays import has_idx_files, read_digits, read_idx
from kdist.data.datasets import DEBIAN_FASHION_MNIST
from tests.forked import python


def write_idx(path, array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(header + array.tobytes())


def write_mnist(directory, train=20, test=10, suffix=""):
    rng = np.random.default_rng(0)
    for part, number in (("train", train), ("t10k", test)):
        images = rng.integers(0, 255, (number, 28, 28), dtype="uint8")
        write_idx(directory / f"{part}-images-idx3-ubyte{suffix}", images)
        labels = np.arange(number, dtype="uint8") % 10
        write_idx(directory / f"{part}-labels-idx1-ubyte{suffix}", labels)


# Arrays


def test_labels_of_keras_datasets_may_have_one_column():
    source = from_arrays(np.zeros((3, 5, 6), "uint8"), np.array([[0], [2], [1]], "uint8"))
    assert source.labels.tolist() == [0, 2, 1]


def test_arrays_get_a_channel_and_their_types():
    source = from_arrays(np.zeros((3, 5, 6), "uint8"), [0, 2, 1])
    assert source.image_shape == (5, 6, 1)
    assert (source.num_examples, source.num_classes) == (3, 3)
    floats = from_arrays(np.zeros((3, 5, 6, 2), "float64"), [0, 2, 1], num_classes=7)
    assert floats.images.dtype == np.float32
    assert floats.num_classes == 7


@pytest.mark.parametrize(
    ("images", "labels", "options", "expected"),
    [
        (np.zeros((2, 3)), [0, 1], {}, r"images.* \(2, 3\)"),
        (np.zeros((2, 3, 3)), [0.0, 1.0], {}, "integers"),
        (np.zeros((2, 3, 3)), [[0, 1], [1, 0]], {}, r"labels.* \(2, 2\)"),
        (np.zeros((2, 3, 3)), [0], {}, "2 images and 1 labels"),
        (np.zeros((0, 3, 3)), np.zeros(0, int), {}, "there are no examples"),
        (
            np.zeros((3, 3, 3)),
            [0, 12, 1],
            {"num_classes": 10},
            "example 1 has the label 12.*0 to 9",
        ),
        (np.zeros((3, 3, 3)), [0, 1, -1], {}, "example 2 has the label -1"),
    ],
)
def test_invalid_arrays(images, labels, options, expected):
    with pytest.raises(ValueError, match=expected):
        from_arrays(images, labels, **options)


def test_digits():
    """kdist's copy equals scikit-learn's."""
    theirs = load_digits()
    images, labels = read_digits()
    np.testing.assert_array_equal(images, theirs.images)
    np.testing.assert_array_equal(labels, theirs.target)
    train, test = kdist.data.load("digits", batch=Batch(16))
    assert (train.num_examples, test.num_examples) == (1437, 360)
    assert (train.image_shape, train.num_classes) == ((8, 8, 1), 10)
    x, _ = next(iter(train))
    assert x.dtype == tf.uint8
    assert x.numpy().max() == 255


# IDX files


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files(tmp_path, suffix):
    write_mnist(tmp_path, suffix=suffix)
    assert has_idx_files(tmp_path)
    train, test = kdist.data.load(tmp_path, batch=Batch(5))
    assert (train.num_examples, test.num_examples, train.num_classes) == (20, 10, 10)
    fashion, _ = kdist.data.load("fashion_mnist", data_dir=tmp_path, batch=Batch(5))
    assert fashion.num_examples == 20
    assert fashion.class_names[9] == "Ankle boot"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda content: content[:-1], "is damaged"),
        (lambda content: content[:6], "is damaged"),
        (lambda content: b"\x89PNG" + content, "is not an IDX file"),
        (lambda content: b"", "is not an IDX file"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, damage, expected):
    path = tmp_path / "labels"
    write_idx(path, np.arange(7, dtype="uint8"))
    assert read_idx(path).tolist() == list(range(7))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"labels {expected}"):
        read_idx(path)


def test_a_truncated_gz_file_is_named(tmp_path):
    path = tmp_path / "labels.gz"
    write_idx(path, np.arange(200, dtype="uint8"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"labels.gz cannot be read .*download"):
        read_idx(path)


@pytest.mark.skipif(
    not has_idx_files(DEBIAN_FASHION_MNIST),
    reason="Debian's dataset-fashion-mnist is not installed",
)
def test_fashion_mnist_is_found_by_its_name(tmp_path):
    train, test = kdist.data.load("fashion_mnist", batch=Batch(64, 2), download=False)
    assert (train.num_examples, test.num_examples) == (60_000, 10_000)
    assert train.image_shape == (28, 28, 1)
    assert sum(int(np.sum(valid)) for _, _, valid in test.dataset().as_numpy_iterator()) == 10_000


# Image folders


def write_image(path, size=(12, 10), colour=(200, 10, 10), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, colour).convert(mode)
    image.save(path, format={".bmp": "BMP", ".png": "PNG"}.get(path.suffix, "JPEG"))


@pytest.fixture
def pets(tmp_path):
    for number in range(10):
        write_image(tmp_path / "Cat" / f"{number}.jpg", size=(12 + number, 10))
        write_image(tmp_path / "Dog" / f"{number}.jpg", colour=(10, 10, 200))
    return tmp_path


def test_image_folder(pets):
    train, test = kdist.data.load(pets, batch=Batch(4), operations="resize(8, 8)")
    assert (train.num_examples, test.num_examples) == (16, 4)
    assert train.class_names == ("Cat", "Dog")
    for x, y in train.dataset().take(8).as_numpy_iterator():
        assert x.shape == (4, 8, 8, 3)
        assert np.array_equal(x[..., 2].mean((1, 2)) > 100, y == 1)  # dogs are blue


def test_broken_images_are_skipped_and_logged(pets, capsys):
    (pets / "Cat" / "3.jpg").write_bytes((pets / "Cat" / "3.jpg").read_bytes()[:100])
    (pets / "Dog" / "empty.jpg").touch()
    (pets / "Dog" / "text.jpg").write_text("no image")
    write_image(pets / "Dog" / "really_a.bmp")
    (pets / "Dog" / "really_a.bmp").rename(pets / "Dog" / "bitmap.jpg")
    write_image(pets / "Dog" / "grey.jpg", mode="L")
    write_image(pets / "Dog" / "transparent.png", mode="RGBA")
    train, test = kdist.data.load(pets, batch=Batch(2), operations="resize(8, 8)")
    assert train.num_examples + test.num_examples == 22
    logged = capsys.readouterr().err
    assert "skipped 3 of 25 images" in logged
    for name in ("Cat/3.jpg", "Dog/empty.jpg", "Dog/text.jpg"):
        assert name in logged
    shapes = [x.shape for x, *_ in [*train.dataset().take(9), *test.dataset()]]
    assert set(shapes) == {(2, 8, 8, 3)}


def test_files_of_other_programs_are_no_classes_and_no_images(pets, capsys):
    write_image(pets / "Cat" / ".ipynb_checkpoints" / "0-checkpoint.jpg")
    write_image(pets / ".ipynb_checkpoints" / "0.jpg")
    write_image(pets / "__MACOSX" / "Cat" / "0.jpg")
    (pets / "Cat" / "._0.jpg").touch()
    (pets / "Cat" / "new.webp").touch()
    (pets / "Bird").mkdir()
    train, test = kdist.data.load(pets, batch=Batch(2), operations="resize(8, 8)")
    assert train.class_names == ("Bird", "Cat", "Dog")
    assert train.num_examples + test.num_examples == 20
    logged = capsys.readouterr().err
    assert "1 files of other types are ignored (.webp); images are .jpg, " in logged
    assert "no images of the classes Bird" in logged


@pytest.mark.parametrize("test_part", ["test", "val", "validation"])
def test_train_and_test_folders(tmp_path, test_part):
    for part, number in (("train", 3), (test_part, 2)):
        for name in ("a", "b"):
            for i in range(number):
                write_image(tmp_path / part / name / f"{i}.png")
    train, test = kdist.data.load(tmp_path, batch=Batch(2), operations="resize(8, 8)")
    assert (train.num_examples, test.num_examples) == (6, 4)


def test_a_third_part_of_a_dataset_is_ignored_and_named(tmp_path, capsys):
    for part in ("train", "test", "val"):
        for name in ("a", "b"):
            write_image(tmp_path / part / name / "0.png")
    train, test = kdist.data.load(tmp_path, batch=Batch(2), operations="resize(8, 8)")
    assert (train.num_examples, test.num_examples) == (2, 2)
    assert re.search("folders val are ignored.*those of test for testing", capsys.readouterr().err)


def test_classes_one_folder_deeper_are_named(tmp_path):
    for name in ("a", "b"):
        write_image(tmp_path / "train" / name / "0.png")
    with pytest.raises(ValueError, match=r"a single folder, train, with 2 .*pass .*/train$"):
        kdist.data.load(tmp_path, batch=Batch(2), operations="resize(8, 8)")


def test_parts_of_a_dataset_are_no_classes(tmp_path):
    for part in ("Training", "Testing"):
        for name in ("a", "b"):
            write_image(tmp_path / part / name / "0.png")
    with pytest.raises(ValueError, match="Testing, Training have the same folders, a, b.*rename"):
        kdist.data.load(tmp_path, batch=Batch(2), operations="resize(8, 8)")


def test_invalid_image_folders(tmp_path, pets):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        kdist.data.load(tmp_path / "nowhere" / "x", batch=Batch(1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images in class folders.*write text:"):
        kdist.data.load(tmp_path / "empty", batch=Batch(1))
    with pytest.raises(ValueError, match="differ in size.*--operations='resize"):
        kdist.data.load(pets, batch=Batch(1))


# TFDS


@pytest.fixture
def prepared(tmp_path):
    """Prepares a small TFDS dataset without a download."""
    import tensorflow_datasets as tfds

    class TinyShapes(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return self.dataset_info_from_configs(
                features=tfds.features.FeaturesDict(
                    {
                        "image": tfds.features.Image(shape=(None, None, 3)),
                        "label": tfds.features.ClassLabel(names=["round", "square"]),
                    }
                ),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, manager):
            return {"train": self._generate_examples(20)}

        def _generate_examples(self, number):
            for i in range(number):
                image = np.full((6 + i % 3, 5, 3), 10 * i, "uint8")
                yield i, {"image": image, "label": i % 2}

    TinyShapes(data_dir=tmp_path).download_and_prepare()
    return tmp_path


def test_tfds_by_name_with_split_expressions(prepared):
    load = {"data_dir": prepared, "batch": Batch(4), "operations": "resize(4, 4)"}
    train, test = kdist.data.load("tiny_shapes", download=False, **load)
    assert (train.num_examples, test.num_examples) == (16, 4)  # no test split: 80 % and the rest
    assert train.class_names == ("round", "square")
    train, test = kdist.data.load(
        "tiny_shapes", splits=("train[:50%]", "train[50%:75%]"), download=False, **load
    )
    assert (train.num_examples, test.num_examples) == (10, 5)
    for x, y in train.dataset().take(4).as_numpy_iterator():
        assert np.array_equal(x[:, 0, 0, 0] // 10 % 2, y)
    with pytest.raises(ValueError, match="has no split 'tset'; use one of train"):
        kdist.data.load("tiny_shapes", splits=("train", "tset"), **load)


def test_download_fails_fast_without_a_network(tmp_path):
    """Runs in a process without a network and without Debian's files."""
    code = """
import json, socket, sys, time
def refuse(*_, **__): raise OSError("no network")
socket.create_connection = refuse
import kdist
import importlib
load = importlib.import_module("kdist.data.datasets")
load.DEBIAN_FASHION_MNIST = "nowhere"
began = time.monotonic()
try:
    kdist.data.load("fashion_mnist", batch=kdist.Batch(1), data_dir=sys.argv[1])
except kdist.data.DatasetUnavailable as error:
    print(json.dumps([str(error), time.monotonic() - began]))
"""
    proxies = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    message, seconds = python(code, [str(tmp_path)], environment=proxies)
    assert "no network" in message
    assert "--dataset=digits" in message
    assert "apt-get install dataset-fashion-mnist" in message
    assert seconds < 30


def test_download_can_be_disabled(tmp_path):
    with pytest.raises(DatasetUnavailable, match="--download"):
        kdist.data.load("mnist", batch=Batch(1), data_dir=tmp_path, download=False)


def test_unknown_names_suggest_known_ones():
    with pytest.raises(ValueError, match="did you mean fashion_mnist"):
        kdist.data.load("fashion_mnits", batch=Batch(1))
    with pytest.raises(ValueError, match="unknown dataset 'zzzzzz'"):
        kdist.data.load("zzzzzz", batch=Batch(1))


def test_number_of_training_examples():
    train, test = kdist.data.load("digits", batch=Batch(2), examples=10)
    assert (train.num_examples, test.num_examples) == (10, 360)
