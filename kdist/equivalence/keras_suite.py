"""Keras's own tests of training, run with kdist's trainer in the place of Keras's.

Keras ships `keras/src/trainers/trainer_test.py` in its wheel. This module is a pytest plugin that
runs it (`scripts/keras_suite.py` calls pytest with it): what derives from Keras's TensorFlow
trainer then derives from kdist's, and each test runs under the strategy that is asked for, on two
logical CPUs.
"""

import contextlib
import os
import pathlib
import unittest

TRAINERS = ("kdist", "keras")
STRATEGIES = ("default", "mirrored")

_TRAINER_VARIABLE = "KDIST_SUITE_TRAINER"
_STRATEGY_VARIABLE = "KDIST_SUITE_STRATEGY"


def environment(trainer: str, strategy: str) -> dict[str, str]:
    """What tells the plugin, in another process, whose trainer and which strategy to take."""
    return {_TRAINER_VARIABLE: trainer, _STRATEGY_VARIABLE: strategy, "KERAS_BACKEND": "tensorflow"}


def copy_tests(directory: pathlib.Path) -> pathlib.Path:
    """Keras's tests as a file in `directory`, without its import of jax, which they do not need."""
    from keras.src import trainers

    tests = pathlib.Path(trainers.__path__[0]) / "trainer_test.py"
    copy = directory / tests.name
    copy.write_text(tests.read_text().replace("\nimport jax\n", "\n", 1))
    return copy


def pytest_configure():
    """Puts the trainer in place before the tests are imported."""
    from kdist.devices import find_devices

    find_devices(2)
    unittest.TestCase._callTestMethod = _in_scope  # type: ignore[attr-defined]
    if os.environ[_TRAINER_VARIABLE] == "kdist":
        _put_kdist_in_place()


def _put_kdist_in_place():
    from keras.src.backend.tensorflow import trainer

    from kdist.model import patch_keras
    from kdist.training.replicated import ReplicatedTrainer

    patch_keras()
    trainer.TensorFlowTrainer = ReplicatedTrainer  # which the tests derive their models from


def _in_scope(case, method):
    """Runs a test in the scope of the strategy; after `setUp`, which would clear the scope."""
    with _scope():
        method()


def _scope():
    if os.environ[_STRATEGY_VARIABLE] == "default":
        return contextlib.nullcontext()
    from kdist.strategies import create_strategy

    return create_strategy("mirrored", 2).scope()
