"""Sources of other libraries in `fit`: equal to one device, and resumed within an epoch."""

import collections
import contextlib
import itertools
import json
import logging
import sys
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.callbacks import Checkpoint, Telemetry
from kdist.checkpoint import CheckpointFiles
from kdist.data.batches import decode_state, encode_state
from tests.forked import python_tasks
from tests.tiers import covering, seldom

ROWS, BATCH, STEPS = 44, 8, 6  # the last batch has four rows
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")


class Examples:
    """Random access to the examples, as Grain and PyTorch want it."""

    def __len__(self):
        return ROWS

    def __repr__(self):  # by which Grain's loader recognizes its source when it resumes
        return "Examples"

    def __getitem__(self, index):
        return X[index], Y[index]


class Batches:
    """Batches in an order that depends on the epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self):
        return np.random.default_rng(self.epoch).permutation(ROWS)

    def __iter__(self):
        order = self.order()
        for start in range(0, ROWS, BATCH):
            chosen = order[start : start + BATCH]
            yield X[chosen], Y[chosen]


class StatefulBatches(Batches):
    """The same with a state, which is that of the batch read last."""

    start, next = 0, 0

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.start = state["next"]

    def __iter__(self):
        batches = list(super().__iter__())
        first, self.start = self.start, 0
        for number, batch in enumerate(batches[first:], first):
            self.next = number + 1
            yield batch


def grain_dataset(directory):
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(Examples()).seed(3).shuffle().to_iter_dataset().batch(BATCH)


def endless_grain_dataset():
    """Returns a dataset in another order in each pass."""
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(Examples()).seed(3).shuffle().repeat().batch(BATCH)


def grain_loader(directory):
    grain = pytest.importorskip("grain")
    sampler = grain.samplers.IndexSampler(ROWS, num_epochs=1, shuffle=True, seed=3)
    return grain.DataLoader(
        data_source=Examples(), sampler=sampler, operations=[grain.transforms.Batch(BATCH)]
    )


def stateful_torch_loader(directory):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(Examples(), BATCH, sampler=torch_sampler())


def torch_loader(directory):
    torch = pytest.importorskip("torch")
    return torch.utils.data.DataLoader(Examples(), BATCH, sampler=torch_sampler())


def torch_sampler():
    """Returns a sampler whose order is a function of its seed and the epoch."""
    torch = pytest.importorskip("torch")
    return torch.utils.data.DistributedSampler(Examples(), num_replicas=1, rank=0, seed=3)


def hugging_face(directory):
    datasets = pytest.importorskip("datasets")
    columns = datasets.IterableDataset.from_generator(_rows, gen_kwargs={"parts": [0, 1]})
    return columns.batch(BATCH).with_format("numpy")


def _rows(parts):
    for part in parts:
        for x, y in zip(X[part::2], Y[part::2], strict=True):
            yield {"x": x, "y": y}


def webdataset(directory):
    library = pytest.importorskip("webdataset")
    pattern = str(directory / "shard-%03d.tar")
    if not list(directory.glob("*.tar")):
        with library.ShardWriter(pattern, maxcount=16, verbose=0) as writer:
            for number in range(ROWS):
                writer.write({"__key__": f"{number:04d}", "x.npy": X[number], "y.cls": Y[number]})
    shards = sorted(map(str, directory.glob("*.tar")))
    dataset = library.WebDataset(shards, shardshuffle=False).decode()
    return dataset.to_tuple("x.npy", "y.cls").batched(BATCH)


def tfrecords(directory):
    path = str(directory / "examples.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for x, y in zip(X, Y, strict=True):
            features = {
                "x": tf.train.Feature(float_list=tf.train.FloatList(value=x)),
                "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[y])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    features = {
        "x": tf.io.FixedLenFeature([3], tf.float32),
        "y": tf.io.FixedLenFeature([], "int64"),
    }

    def parse(text):
        example = tf.io.parse_single_example(text, features)
        return example["x"], example["y"]

    records = tf.data.TFRecordDataset(path).map(parse)
    return records.shuffle(16, seed=3, reshuffle_each_iteration=False).batch(BATCH)


def columns(batch):
    return batch["x"], batch["y"]


# Source, arguments of `from_batches` after it (None: `fit` receives the source), and whether a
# checkpoint holds the place. One row each in docs/guides/other_data.md.
SOURCES = {
    "Python with a state": (lambda _: StatefulBatches(), (), True),
    "Python without": (lambda _: Batches(), (), False),
    "Grain dataset": (grain_dataset, (), True),
    "Grain loader": (grain_loader, (), True),
    "PyTorch": (torch_loader, (), False),
    "torchdata": (stateful_torch_loader, (), True),
    "Hugging Face": (hugging_face, (columns,), True),
    "WebDataset": (webdataset, (), False),
    "TFRecord": (tfrecords, None, False),
}


class Interruption(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Stops training after a number of steps, or of validations, like a crash."""

    def __init__(self, steps=None, validations=1):
        super().__init__()
        self._steps, self._validations = steps, validations

    def on_train_batch_end(self, batch, logs=None):
        if self._steps is not None:
            self._steps -= 1
            if not self._steps:
                raise Interruption

    def on_test_end(self, logs=None):
        self._validations -= 1
        if self._steps is None and not self._validations:
            raise Interruption


