"""Parameter servers: one step after the other they train as one device; all at once, they learn."""

import json
import pathlib
import runpy

import numpy as np
import pytest

from kdist.testing import assert_same_weights, python_tasks

_W = runpy.run_path(str(pathlib.Path(__file__).with_name("test_workers.py")))
TRAINING, reference = _W["TRAINING"], _W["reference"]

TASK = f"""
import json, sys
arguments = json.loads(sys.argv.pop())
import kdist
strategy = kdist.create_strategy("parameter_server", cluster_timeout_seconds=60)
{TRAINING}
with strategy.scope():
    result = train(kdist.Model, max_staleness=0, **arguments["options"])
print(json.dumps(result))
"""


@pytest.mark.parametrize(
    ("servers", "options"),
    [
        (1, {}),
        (2, {"steps_per_execution": 4}),
        (1, {"accumulate": 2, "steps_per_execution": 7}),
        (1, {"steps_per_execution": "auto"}),
    ],
    ids=str,
)
def test_one_step_after_the_other_they_train_as_one_device(servers, options):
    tasks = {"chief": 1, "worker": 2, "ps": servers}
    chief, *others = python_tasks(TASK, tasks, [json.dumps({"options": options})])
    assert others == [None] * (2 + servers)
    expected = reference("accumulate" in options)
    assert_same_weights(chief["weights"], expected["weights"], 1e-5)
    assert chief["iterations"] == expected["iterations"]
    assert chief["files"] == expected["files"]
    assert chief["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(chief["history"][name], values, atol=2e-5)
    np.testing.assert_allclose(chief["evaluated"], expected["evaluated"], atol=2e-5)
    np.testing.assert_allclose(chief["predicted"], expected["predicted"], atol=2e-5)
