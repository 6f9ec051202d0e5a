"""Life of a split model: trained, killed, resumed under another layout, and served.

Each part is a separate process; the served model is opened without kdist, on one device.
"""

import pathlib

import numpy as np
import pytest

from kdist.testing import assert_same_weights, python
from tests.faults import split_training_program
from tests.faults.jobs import Run
from tests.tiers import seldom

pytestmark = pytest.mark.slow

PROGRAM = pathlib.Path(split_training_program.__file__)

SERVED = """
import json, sys
import numpy as np
import tensorflow as tf
assert len(tf.config.list_logical_devices()) == 1
tf.config.set_soft_device_placement(False)  # an operation on a missing device fails
served = tf.saved_model.load(sys.argv[1] + "/served")
predicted = np.load(sys.argv[1] + "/predicted.npz")
assert "kdist" not in sys.modules, "opened by TensorFlow alone"
print(json.dumps(float(np.abs(served.serve(predicted["x"]).numpy() - predicted["y"]).max())))
"""

OPENED = """
import json, sys
import numpy as np
import keras
import tensorflow as tf
assert len(tf.config.list_logical_devices()) == 1
model = keras.models.load_model(sys.argv[1] + "/model.keras")
predicted = np.load(sys.argv[1] + "/predicted.npz")
difference = float(np.abs(model.predict(predicted["x"], verbose=0) - predicted["y"]).max())
steps = int(model.optimizer.iterations.numpy())
model.fit(predicted["x"], np.zeros(len(predicted["x"])), batch_size=16, verbose=0)
assert "kdist" not in sys.modules, "opened by Keras alone"
print(json.dumps([type(model).__module__, difference, steps]))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Returns the weights of an undisturbed run on one device."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), "data=1", program=PROGRAM).start()
    assert run.wait_for_success() == {"from": None, "steps": split_training_program.STEPS}
    return _weights(run)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pipeline=2", "data=2,tensor=2"),
        *seldom([("tensor=2", "pipeline=2,micro_batches=2"), ("data=2,tensor=2", "data=1")]),
    ],
)
def test_a_killed_run_resumes_under_another_layout_and_is_served(before, after, start, expected):
    killed = start(before, program=PROGRAM)
    killed.wait_for_checkpoint(split_training_program.STEPS // 4)
    killed.signal("worker 0")
    killed.wait_for_failure()
    at = killed.newest_step()
    assert split_training_program.STEPS // 4 <= at < split_training_program.STEPS
    run = Run(killed.directory, after, program=PROGRAM).start()
    try:
        assert run.wait_for_success() == {"from": at, "steps": split_training_program.STEPS}
    finally:
        run.stop()
    assert_same_weights(_weights(run), expected, 1e-5)
    here = str(run.directory)
    assert python(SERVED, [here]) < 1e-6
    module, difference, steps = python(OPENED, [here])
    assert module.startswith("keras.")
    assert difference < 1e-6
    assert steps == split_training_program.STEPS


def _weights(run):
    with np.load(run.directory / "weights.npz") as file:
        return [file[name] for name in file]
