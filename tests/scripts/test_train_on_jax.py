"""Runs of `train.py --backend=jax`, in new processes."""

import json
import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest

import kdist
from kdist.parallel import column, row, write_placement
from kdist.testing import python

TRAIN = pathlib.Path(__file__).parents[2] / "scripts" / "train.py"
ON_JAX = ["--backend=jax", "--dataset=digits", "--model=mlp", "--verbose=0"]


def run(*flags, **environment):
    return subprocess.run(
        [sys.executable, TRAIN, *flags],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.exhaustive
def test_a_layout_trains_on_a_mesh(tmp_path):
    """Devices hold their planned part, and the saved model works with TensorFlow."""
    write_placement({"dense": column(), "logits": row()}, tmp_path / "split.json")
    flags = ["--layout=data=2,tensor=2", f"--split={tmp_path / 'split.json'}", "--epochs=2"]
    process = run(*ON_JAX, *flags, "--schedule=ramp", f"--run_dir={tmp_path / 'run'}")
    assert process.returncode == 0, process.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.7
    assert (summary["num_replicas"], summary["global_batch_size"]) == (2, 128)
    assert summary["devices"] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    # Divided: kernels (64, 256) and (256, 10), a bias (256,), and their momenta. Whole: a bias
    # (10,), its momentum, and the number of steps; the rate is a schedule.
    divided, whole = 64 * 256 + 256 * 10 + 256, 10
    expected = 2 * 4 * (divided // 2 + whole) + 4
    assert summary["state_bytes_per_device"] == dict.fromkeys(summary["devices"], expected)
    assert f"{summary['test_accuracy']:.4f}" in process.stdout
    assert "on CPU:0, CPU:1, CPU:2, CPU:3 (JAX mesh data=2,tensor=2, 2 repl" in process.stdout
    assert "examples/sec" in process.stdout

    saved = tmp_path / "run/checkpoints/epoch-0002.keras"
    plain = "import json, keras, sys; model = keras.saving.load_model(sys.argv[1]);"
    plain += "print(json.dumps(['kdist' in sys.modules, type(model).__module__]))"
    assert python(plain, [str(saved)]) == [False, "keras.src.models.functional"]
    assert evaluated(keras.saving.load_model(saved)) == pytest.approx(
        [summary["test_loss"], summary["test_accuracy"]], abs=1e-5
    )


def evaluated(model):
    """Returns loss and accuracy over the test set, with another batch size."""

    _, test = kdist.data.load("digits", batch=kdist.Batch(50))
    model = kdist.Model.of(model)
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model.evaluate(test, verbose=0)


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--strategy=mirrored", "--strategy is not supported.*--layout=data=N or"),
        ("--accumulate=2", "--accumulate is not supported.*--local_batch_size"),
        ("--wandb_mode=offline", "--wandb_mode is not supported.*--backend=ten"),
        ("--steps_per_execution=auto", "--steps_per_execution=auto is not supported"),
        ("--layout=pipeline=2", "pipeline=2: on a JAX mesh"),
    ],
)
def test_flags_unsupported_on_jax(flag, remedy, tmp_path):
    process = run(*ON_JAX, flag, f"--run_dir={tmp_path / 'run'}")
    assert process.returncode == 1
    assert re.search(remedy, process.stderr), process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "run").exists()


def test_backend_that_contradicts_the_environment():
    process = run("--model=mlp", KERAS_BACKEND="jax")
    assert process.returncode == 1
    assert "KERAS_BACKEND is jax, but --backend is tensorflow" in process.stderr


def test_missing_jax_names_the_extra():
    hidden = (
        "import os, sys, runpy; sys.modules['jax'] = None; sys.argv = sys.argv[1:];"
        "sys.path.insert(0, os.path.dirname(sys.argv[0]));"  # as Python itself does
    )
    process = subprocess.run(
        [
            *(sys.executable, "-c", hidden + "runpy.run_path(sys.argv[0], run_name='__main__')"),
            *(TRAIN, *ON_JAX),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 1
    assert "jax is not installed: pip install 'kdist[jax]'" in process.stderr


def test_several_tasks_are_rejected(tmp_path):
    tasks = {"worker": ["localhost:1", "localhost:2"]}
    config = json.dumps({"cluster": tasks, "task": {"type": "worker", "index": 0}})
    process = run(*ON_JAX, f"--run_dir={tmp_path / 'run'}", TF_CONFIG=config)
    assert process.returncode == 1
    assert "this job has 2 tasks" in process.stderr
