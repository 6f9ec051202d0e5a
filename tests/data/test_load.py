"""Arguments of `load` and `Pipeline`."""

import os

import numpy as np
import pytest

import kdist
from kdist.batch import Batch
from kdist.data import DatasetUnavailable, Pipeline, from_arrays
from kdist.data.names import tfds_names
from kdist.data.operations import central_crop, random_crop, random_flip, resize


@pytest.fixture
def source():
    return from_arrays(np.zeros((20, 8, 8, 1), "uint8"), np.arange(20) % 3)


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"cache": "never"}, ValueError, "cache='never'"),
        ({"operations": (random_flip,)}, TypeError, "not an operation.*resize"),
        ({"operations": "flip()"}, ValueError, "not an operation.*resize"),
        ({"operations": "random_crop(9, 9)"}, ValueError, r"\(9, 9\) pixels.*\(8, 8\)"),
        ({"operations": "random_crop(4, 11, 1)"}, ValueError, r"\(2, 9\) pixels"),
        ({"operations": "resize(4, 4)|random_crop(5, 4)"}, ValueError, r"they have \(4, 4\)"),
        ({"seed": -1}, ValueError, "seed=-1.*--seed"),
        ({"seed": 0.5}, ValueError, "seed=0.5"),
    ],
)
def test_invalid_pipelines(source, options, error, expected):
    with pytest.raises(error, match=expected):
        Pipeline(source, Batch(4), **options)


@pytest.mark.parametrize("batch", [64, None, "64"])
def test_a_batch_that_is_a_number(source, batch):
    with pytest.raises(TypeError, match=r"from_global\(64, replicas="):
        Pipeline(source, batch)
    with pytest.raises(TypeError, match=r"from_global\(64, replicas="):
        kdist.data.load("digits", batch=batch)


def test_load_passes_its_options_to_both_pipelines():
    for pipeline in kdist.data.load("digits", batch=Batch(8), parallel_calls=3):
        assert pipeline._parallel_calls == 3


def test_a_crop_as_large_as_the_padded_image(source):
    pipeline = Pipeline(source, Batch(4), operations=random_crop(10, 10, padding=1))
    assert next(iter(pipeline))[0].shape == (4, 10, 10, 1)


def test_negative_start_step(source):
    with pytest.raises(ValueError, match="start_step=-1"):
        Pipeline(source, Batch(4)).dataset(start_step=-1)


def test_images_of_unsupported_types():
    for dtype in ("int64", "uint16", "str"):
        with pytest.raises(ValueError, match="images of type .*uint8"):
            from_arrays(np.zeros((2, 3, 3), dtype), [0, 1])


def test_wrong_number_of_class_names():
    with pytest.raises(ValueError, match="3 class names for 2 classes"):
        from_arrays(np.zeros((2, 3, 3), "uint8"), [0, 1], num_classes=2, class_names="abc")


@pytest.mark.slow
def test_eval_operations():
    operations = (resize(12, 12), random_crop(10, 10))
    load = {"batch": Batch(8), "operations": operations}
    train, test = kdist.data.load("digits", eval_operations=[central_crop(10, 10)], **load)
    assert train.image_shape == test.image_shape == (10, 10, 1)
    assert "random_crop" in repr(train)
    with pytest.raises(ValueError, match=r"\(10, 10, 1\), test .*\(12, 12, 1\).*eval_operations"):
        kdist.data.load("digits", **load)


def test_split_expressions_need_tfds(tmp_path):
    for name in ("digits", tmp_path):
        with pytest.raises(ValueError, match="fixed test part"):
            kdist.data.load(name, batch=Batch(1), splits=("train[:1%]", "test"))


def test_tfds_names_with_a_configuration(tmp_path):
    options = {"batch": Batch(1), "data_dir": tmp_path, "download": False}
    with pytest.raises(DatasetUnavailable, match="cifar10_corrupted is not prepared"):
        kdist.data.load("cifar10_corrupted/brightness_1", **options)
    with pytest.raises(ValueError, match="cifar10_corrupted/britghness"):
        kdist.data.load("cifar10_corrupted/britghness", **options)
    with pytest.raises(ValueError, match="unknown dataset 'Foo Bar'"):
        kdist.data.load("Foo Bar", **options)


@pytest.mark.slow  # importing the definitions of all datasets takes seconds
def test_names_are_those_of_tfds():
    import tensorflow_datasets

    names = set(tensorflow_datasets.list_builders(with_community_datasets=False)) - tfds_names()
    modules = {name: tensorflow_datasets.builder_cls(name).__module__ for name in names}
    # Other tests define datasets of their own.
    assert not [name for name, at in modules.items() if at.startswith("tensorflow_datasets.")]


def test_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/nowhere: no such directory"):
        kdist.data.load("~/nowhere", batch=Batch(1))


def test_fashion_mnist_error_lists_all_places(tmp_path, monkeypatch):
    monkeypatch.setattr("kdist.data.datasets.DEBIAN_FASHION_MNIST", "/nowhere/debian")
    with pytest.raises(DatasetUnavailable) as caught:
        kdist.data.load("fashion_mnist", batch=Batch(1), data_dir=tmp_path, download=False)
    for part in ("apt-get install dataset-fashion-mnist", "/nowhere/debian", os.fspath(tmp_path)):
        assert part in str(caught.value)


@pytest.mark.parametrize("operations", ["", "resize(2, 2)"])
def test_padding_is_zero(operations):
    ones = from_arrays(np.ones((3, 2, 2, 1), "uint8"), [1, 1, 1])
    pipeline = Pipeline(ones, Batch(4), training=False, operations=operations, cache=False)
    (x, y, valid), *_ = pipeline.dataset().as_numpy_iterator()
    assert valid.tolist() == [True, True, True, False]
    assert x[:, 0, 0, 0].tolist() == y.tolist() == [1, 1, 1, 0]


def test_evaluation_on_two_replicas_has_all_examples(mirrored):
    images = np.arange(11, dtype="uint8").reshape(11, 1, 1, 1)
    pipeline = Pipeline(from_arrays(images, np.zeros(11, int)), Batch(2, 2), training=False)
    seen = []
    for batch in mirrored.experimental_distribute_dataset(pipeline.dataset()):
        x, _, valid = (mirrored.experimental_local_results(part) for part in batch)
        assert [share.shape[0] for share in x] == [2, 2]
        seen += [i for a, b in zip(x, valid, strict=True) for i in a.numpy()[b.numpy()].ravel()]
    assert sorted(seen) == list(range(11))
