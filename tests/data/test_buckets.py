"""Folders of images at URLs: the same batches as from a directory, here from fsspec's memory."""

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

import kdist
from kdist.batch import Batch
from kdist.mirror import Store, cache

OPTIONS = {"batch": Batch(4), "operations": "resize(8, 8)|random_flip()", "seed": 3}


@pytest.fixture(autouse=True)
def _empty_store(monkeypatch, tmp_path):
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    monkeypatch.setenv(cache.CACHE_DIR, str(tmp_path / "cache"))


def upload(directory, url):
    store = Store(url)
    for path in directory.rglob("*"):
        if path.is_file():
            store.put(path, path.relative_to(directory).as_posix())


def assert_same_batches(found, expected):
    assert found.num_examples == expected.num_examples
    for part in ((0, 1), (1, 2)):  # all rows, and those of the second of two workers
        pairs = zip(
            found.dataset(2, part).take(4).as_numpy_iterator(),
            expected.dataset(2, part).take(4).as_numpy_iterator(),
            strict=True,
        )
        for one, other in pairs:
            for values, same in zip(one, other, strict=True):
                np.testing.assert_array_equal(values, same)


def test_a_folder_of_images(tmp_path):
    generator = np.random.default_rng(0)
    for number in range(26):
        path = tmp_path / "pets" / ("cats", "dogs")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (9 + number % 3, 8, 3), "uint8")).save(path)
    upload(tmp_path / "pets", "memory://bucket/pets")
    found = kdist.data.load("memory://bucket/pets", **OPTIONS)
    expected = kdist.data.load(tmp_path / "pets", **OPTIONS)
    assert found[0].class_names == ("cats", "dogs")
    for pipelines in zip(found, expected, strict=True):
        assert_same_batches(*pipelines)


@pytest.mark.parametrize(
    ("name", "options"),
    [("memory://bucket/no", {}), ("fashion_mnist", {"data_dir": "memory://bucket/no"})],
)
def test_an_empty_url(name, options):
    with pytest.raises(kdist.data.DatasetUnavailable, match=r"memory://bucket/no has no files"):
        kdist.data.load(name, **OPTIONS, **options)
