"""Random access to records, alone and for a TFDS dataset that does not fit in memory."""

import os

import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.batch import Batch
from kdist.data import Pipeline
from kdist.data.tfds import RecordSource


def parse(record):
    """Parses a record of two bytes: the number and label of the example."""
    values = tf.io.decode_raw(record, tf.uint8)
    return tf.reshape(values[:1], [1, 1, 1]), tf.cast(values[1], tf.int32)


def write(path, numbers, num_classes=3):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in numbers:
            writer.write(bytes([number, number % num_classes]))
    return path


def source_of(*files, num_classes=3):
    return RecordSource.from_files(files, parse, (1, 1, 1), num_classes)


def numbers_in(pipeline, steps=None, start_step=0):
    batches = pipeline.dataset(start_step).take(steps or pipeline.steps_per_epoch)
    return np.array([x.ravel() for x, *_ in batches.as_numpy_iterator()]).tolist()


@pytest.fixture
def source(tmp_path):
    first, second = write(tmp_path / "a", range(10)), write(tmp_path / "b", range(10, 30))
    return source_of((first, 0, -1), (second, 0, -1))


def test_records_of_several_files_have_consecutive_numbers(source):
    assert source.num_examples == 30
    batches = numbers_in(Pipeline(source, Batch(5), training=False))
    assert np.ravel(batches).tolist() == list(range(30))


def test_parts_from_files(tmp_path):
    path = write(tmp_path / "a", range(10))
    part = source_of((path, 2, 3), (path, 8, -1))
    batches = numbers_in(Pipeline(part, Batch(5), training=False))
    assert batches == [[2, 3, 4, 8, 9]]


def test_an_epoch_is_a_permutation_and_any_position_is_reached(source):
    pipeline = Pipeline(source, Batch(5), cache=False)
    steps = numbers_in(pipeline, 12)
    for epoch in (steps[:6], steps[6:]):
        assert sorted(np.ravel(epoch)) == list(range(30))
    assert steps[:6] != steps[6:]
    assert numbers_in(pipeline, 4, start_step=8) == steps[8:]


def test_a_subset(source):
    chosen = source.subset(6, seed=1)
    numbers = numbers_in(Pipeline(chosen, Batch(3), training=False))
    assert len({number for batch in numbers for number in batch}) == 6


def test_truncated_file(tmp_path):
    path = write(tmp_path / "a.tfrecord", range(10))
    content = path.read_bytes()
    for length in (1, 4, 5, 17):  # in the last checksum, in the record, in its header
        path.write_bytes(content[:-length])
        with pytest.raises(ValueError, match="a.tfrecord is truncated"):
            source_of((path, 0, -1))


def test_a_damaged_record(tmp_path):
    path = write(tmp_path / "a", range(10))
    source, content = source_of((path, 0, -1)), bytearray(path.read_bytes())
    content[12] ^= 1
    path.write_bytes(content)
    with pytest.raises(tf.errors.DataLossError, match="corrupted record"):
        numbers_in(Pipeline(source, Batch(5), training=False, cache=False))


def test_no_records(tmp_path):
    with pytest.raises(ValueError, match="no records in .*empty"):
        source_of((write(tmp_path / "empty", []), 0, -1))


def test_label_out_of_range(tmp_path):
    source = source_of((write(tmp_path / "a", range(6)), 0, -1), num_classes=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has the label"):
        numbers_in(Pipeline(source, Batch(3), training=False, cache=False))


# TFDS


@pytest.fixture
def prepared(tmp_path):
    """Prepares a dataset without its code, with other feature names and no test split."""
    import tensorflow_datasets as tfds

    class TinyKinds(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "picture": tfds.features.Image(shape=(None, None, 3)),
                "kind": tfds.features.ClassLabel(names=["even", "odd"]),
            }
            return self.dataset_info_from_configs(
                features=tfds.features.FeaturesDict(features),
                supervised_keys=("picture", "kind"),
            )

        def _split_generators(self, manager):
            return {"train": self._examples(range(20)), "validation": self._examples(range(6))}

        def _generate_examples(self):
            raise NotImplementedError

        def _examples(self, numbers):
            for i in numbers:
                picture = np.full((6 + i % 3, 5, 3), 10 * i, "uint8")
                yield i, {"picture": picture, "kind": i % 2}

    TinyKinds(data_dir=tmp_path).download_and_prepare()
    return {"data_dir": tmp_path, "batch": Batch(4), "operations": "resize(4, 4)", "seed": 3}


def test_disk_and_memory_return_the_same_batches(prepared, monkeypatch, capsys):
    in_memory = kdist.data.load("tiny_kinds", cache=False, **prepared)
    monkeypatch.setattr("kdist.data.tfds.MAX_MEMORY_FRACTION", 0.0)
    on_disk = kdist.data.load("tiny_kinds", cache=False, **prepared)
    assert "read from disk on demand" in capsys.readouterr().err
    assert [part.num_examples for part in on_disk] == [20, 6]
    assert on_disk[0].class_names == ("even", "odd")
    for one, other in zip(in_memory, on_disk, strict=True):
        pairs = zip(one.dataset(1).take(7), other.dataset(1).take(7), strict=True)
        for batch, same in pairs:
            assert all(np.array_equal(a, b) for a, b in zip(batch, same, strict=True))


def test_split_expressions_on_disk(prepared, monkeypatch):
    monkeypatch.setattr("kdist.data.tfds.MAX_MEMORY_FRACTION", 0.0)
    train, test = kdist.data.load(
        "tiny_kinds", splits=("train[25%:75%]+validation", "train[75%:]"), **prepared
    )
    assert (train.num_examples, test.num_examples) == (16, 5)
    with pytest.raises(ValueError, match=r"the split 'train\[:0%\]' is empty"):
        kdist.data.load("tiny_kinds", splits=("train[:0%]", "train"), **prepared)
    with pytest.raises(ValueError, match=r"no split 'train\[x%:\]'.*train, validation"):
        kdist.data.load("tiny_kinds", splits=("train[x%:]", "train"), **prepared)


def test_a_url_has_the_same_batches(prepared, monkeypatch):
    monkeypatch.setenv("KDIST_CACHE_DIR", os.fspath(prepared["data_dir"] / "cache"))
    bucket = kdist.mirror.Store("memory://tfrecords/tfds")
    for path in (prepared["data_dir"] / "tiny_kinds").rglob("*.*"):
        bucket.put(path, path.relative_to(prepared["data_dir"]).as_posix())
    bucket.write("other/1.0.0/large.tfrecord", b"not fetched")
    on_disk = kdist.data.load("tiny_kinds", **prepared)
    fetched = kdist.data.load("tiny_kinds", **{**prepared, "data_dir": f"{bucket.url}/"})
    copy = prepared["data_dir"] / "cache" / "memory" / "tfrecords" / "tfds"
    assert os.listdir(copy) == ["tiny_kinds"]
    for one, other in zip(on_disk, fetched, strict=True):
        assert one.num_examples == other.num_examples
        for part in ((0, 1), (1, 2)):  # all rows, and those of the second of two workers
            pairs = zip(one.dataset(1, part).take(7), other.dataset(1, part).take(7), strict=True)
            for batch, same in pairs:
                assert all(np.array_equal(a, b) for a, b in zip(batch, same, strict=True))
