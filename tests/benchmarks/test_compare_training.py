"""The program as a user runs it, with so few steps that its figures mean nothing."""

import functools
import os
import re

import pytest

from benchmarks import tables
from kdist.testing import python
from tests.benchmarks import programs

TINY = ["--models=mlp", "--steps=4", "--repetitions=1", "--local_batch_size=2"]


compare = functools.partial(programs.run, "compare_training")


def cells(text):
    """The table's lines without its head, by their first cell and steps a call."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {(line[0], line[1]): line[2:] for line in lines[2:]}


@pytest.mark.exhaustive
def test_table_has_the_rows_and_positive_ratios(tmp_path):
    process = compare(
        *TINY, "--variants=kdist,kdist_grouped,keras", "--save", f"--results_dir={tmp_path}"
    )
    assert process.returncode == 0, process.stderr[-3000:]
    table = cells(process.stdout)
    # No call has more steps than are timed.
    assert set(table) == {("kdist fit", "1"), ("kdist fit", "4"), ("Keras fit", "1")}
    for milliseconds, _, *ratios in table.values():
        assert float(milliseconds) > 0
        assert len(ratios) == 2
        assert all(float(ratio.split()[0]) > 0 for ratio in ratios)
    assert table["kdist fit", "1"][2] == table["kdist fit", "4"][3] == "1.00 × as fast"
    assert re.search(
        r"kdist fit, [14] per call, is \d+\.\d\d × as fast as Keras fit", process.stdout
    )

    (saved,) = tmp_path.iterdir()
    text = saved.read_text()
    assert cells(text) == table
    assert re.search(r"- commit: \w+", text)
    assert re.search(r"- machine: .+, \d+ cores", text)
    assert "TensorFlow 2." in text


@pytest.mark.exhaustive
def test_profile_names_the_operations_of_a_step():
    process = compare(*TINY, "--profile=kdist")
    assert process.returncode == 0, process.stderr[-3000:]
    rows = {name: (float(calls), other) for (name, calls), other in cells(process.stdout).items()}
    products = [calls for name, (calls, _) in rows.items() if "MatMul" in name]
    # Two layers on two replicas: each two products forward and three backward, some of them fused.
    assert sum(products) == 10
    assert all(calls > 0 for calls, _ in rows.values())


# The loop by hand and plain Keras on one device: it would be no rival if it did less.
LOOP_BESIDE_KERAS = """
import json, keras, tensorflow as tf
import kdist
from benchmarks.rivals import tensorflow_parts as parts, tf_loop, workload
from kdist.testing import largest_difference

given = workload.Workload("lenet", "float32", 4, replicas=2, cores=2, steps=5, steps_per_call=3)
devices = kdist.devices.find_devices(2)
reference = parts.as_keras(parts.new_model(given))
strategy = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
with strategy.scope():
    model = parts.as_keras(parts.new_model(given))
    model.set_weights(reference.get_weights())
reference.compile(
    keras.optimizers.SGD(workload.LEARNING_RATE),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
batches = parts.dataset(given.arrays())
history = reference.fit(batches, steps_per_epoch=5, verbose=0).history
first, differences = model.get_weights(), []
for takes_whole_batches in (True, False):
    model.set_weights(first)
    rate = workload.LEARNING_RATE
    loop = tf_loop.Loop(strategy, model, rate, 4, takes_whole_batches=takes_whole_batches)
    if not takes_whole_batches:
        batches = strategy.experimental_distribute_dataset(batches)
    loss, accuracy = loop.run(iter(batches), given.calls())
    differences.append(largest_difference(model.get_weights(), reference.get_weights()))
    differences.append(abs(float(loss) - history["loss"][0]))
    differences.append(abs(float(accuracy) - history["accuracy"][0]))
print(json.dumps(differences))
"""


@pytest.mark.exhaustive
def test_loop_by_hand_trains_as_keras_on_one_device():
    differences = python(LOOP_BESIDE_KERAS, [], {"PYTHONPATH": os.fspath(programs.ROOT)})
    assert differences == pytest.approx([0] * 6, abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--torch_python=/no/python"], "--torch_python=/no/python cannot import torch"),
    ],
)
def test_refuses(flags, says):
    process = compare(*flags)
    assert process.returncode == 1
    assert re.search(says, process.stderr)


def test_ratios_are_taken_within_a_repetition():
    """The machine is ten times slower in the second repetition, for both."""
    ours = tables.Row("kdist fit", "kdist fit", 1, [1.0, 10.0, 1.0])
    theirs = tables.Row("Keras fit", "Keras fit", 1, [2.0, 20.0, 2.2])
    assert ours.times_as_fast_as(theirs) == pytest.approx(2.0)
    assert theirs.times_as_fast_as(ours) == pytest.approx(0.5)
