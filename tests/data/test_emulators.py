"""Data, exports, and runs in buckets: fsspec's memory, and emulators on loopback.

The emulators are moto's S3 and one of Cloud Storage. They are no part of the extra `test`, as
botocore requires python-dateutil below 3, which constraints.txt pins higher. To test with them,
make environments of their own: pip install '.[test,s3]' 'moto[server]', and '.[test,gs]'
gcp-storage-emulator.
"""

import contextlib
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

import kdist
from kdist.batch import Batch
from kdist.launch.local_engine import reserve_ports
from kdist.mirror import Mirror, Store, cached
from kdist.mirror.mirror import fetched_checkpoint
from kdist.serving.core.model_directory import versions
from kdist.serving.platforms import fetch_models
from tests.telemetry.waiting import wait_until

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def running(command, log):
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["memory", "s3", "gs"])
def bucket(request, tmp_path_factory):
    """Returns the URL of an empty bucket in an emulator."""
    protocol = request.param
    if protocol == "memory":
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
        yield "memory://pets"
        return
    package, server = {"s3": ("s3fs", "moto"), "gs": ("gcsfs", "gcp_storage_emulator")}[protocol]
    for name in (package, server):
        pytest.importorskip(name, reason=f"the emulator of {protocol}:// is not installed")
    log = tmp_path_factory.mktemp("emulator") / "log"
    with reserve_ports(1) as (port,), pytest.MonkeyPatch.context() as patch:
        endpoint = f"http://127.0.0.1:{port}"
        if protocol == "s3":
            patch.setenv("AWS_ENDPOINT_URL", endpoint)
            patch.setenv("AWS_ACCESS_KEY_ID", "testing")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
            command = [sys.executable, "-c", code]
        else:
            patch.setenv("STORAGE_EMULATOR_HOST", endpoint)
            patch.setenv("FSSPEC_GS_TOKEN", "anon")
            code = "from gcp_storage_emulator.__main__ import main; main()"
            command = [sys.executable, "-c", code, "start", "--host=127.0.0.1", f"--port={port}"]
            command += ["--in-memory", "--default-bucket=pets"]
        import fsspec

        with running(command, log) as process:

            def is_created():
                assert process.poll() is None, log.read_text()[-2000:]
                with contextlib.suppress(Exception):
                    files = fsspec.filesystem(protocol, skip_instance_cache=True)
                    if protocol == "s3":
                        files.mkdir("pets")
                    return "pets" in [name.strip("/") for name in files.ls("")]
                return False

            wait_until(is_created, 120)
            yield f"{protocol}://pets"


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KDIST_CACHE_DIR", os.fspath(tmp_path / "cache"))


def test_images_in_a_bucket_are_those_of_a_directory(bucket, tmp_path):
    store, generator = Store(f"{bucket}/images"), np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "images" / ("cats", "dogs")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (9 + number % 3, 8, 3), "uint8")).save(path)
        store.put(path, path.relative_to(tmp_path / "images").as_posix())
    if not bucket.startswith("memory"):
        store._files.pipe_file(f"{store.root}/dogs/", b"")  # the placeholder of a folder
    options = {"batch": Batch(4), "operations": "resize(8, 8)|random_flip()", "seed": 3}
    found, _ = kdist.data.load(store.url, **options)
    expected, _ = kdist.data.load(tmp_path / "images", **options)
    for one, other in zip(found.dataset().take(4), expected.dataset().take(4), strict=True):
        for values, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(values, same)
    path = cached(store.url) / "cats" / "0.png"
    store.write("cats/0.png", path.read_bytes()[::-1])  # of the same size
    before = path.read_bytes()
    assert cached(store.url)
    assert path.read_bytes() == before[::-1]


def test_a_model_is_exported_and_read(bucket, tmp_path):
    model, url = kdist.models.mlp((4, 4, 1), 3), f"{bucket}/models/digits"
    assert kdist.serving.export(model, url, examples={}) == f"{url}/1"
    assert kdist.serving.export(model, url, examples={}) == f"{url}/2"
    store = Store(url)
    assert not store.create("2/assets.extra/kdist.json", b"")
    store.remove(["2/saved_model.pb"])  # as if the export was cut off
    fetch_models(url, tmp_path / "digits")
    assert versions(tmp_path / "digits") == [1]


def test_a_checkpoint_is_resumed_from(bucket, tmp_path):
    strategy = kdist.create_strategy("one_device")
    train, _ = kdist.data.load("digits", batch=Batch(32), examples=128)

    def fit(name, epochs, **options):
        keras.utils.set_random_seed(0)
        directory = tmp_path / name / "checkpoints"
        with strategy.scope():
            model = kdist.models.mlp(train.image_shape, train.num_classes)
            model.compile("sgd", "sparse_categorical_crossentropy")
        checkpoint = kdist.callbacks.Checkpoint(directory, **options)
        model.fit(train, epochs=epochs, callbacks=[checkpoint], verbose=0)
        return model.get_weights()

    whole = fit("whole", 2)
    url = f"{bucket}/runs/a"
    (tmp_path / "first").mkdir()
    with Mirror(url, tmp_path / "first") as mirror:
        fit("first", 1, mirror=mirror)
        wait_until(mirror.checkpoints, 60)
        (newest, *_) = mirror.checkpoints()
    for source in (url, f"{url}/{newest.names[0].rpartition('/')[0]}"):
        name = source.rpartition("/")[2]
        for one, other in zip(whole, fit(f"from-{name}", 2, resume=source), strict=True):
            np.testing.assert_array_equal(one, other)
    with (
        pytest.raises(FileNotFoundError, match="no complete checkpoint"),
        fetched_checkpoint(f"{bucket}/runs/b"),
    ):
        pass