def fit(data, strategy=None, callbacks=(), epochs=2, compile=None, **options):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with (strategy or kdist.create_strategy("one_device")).scope():
        inputs = keras.Input((3,))
        model = kdist.Model(inputs, keras.layers.Dense(2, activation="softmax")(inputs))
        model.compile(
            keras.optimizers.Adam(0.1), "sparse_categorical_crossentropy", **(compile or {})
        )
    with contextlib.suppress(Interruption):
        model.fit(data, epochs=epochs, callbacks=list(callbacks), verbose=0, **options)
    return [variable.numpy() for variable in model.variables + model.optimizer.variables]


def assert_equal(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def made(name, directory):
    make, arguments, has_place = SOURCES[name]
    keras.utils.set_random_seed(1)  # tf.data derives seeds from it when it is called
    source = make(directory)
    data = source if arguments is None else kdist.data.from_batches(source, *arguments)
    return data, has_place


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", SOURCES)
def test_training_equals_one_device_and_resumes_within_an_epoch(name, tmp_path, mirrored, caplog):
    caplog.set_level(logging.WARNING)
    whole = fit(made(name, tmp_path)[0], epochs=3)
    assert_close(fit(made(name, tmp_path)[0], mirrored, epochs=3), whole)
    directory = tmp_path / "checkpoints"
    data, has_place = made(name, tmp_path)
    # In the second of three epochs, so that the order of each epoch counts, and the next one begins
    # at its first batch.
    fit(data, callbacks=[Checkpoint(directory, every_steps=1), Interrupt(STEPS + 3)])
    checkpoint = Checkpoint(directory)
    resumed = fit(made(name, tmp_path)[0], callbacks=[checkpoint], epochs=3)
    assert checkpoint.resumed_from == STEPS + 2
    assert_equal(resumed, whole)
    is_batch_source = SOURCES[name][1] is not None
    assert ("read again" in caplog.text) == (is_batch_source and not has_place)


class SizedBatches(StatefulBatches):
    def __len__(self):
        return STEPS


class BatchesBeyondTheirLength(StatefulBatches):
    def __len__(self):
        return 4


class EndlessBatches(StatefulBatches):
    """Passes without an end between them."""

    def __iter__(self):
        first, self.start = self.start, 0
        for number in itertools.count(first):
            self.epoch, batch = divmod(number, STEPS)
            self.next = number + 1
            yield list(Batches.__iter__(self))[batch]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("source", "steps", "options"),
    [
        (StatefulBatches, None, {"validation_data": kdist.data.from_batches(Batches())}),
        (SizedBatches, None, {"validation_data": kdist.data.from_batches(Batches())}),
        (StatefulBatches, 3, {"compile": {"steps_per_execution": 4}}),  # calls of 4, 2, and 4 steps
        (BatchesBeyondTheirLength, 5, {}),
        (EndlessBatches, 5, {"steps_per_epoch": 4}),
        *seldom(
            [
                (SizedBatches, 8, {"steps_per_epoch": 4}),
                (EndlessBatches, 4, {"steps_per_epoch": 4}),
                (StatefulBatches, 6, {}),
            ]
        ),
        (endless_grain_dataset, 6, {"steps_per_epoch": 4}),
    ],
)
def test_checkpoints_around_the_end_of_an_epoch(tmp_path, source, steps, options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eight steps of a pass with six
        whole = fit(kdist.data.from_batches(source()), **options)
        callbacks = [Checkpoint(tmp_path, every_steps=1), Interrupt(steps and steps + 1)]
        fit(kdist.data.from_batches(source()), callbacks=callbacks, **options)
        checkpoint = Checkpoint(tmp_path)
        resumed = fit(kdist.data.from_batches(source()), callbacks=[checkpoint], **options)
    assert checkpoint.resumed_from
    assert_equal(resumed, whole)


def of_tensorflow(length=None):
    spec = tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.int64)
    data = tf.data.Dataset.from_generator(lambda: iter(Batches()), output_signature=spec)
    return data.apply(tf.data.experimental.assert_cardinality(length)) if length else data


