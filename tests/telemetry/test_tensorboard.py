import subprocess
import sys

import pytest
import tensorflow as tf

from kdist.telemetry.writers.tensorboard import TensorBoardWriter


def events(directory):
    (file,) = directory.iterdir()
    return list(tf.compat.v1.train.summary_iterator(str(file)))


def scalars(directory):
    return [
        (value.tag, event.step, pytest.approx(value.simple_value), event.wall_time)
        for event in events(directory)
        for value in event.summary.value
    ]


def test_examples_are_the_step(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write({"kind": "train", "epoch": 1, "step": 5, "examples": 640, "loss": 0.5})
    writer.write_device(
        {"time": 99.5, "seconds": 1.0, "host": "a", "device": "gpu/1", "power_watts": 70.0}
    )
    writer.write({"kind": "train", "epoch": 1, "step": 9, "examples": None, "loss": None})
    found = [(tag, step, value) for tag, step, value, _ in scalars(tmp_path)]
    # Readable although the file is still open.
    assert ("train/loss", 640, 0.5) in found
    assert ("gpu/1/power_watts", 640, 70.0) in found
    assert ("step", 9, 9.0) in found
    assert len([tag for tag, *_ in found if tag == "train/loss"]) == 1
    (when,) = {when for tag, _, _, when in scalars(tmp_path) if tag == "gpu/1/power_watts"}
    assert when == 99.5
    assert events(tmp_path)[0].file_version == "brain.Event:2"
    writer.write_summary({"test_accuracy": 0.75, "model": "mlp", "verdict": ["slow"]})
    writer.close()
    writer.close()
    writer.write({"kind": "train", "examples": 1280, "loss": 0.25})
    assert scalars(tmp_path)[-1][:3] == ("summary/test_accuracy", 9, 0.75)


def test_two_trainings_in_a_second_have_a_file_each(tmp_path):
    for step in (1, 2):
        writer = TensorBoardWriter(tmp_path)
        writer.write({"kind": "train", "step": step, "loss": 0.5})
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
from kdist.telemetry.writers.tensorboard import TensorBoardWriter
writer = TensorBoardWriter(sys.argv[1])
for step in range(100):
    writer.write({"kind": "train", "examples": step, "loss": 0.5})
writer.write_summary({"a": 1.0})
writer.close()
"""


@pytest.mark.slow
def test_a_full_disk_is_logged_once(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stderr.count("kdist: cannot write for TensorBoard") == 1
