"""Models exported to object storage, here to fsspec's memory."""

import json

import numpy as np
import pytest
import tensorflow as tf
from fsspec.implementations.memory import MemoryFileSystem

import kdist
from kdist.mirror import Store
from kdist.serving.core.model_directory import versions
from kdist.serving.exporting.bucket import next_version, put_version
from kdist.serving.platforms import fetch_models

URL = "memory://bucket/models/digits"


@pytest.fixture(scope="module")
def model():
    return kdist.models.mlp((4, 4, 1), 3)


@pytest.fixture
def store():
    """Returns an empty store."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return Store(URL)


def test_a_server_reads_what_was_exported(model, store, tmp_path, monkeypatch):
    written = []
    put, create = Store.put, Store.create
    monkeypatch.setattr(Store, "put", lambda *a: written.append(a[2]) or put(*a))
    monkeypatch.setattr(Store, "create", lambda *a: written.append(a[1]) or create(*a))
    store.write("1/variables/variables.index", b"")  # an export that was cut off
    version = kdist.serving.export(model, URL, classes=["a", "b", "c"], examples={})
    assert version == f"{URL}/2"
    of_version = [name for name in written if name.startswith("2/")]
    assert of_version[0] == "2/assets.extra/kdist.json"
    assert of_version[-1] == "2/saved_model.pb"
    metadata = json.loads(store.read("2/assets.extra/kdist.json"))
    assert (metadata["name"], metadata["version"]) == ("digits", 2)

    fetch_models(URL, tmp_path)
    assert versions(tmp_path) == [2]
    assert not (tmp_path / "1").exists()
    images = np.random.default_rng(0).random((5, 4, 4, 1), "float32")
    served = tf.saved_model.load(tmp_path / "2").signatures["serving_default"]
    found = served(inputs=tf.constant(images))["outputs"]
    np.testing.assert_allclose(found, model(images, training=False), rtol=1e-6)


def test_versions_are_never_replaced(model, store, tmp_path, monkeypatch):
    local = kdist.serving.export(model, tmp_path / "digits", examples={})
    assert put_version(local, URL) == f"{URL}/1"
    with pytest.raises(FileExistsError, match="1 exists"):
        kdist.serving.export(model, URL, 1, examples={})
    with pytest.raises(FileExistsError, match="1 exists"):
        put_version(local, URL, 1)
    # Another export has taken the next version since this one has looked for it.
    monkeypatch.setattr("kdist.serving.exporting.bucket.next_version", lambda url: 1)
    assert put_version(local, URL) == f"{URL}/2"
    assert next_version(URL) == 3