ENDING = {
    "with a state": lambda: kdist.data.from_batches(StatefulBatches()),
    "without": lambda: kdist.data.from_batches(Batches()),
    "of known length": lambda: kdist.data.from_batches(SizedBatches()),
    "tf.data": of_tensorflow,
    "tf.data of known length": lambda: of_tensorflow(STEPS),
}


# Passes of six batches, so epochs of 4, 2, 4, and 2 steps. None: in the validation of the second.
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("kind", "steps"), covering(list(ENDING), [6, 9, None, 7, 11]))
def test_data_that_end_within_an_epoch(tmp_path, kind, steps):
    options = {"steps_per_epoch": 4, "epochs": 4, "validation_data": (X, Y)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # data of known length that end
        whole = fit(ENDING[kind](), **options)
        callbacks = [Checkpoint(tmp_path, every_steps=1), Interrupt(steps, validations=2)]
        fit(ENDING[kind](), callbacks=callbacks, **options)
        checkpoint = Checkpoint(tmp_path)
        resumed = fit(ENDING[kind](), callbacks=[checkpoint], **options)
    assert checkpoint.resumed_from == (steps - 1 if steps else 6)
    assert checkpoint.model.training_state.position[:3] == (3, 2, 12)
    assert_equal(resumed, whole)


def test_a_state_that_the_checkpoint_lacks_is_read_up_to_its_position(tmp_path, caplog):
    data = kdist.data.from_batches(Batches())
    fit(data, callbacks=[Checkpoint(tmp_path, every_steps=1), Interrupt(STEPS + 4)])
    data = kdist.data.from_batches(StatefulBatches())
    resumed = fit(data, callbacks=[Checkpoint(tmp_path)])
    assert "3 batches are read again" in caplog.text
    assert_equal(resumed, fit(kdist.data.from_batches(StatefulBatches())))


def test_a_place_beyond_a_pass_is_one_of_a_later_pass():
    data = kdist.data.from_batches(SizedBatches())
    expected = list(data.open_reader(passes=2, batches=1).dataset())
    found = list(data.open_reader(batches=2 * STEPS + 1).dataset())
    assert len(found) == STEPS - 1
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])


def test_the_place_saved_is_that_of_the_last_trained_batch(tmp_path):
    class Reading(StatefulBatches):
        furthest = 0

        def get_state(self):
            Reading.furthest = max(Reading.furthest, self.next)
            return super().get_state()

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            while Reading.furthest < batch + 2:  # until the batch after it has been read as well
                time.sleep(0.001)

    callbacks = [Slow(), Checkpoint(tmp_path, every_steps=1), Interrupt(4)]
    fit(kdist.data.from_batches(Reading()), callbacks=callbacks)
    place = CheckpointFiles(tmp_path).newest().state["place"]
    assert place["batches"] == 3
    assert decode_state(place["state"]) == {"next": 3}
    assert Reading.furthest > 3


