"""Batches that data workers prepare: those of one process, each once, in their order."""

import contextlib
import gc
import socket
import threading

import keras
import numpy as np
import pytest
from PIL import Image

import kdist
from kdist.batch import Batch
from kdist.data import Pipeline, from_arrays, workers
from kdist.data.image_folder import load_image_folder
from kdist.data.worker_addresses import parse_data_workers
from kdist.launch.local_engine import reserve_ports
from tests.forked import running
from tests.telemetry.waiting import wait_until

SERVERS = """
import sys
from kdist.data import workers

ports = list(map(int, sys.argv[1:]))
servers = [
    workers.start("127.0.0.1", port, allow_remote=False, batch_port=other)
    for port, other in (ports[:2], ports[2:])
]
servers[0].join()
"""


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """Two data workers in another process: within this one, they took up to minutes to end."""
    output = tmp_path_factory.mktemp("workers") / "output"
    with reserve_ports(4) as ports, running(SERVERS, ports, output=output):
        wait_until(lambda: all(map(is_open, ports)), seconds=60)
        yield [f"127.0.0.1:{port}" for port in ports[::2]]


def is_open(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.fixture
def folder(tmp_path):
    generator = np.random.default_rng(0)
    for number in range(26):
        path = tmp_path / "images" / ("cats", "dogs")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = generator.integers(0, 256, (9 + number % 3, 8, 3), "uint8")
        Image.fromarray(image).save(path)
    return tmp_path / "images"


def batches_of(pipeline, number, **options):
    return list(pipeline.dataset(**options).take(number).as_numpy_iterator())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("training", "options"),
    [(True, {}), (True, {"start_step": 5, "part": (1, 2)}), (False, {})],
    ids=["training", "a resumed worker", "evaluation"],
)
def test_batches_are_those_of_one_process(folder, addresses, training, options):
    source, _ = load_image_folder(folder)
    given = {"training": training, "operations": "resize(8, 8)|random_flip()", "seed": 3}
    alone = Pipeline(source, Batch(4), cache=False, **given)
    divided = Pipeline(source, Batch(4), data_workers=addresses, **given)
    assert divided.element_spec == alone.element_spec
    expected = batches_of(alone, 12, **options)
    found = batches_of(divided, 12, **options)
    assert len(found) == len(expected) == (12 if training else 6)
    for one, other in zip(found, expected, strict=True):
        for values, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(values, same)


def test_fit_reads_from_data_workers(folder, addresses):
    train, test = kdist.data.load(
        str(folder), batch=Batch(4), operations="resize(8, 8)", data_workers=",".join(addresses)
    )
    model = kdist.models.mlp(train.image_shape, train.num_classes)
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(train, validation_data=test, epochs=2, verbose=0).history
    assert len(history["val_accuracy"]) == 2


def test_a_file_that_a_data_worker_does_not_find(folder, addresses):
    source, _ = load_image_folder(folder)
    pipeline = Pipeline(source, Batch(4), operations="resize(8, 8)", data_workers=addresses)
    for path in folder.rglob("*.png"):
        path.unlink()
    with pytest.raises(Exception, match=r"\.png; No such file"):
        batches_of(pipeline, 1)


def test_examples_in_memory(addresses):
    source = from_arrays(np.zeros((8, 4, 4, 1), "uint8"), np.zeros(8, "int32"))
    with pytest.raises(ValueError, match="these examples are in the memory of this process"):
        Pipeline(source, Batch(4), data_workers=addresses)


def test_a_data_worker_that_does_not_answer(folder):
    source, _ = load_image_folder(folder)
    with reserve_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        pipeline = Pipeline(source, Batch(4), operations="resize(8, 8)", data_workers=address)
        with pytest.raises(ConnectionError, match=f"kdist data_worker --port={port}"):
            pipeline.dataset()


@pytest.mark.parametrize("text", ["cpu1", "cpu1:5050,cpu1:5050", "cpu1:none"])
def test_addresses(text):
    with pytest.raises(ValueError, match=f"data_workers={text}: "):
        parse_data_workers(text)


def test_other_machines_need_permission():
    with pytest.raises(ValueError, match="--allow_remote"):
        workers.start("192.0.2.1", 5050, allow_remote=False)


def test_a_port_in_use(addresses):
    port = int(addresses[0].rpartition(":")[2])
    with pytest.raises(RuntimeError, match=f"port {port}: Address already in use; choose another"):
        workers.start("127.0.0.1", port, allow_remote=False)


def test_a_process_ends_when_a_data_worker_is_silent(monkeypatch, caplog):
    """TensorFlow waits forever for a data worker that dies, within a call that cannot end."""
    ended = threading.Event()

    def end(code):
        assert code == 75
        ended.set()
        raise SystemExit

    monkeypatch.setattr(workers.os, "_exit", end)
    monkeypatch.setattr(workers, "ends_on_silence", True)
    monkeypatch.setattr(workers, "_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(workers, "_SILENCE_SECONDS", 0.2)
    with reserve_ports(1) as (port,), pytest.raises(SystemExit):
        workers._report_silence([f"127.0.0.1:{port}"], threading.Event())
    assert ended.is_set()
    assert f"the data worker 127.0.0.1:{port} has not answered" in caplog.text


def silence_threads():
    return [each for each in threading.enumerate() if each.name == "data workers"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one_device", "mirrored"])
def test_data_workers_are_watched_while_a_model_trains(folder, addresses, kind):
    gc.collect()
    before = len(silence_threads())
    during = []

    def count(batch, logs):
        if batch == 1:
            gc.collect()
        during.append(len(silence_threads()))

    strategy = kdist.create_strategy(kind, 2 if kind == "mirrored" else None)
    train, _ = kdist.data.load(
        str(folder), batch=Batch(4), operations="resize(8, 8)", data_workers=addresses
    )
    with strategy.scope():
        model = kdist.models.mlp(train.image_shape, train.num_classes)
        model.compile("sgd", "sparse_categorical_crossentropy")
    counter = keras.callbacks.LambdaCallback(on_train_batch_end=count)
    model.fit(train, epochs=2, verbose=0, callbacks=[counter])
    assert min(during) > before
    del train
    gc.collect()
    wait_until(lambda: len(silence_threads()) == before, seconds=60)  # it may be asking a worker
