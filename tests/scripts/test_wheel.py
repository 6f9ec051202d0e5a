"""The wheel without the repository: the `kdist` command, and a user's script."""

import os
import pathlib
import shutil
import site
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BUILD = "import setuptools.build_meta, sys; print(setuptools.build_meta.build_wheel(sys.argv[1]))"

# What a user writes: no flags, no names of tasks.
SCRIPT = """
import keras
import numpy as np

import kdist

strategy = kdist.create_strategy()
with strategy.scope():
    inputs = keras.Input((4,))
    model = kdist.Model(inputs, keras.layers.Dense(2)(inputs))
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
callbacks = [
    kdist.callbacks.Telemetry("run"),
    kdist.callbacks.EpochCheckpoint("run/checkpoints"),
]
model.fit(x, x[:, :2], batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
print("replicas:", strategy.num_replicas_in_sync, kdist.__file__)
"""


class Environment:
    """A virtual environment at `path`; its commands run in `folder`."""

    def __init__(self, path, folder):
        self.bin, self.folder = path / "bin", folder
        self.packages = path / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"

    def run(self, program, *arguments, code=0):
        """Returns the output of a program of the environment, which exits with `code`."""
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TF_CONFIG")}
        process = subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.folder,
            env={**variables, "PYTHONNOUSERSITE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert process.returncode == code, process.stdout[-3000:]
        return process.stdout


def create_environment(folder):
    """Returns an environment with kdist's wheel, and the other packages of this one."""
    source, user = folder / "source", folder / "user"
    shutil.copytree(ROOT / "kdist", source / "kdist", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=source, check=True)
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    user.mkdir()
    found = Environment(folder / "venv", user)
    (wheel,) = folder.glob("*.whl")
    found.run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    # After kdist's own, and without the .pth file of an editable kdist.
    (found.packages / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return found


@pytest.mark.slow
def test_the_wheel_without_the_repository(tmp_path):
    environment = create_environment(tmp_path)
    check_commands(environment)
    check_a_users_script(environment)


def check_commands(environment):
    assert "kdist train --model=" in environment.run("kdist", "--help")
    assert environment.run("python", "-m", "kdist", "--version").startswith("kdist ")
    assert "did you mean 'train'" in environment.run("kdist", "trian", code=1)
    assert "Optimization:" in environment.run("kdist", "train", "--help")
    assert "did you mean 'lenet'" in environment.run("kdist", "train", "--model=lenett", code=1)
    assert "clone the repository" in environment.run("kdist", "compare", code=1)
    flags = ["--model=lenet", "--examples=9", "--validate=plan.html"]
    planned = environment.run("kdist", "plan", *flags[:2])  # reads tables and a page's frame
    assert "page: plan.html" in planned
    assert "clone the repository" in environment.run("kdist", "plan", *flags, code=1)


def check_a_users_script(environment):
    """It is a job of two replicas, with the default strategy. Its run is reported and exported."""
    (environment.folder / "my_script.py").write_text(SCRIPT)
    printed = environment.run("kdist", "launch", "--workers=2", "--", "my_script.py")
    for task in ("worker 0", "worker 1"):
        assert f"[{task}] replicas: 2 {environment.packages}" in printed
    (logs,) = (environment.folder / "runs").glob("*-my_script/logs")
    assert len(list(logs.iterdir())) == 2
    environment.run("kdist", "report", "run")
    assert "examples" in (environment.folder / "report.html").read_text()
    flags = ["--output=models/linear", "--classes=a,b"]
    printed = environment.run("kdist", "export", "run", *flags)
    assert "serve --model_dir=models/linear" in printed
    assert "fingerprint" not in printed  # TensorFlow's log of how it writes
    metadata = environment.folder / "models" / "linear" / "1" / "assets.extra"
    assert any("linear" in path.read_text() for path in metadata.glob("*.json"))