def test_states_are_stored_without_pickling():
    state = {
        "text": "a", 3: [1, 2.5, None, True], "raw": b"\x00\xff", "pair": (1, "b"),
        "rows": np.arange(6, dtype="int16").reshape(2, 3), "number": np.float32(2),
    }  # fmt: skip
    restored = decode_state(json.loads(json.dumps(encode_state(state))))
    np.testing.assert_equal(restored, state)
    assert restored["rows"].dtype == "int16"
    assert isinstance(restored["pair"], tuple)
    with pytest.raises(TypeError, match="object"):
        encode_state({"a": [object()]})


def test_wrong_sources_are_refused(mirrored):
    with pytest.raises(TypeError, match="iterator"):
        kdist.data.from_batches(iter(Batches()))
    with pytest.raises(TypeError, match="DataLoader"):
        kdist.data.from_batches(Examples())
    with pytest.raises(TypeError, match="select"):
        kdist.data.from_batches(Batches(), "x")
    for source, message in (
        ([{"x": X, "y": Y}], "dict"),
        ([], "no batches"),
        (list(zip(X, Y, strict=True)), "single example"),
        ([([[1.0, 2.0], [1.0]], [0, 1])], "pad"),
        (Sharded(), "num_replicas=1"),
        (EndlessLoader(), "steps_per_epoch"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(kdist.data.from_batches(source), mirrored)
    with pytest.raises(ValueError, match="targets"):
        fit(kdist.data.from_batches(Batches()), y=Y)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="steps"):
        kdist.Model.of(model).predict(kdist.data.from_batches(EndlessLoader()))


class Sharded(Batches):
    """As a PyTorch loader with a `DistributedSampler`, of which each process reads a part."""

    class sampler:
        num_replicas = 2


class EndlessLoader(EndlessBatches):
    """As Grain's `MapDataset.repeat()`, whose length is no number of batches."""

    def __len__(self):
        return sys.maxsize // BATCH


@pytest.mark.slow
def test_an_error_of_the_source_ends_fit_and_the_run_resumes_before_it(tmp_path, mirrored):
    class Failing(StatefulBatches):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number == 4:
                    raise OSError("the disk is gone")
                yield batch

    callbacks = [Checkpoint(tmp_path, every_steps=1)]
    with pytest.raises(tf.errors.OpError, match="the disk is gone"):
        fit(kdist.data.from_batches(Failing()), mirrored, callbacks)
    checkpoint = Checkpoint(tmp_path)
    resumed = fit(kdist.data.from_batches(StatefulBatches()), mirrored, [checkpoint])
    assert checkpoint.resumed_from == 4
    assert_equal(resumed, fit(kdist.data.from_batches(StatefulBatches()), mirrored))


def test_a_state_of_another_source_is_refused(tmp_path):
    class Other(StatefulBatches):
        def set_state(self, state):
            raise KeyError("offset")

    fit(
        kdist.data.from_batches(StatefulBatches()),
        callbacks=[Checkpoint(tmp_path, every_steps=1), Interrupt(4)],
    )
    with pytest.raises(ValueError, match="state of Other"):
        fit(kdist.data.from_batches(Other()), callbacks=[Checkpoint(tmp_path)])


@pytest.mark.slow
def test_rows_of_uneven_batches_and_mappings_count_once(mirrored):
    batches = [(X[:8], Y[:8]), (X[8:9], Y[8:9]), (X[9:16], Y[9:16])]
    expected = fit(kdist.data.from_batches(batches))
    assert_close(fit(kdist.data.from_batches(batches), mirrored), expected)
    mappings = [collections.UserDict(x=collections.UserDict(a=x), y=y) for x, y in batches]
    found = kdist.data.from_batches(mappings, columns).open_reader()
    x, _ = next(iter(found.dataset()))
    np.testing.assert_array_equal(x["a"], X[:8])


def test_numbers_are_not_truncated():
    batches = [([[1, 2]], [0]), ([[1.5, 2.5]], [1]), ([[0.5, 3]], [0])]
    data = kdist.data.from_batches(batches).open_reader().dataset()
    np.testing.assert_array_equal([x[0] for x, _ in data], [[1, 2], [1.5, 2.5], [0.5, 3]])
    data = kdist.data.from_batches([*batches[:1] * 2, batches[1]]).open_reader().dataset()
    with pytest.raises(tf.errors.OpError, match="int64"):
        list(data)


def test_checkpoints_and_telemetry_count_the_examples(tmp_path):
    telemetry = Telemetry(tmp_path / "run", device_seconds=None)
    callbacks = [telemetry, Checkpoint(tmp_path / "checkpoints")]
    fit(kdist.data.from_batches(Batches()), callbacks=callbacks)
    assert CheckpointFiles(tmp_path / "checkpoints").newest().state["examples"] == 12 * BATCH
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["examples"] == 12 * BATCH


@pytest.mark.slow
def test_own_loops_resume_within_an_epoch(tmp_path, mirrored):
    def run(directory, stop=None):
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            layer, optimizer = keras.layers.Dense(2), keras.optimizers.Adam(0.1)
            layer.build((None, 3))

        @kdist.step(mirrored, steps_per_execution=2)
        def train_step(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(y, layer(x), True)
                loss = kdist.mean(losses)
            gradients = tape.gradient(loss, layer.trainable_variables)
            kdist.apply(optimizer, gradients, layer.trainable_variables)
            return {"loss": loss}

        callbacks = [Interrupt(stop)] if stop else []
        options = {"run_dir": directory, "checkpoint_steps": 1, "callbacks": callbacks}
        with (
            contextlib.suppress(Interruption),
            kdist.session(layer, optimizer, **options) as session,
        ):
            list(session.run(train_step, kdist.data.from_batches(StatefulBatches()), epochs=2))
        return [variable.numpy() for variable in layer.variables]

    whole = run(tmp_path / "whole")
    run(tmp_path / "run", stop=5)
    assert CheckpointFiles(tmp_path / "run" / "checkpoints").newest().step == 8
    assert_equal(run(tmp_path / "run"), whole)


@pytest.mark.slow
def test_evaluation_and_prediction_read_such_batches(mirrored):
    with mirrored.scope():
        inputs = keras.Input((3,))
        model = kdist.Model(inputs, keras.layers.Dense(2, activation="softmax")(inputs))
        model.compile("sgd", "sparse_categorical_crossentropy")
    batches = kdist.data.from_batches([(X[:8].tolist(), Y[:8].tolist()), (X[8:13], Y[8:13])])
    expected = model.evaluate(X[:13], Y[:13], verbose=0)
    assert model.evaluate(batches, verbose=0) == pytest.approx(expected, rel=1e-5)
    outputs = model.predict(batches, verbose=0)
    np.testing.assert_allclose(outputs, model.predict(X[:13], verbose=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("tasks", "strategy"),
    [
        ({"worker": 2}, "multi_worker"),
        *seldom([({"chief": 1, "worker": 1, "ps": 1}, "parameter_server")]),
    ],
)
@pytest.mark.slow
def test_jobs_of_several_processes_resume(tmp_path, tasks, strategy):
    results = python_tasks(_JOB, tasks, arguments=[strategy, str(tmp_path)])
    whole = fit(kdist.data.from_batches(StatefulBatches()))
    assert_close([np.asarray(value, "float32") for value in results[0]], whole[:2])


_JOB = """
import json, pathlib, sys
import kdist
from kdist.callbacks import Checkpoint
from tests.data.test_batches import Interrupt, StatefulBatches, fit

name, directory = sys.argv[1:]
strategy = kdist.create_strategy(name)
options = {"compile": {"max_staleness": 0}} if name == "parameter_server" else {}
def run(*callbacks):
    data = kdist.data.from_batches(StatefulBatches())
    return fit(data, strategy, callbacks, **options)
run(Checkpoint(directory, every_steps=1), Interrupt(9))
checkpoint = Checkpoint(directory)
values = run(checkpoint)
assert checkpoint.resumed_from == 8, checkpoint.resumed_from
print(json.dumps([value.tolist() for value in values[:2]]))
"""
