"""The stored workloads against the models they describe."""

import inspect
import pathlib

import pytest

from kdist.planner.workload.layers import known_workload, known_workloads
from tests.forked import run_program
from tests.unit.planner.test_known import stored

ROOT = pathlib.Path(__file__).parents[2]


def test_all_of_keras_applications_is_known():
    import keras

    applications = {
        name.lower()
        for name, builder in vars(keras.applications).items()
        if inspect.isfunction(builder)
    }
    assert len(applications) >= 38
    assert applications <= set(known_workloads())


@pytest.mark.slow
def test_what_is_stored_is_what_models_give_today(tmp_path):
    names = ["lenet", "mlp_cifar10", "alexnet"]
    program = ROOT / "tools" / "known_workloads.py"
    process = run_program(program, f"--only={','.join(names)}", f"--output_dir={tmp_path}")
    assert process.returncode == 0, process.stderr
    assert len(list(tmp_path.iterdir())) == len(names)
    for name in names:
        path = tmp_path / f"{name}.json.gz"
        assert stored(path) == known_workload(name)
