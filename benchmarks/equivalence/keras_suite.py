"""Pytest plugin that runs Keras's own tests with kdist's trainer instead of Keras's.

Keras ships its tests in its wheel; `run_keras_suite.py` calls pytest with this plugin. Classes
that derive from Keras's TensorFlow trainer then derive from kdist's, and each test runs in the
scope of the configured strategy, on two logical CPUs.
"""

import contextlib
import functools
import importlib.util
import os
import pathlib
import unittest

TRAINERS = ("kdist", "keras")
STRATEGIES = ("default", "mirrored")

# {suite: its files in keras/src}.
SUITES = {
    "trainers": "trainers/trainer_test.py",
    "callbacks": "callbacks/*_test.py",
    "models": "models/*_test.py",
    "saving": "saving/*_test.py",
    "optimizers": "optimizers/**/*_test.py",
    "metrics": "metrics/*_test.py",
    "losses": "losses/*_test.py",
}
# Suites of single calls outside of `fit`. In a strategy's scope Keras divides these losses by the
# number of replicas and refuses to apply gradients, so they run without a strategy only.
WITHOUT_STRATEGY = ("optimizers", "metrics", "losses")
# {file: package that all of its tests need}.
PACKAGES = {"orbax_checkpoint_test.py": "orbax", "tensorboard_test.py": "tensorboard"}

# Keras's own conftest.py is not in the wheel; one of its tests imports this function from there.
_CONFTEST = """
import keras
import pytest


def skip_if_backend(backend, reason):
    return pytest.mark.skipif(keras.backend.backend() == backend, reason=reason)
"""

_TRAINER_VARIABLE = "KDIST_SUITE_TRAINER"
_STRATEGY_VARIABLE = "KDIST_SUITE_STRATEGY"


def environment(trainer: str, strategy: str) -> dict[str, str]:
    """Returns the environment variables that configure the plugin in its process."""
    root = str(pathlib.Path(__file__).parents[2])  # pytest must find this module
    return {
        _TRAINER_VARIABLE: trainer,
        _STRATEGY_VARIABLE: strategy,
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }


def copy_tests(directory: pathlib.Path, suites) -> list[str]:
    """Copies the tests of `suites` to `directory`, without imports of jax that few of them need.

    Returns:
        The files that are left out because their package is not installed.
    """
    import keras.src

    (directory / "conftest.py").write_text(_CONFTEST)
    left_out = []
    for suite in suites:
        for tests in sorted(pathlib.Path(keras.src.__path__[0]).glob(SUITES[suite])):
            package = PACKAGES.get(tests.name)
            if package and importlib.util.find_spec(package) is None:
                left_out.append(tests.name)
                continue
            text = tests.read_text().replace("\nimport jax\n", "\n", 1)
            (directory / tests.name).write_text(text)
    return left_out


def pytest_configure():
    """Installs the trainer before the tests are imported."""
    from kdist.devices import find_devices

    find_devices(2)
    unittest.TestCase._callTestMethod = _in_scope  # type: ignore[attr-defined]
    if os.environ[_TRAINER_VARIABLE] == "kdist":
        _install_kdist()


def _install_kdist():
    from keras.src.backend.tensorflow import trainer

    from kdist.model import patch_keras
    from kdist.training.trainer import Trainer

    patch_keras()
    trainer.TensorFlowTrainer = Trainer  # which the tests derive their models from


def _in_scope(case, method):
    """Runs a test in the scope of the strategy, after `setUp`, which would clear the scope."""
    with _strategy().scope() if _strategy() else contextlib.nullcontext():
        method()


@functools.cache
def _strategy():
    if os.environ[_STRATEGY_VARIABLE] == "default":
        return None
    from kdist.strategies import create_strategy

    return create_strategy("mirrored", 2)
