"""Unit tests import neither TensorFlow nor Keras, and start no processes.

Both are enforced where only unit tests run: elsewhere other tests may have imported TensorFlow.
"""

import pathlib
import sys

import pytest

UNIT_TESTS = pathlib.Path(__file__).parent

_FORBIDDEN_PACKAGES = {"tensorflow", "keras", "jax", "torch"}
_PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}

_is_testing = False


def _forbid_processes(event, _):
    if _is_testing and event in _PROCESS_EVENTS:
        raise RuntimeError("A unit test started a process. Move it from tests/unit to tests/")


sys.addaudithook(_forbid_processes)


@pytest.fixture(autouse=True)
def _no_tensorflow_and_no_processes():
    global _is_testing
    loaded = _FORBIDDEN_PACKAGES & set(sys.modules)
    _is_testing = True
    yield
    _is_testing = False
    imported = (_FORBIDDEN_PACKAGES & set(sys.modules)) - loaded
    assert not imported, f"a unit test imported {sorted(imported)}; move it from tests/unit"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    loaded = _FORBIDDEN_PACKAGES & set(sys.modules)
    report = yield
    imported = (_FORBIDDEN_PACKAGES & set(sys.modules)) - loaded
    if imported and isinstance(collector, pytest.Module) and UNIT_TESTS in collector.path.parents:
        report.outcome = "failed"
        report.longrepr = f"{collector.path} imports {sorted(imported)}; move it from tests/unit"
    return report
