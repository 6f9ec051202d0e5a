"""Tiers of tests, their time limits, the skips that CI allows, and fixtures of several folders.

* `unit`: the tests in `tests/unit`. They import no TensorFlow and start no processes.
* `tensorflow`: all other tests without a mark. TensorFlow has four logical CPU devices in them.
* `slow`: marked by hand, also in `tests/unit`. They start jobs, train, or compute for long. Of a
  matrix with `@pytest.mark.fast_cases(2)`, all cases but two.
* `exhaustive`: marked by `tests/tiers.py`. Further cases of large matrices, for releases.
"""

import collections
import contextlib
import ctypes
import functools
import gc
import os
import pathlib
import re

import psutil
import pytest

# Before TensorFlow is imported, here and in processes that tests start.
from tests.site import sitecustomize
from tests.tiers import seldom

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [os.path.dirname(sitecustomize.__file__), os.environ.get("PYTHONPATH")])
)
# Preemption notices of the machine on which the tests run are ignored: only stand-ins are asked.
os.environ.setdefault("KDIST_METADATA_URL", "")
# The same kernels on every CPU: TensorFlow's default depends on it.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

pytest_plugins = ["kdist.testing.clouds"]

UNIT_TESTS = pathlib.Path(__file__).with_name("unit")
_SLOW_TEST_SECONDS = 900  # pyproject.toml has the limit of all others
_MOST_NEW_BYTES = 400 << 20  # that a process may take since it has freed its memory
_held_bytes = 0

# The only skips in CI, by (test, reason). Any other skip fails the run there, so that a missing
# browser, a missing package, or missing rights do not go unnoticed.
ALLOWED_SKIPS = (
    # Machines with cgroups of version 2 only.
    ("tests/faults/test_faults.py", "memory controller, version 1"),
    ("tests/training/test_sharding_memory.py", "memory controller, version 1"),
    ("tests/tuning/test_optuna.py", "memory controller, version 1"),
    # A package that only users of scripts/wandb_workspace.py need.
    ("tests/unit/telemetry/test_wandb_workspace.py", "wandb-workspaces"),
    # Their requirements contradict versions that constraints.txt pins.
    ("tests/telemetry/test_mlflow.py", "mlflow"),
    ("tests/data/test_emulators.py", "the emulator of"),
    # Packages of 250 to 900 MB with what they need; the tests ran with them by hand.
    ("tests/data/test_batches.py", "could not import '(torch|torchdata|datasets)"),
    # Its requirements contradict those of kdist, so it needs an environment of its own.
    ("tests/launch/engines/test_skypilot_prices.py", "SkyPilot is not installed"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector):
    if isinstance(collector, pytest.Module) and UNIT_TESTS not in collector.path.parents:
        _start_tensorflow()


@functools.cache
def _start_tensorflow():
    """Creates the logical devices. TensorFlow allows this only before its first operation."""
    from kdist.devices import find_devices

    find_devices(4)
    gc.freeze()  # Spares later collections TensorFlow's and Keras's own objects.
    # Traces are many objects that stay: looking for cycles in them took a tenth of the time.
    gc.set_threshold(20_000, 10, 10)


def _is_slow(item):
    return any(item.get_closest_marker(tier) for tier in ("slow", "exhaustive"))


def _mark_slow_cases(items):
    """Marks cases of tests with `fast_cases` as slow, except for some that are evenly spread."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("fast_cases") and not _is_slow(item):
            cases[item.path, item.originalname].append(item)
    for group in cases.values():
        fast = group[0].get_closest_marker("fast_cases").args[0]
        for i, item in enumerate(group):
            if i * fast % len(group) >= fast:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    _mark_slow_cases(items)
    # The longest test is in it: at the end of a run, all processes but one would wait for it.
    items.sort(key=lambda item: "tuning" not in item.path.parts)
    for item in items:
        if _is_slow(item):
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(_SLOW_TEST_SECONDS))
        else:
            item.add_marker("unit" if UNIT_TESTS in item.path.parents else "tensorflow")


@pytest.fixture(autouse=True)
def _same_weights_and_names_in_every_test(request):
    if UNIT_TESTS in request.path.parents:
        yield
        return
    import keras

    # A full collection before each test took a third of the suite's time; Python makes its own.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    yield
    if _is_slow(request.node):
        _free_memory()


def _free_memory():
    """Frees the graphs of large models, which are reference cycles, and trims the heap.

    Without it, a process that runs half of the slow tests grows to 10 GB. It takes 0.2 to 0.4 s, so
    that small models are collected together.
    """
    global _held_bytes
    process = psutil.Process()
    if process.memory_info().rss < _held_bytes + _MOST_NEW_BYTES:
        return
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    _held_bytes = process.memory_info().rss


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory):
    """Directory of this run of pytest, the same in all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


@pytest.fixture(params=[1, 2, *seldom([4])], ids=lambda n: f"{n} devices")
def strategy(request):
    """One device, and MirroredStrategy on two, or before a release on four."""
    from kdist.strategies import create_strategy

    name = "one_device" if request.param == 1 else "mirrored"
    return create_strategy(name, request.param)


@pytest.fixture
def mirrored():
    """MirroredStrategy on two devices."""
    from kdist.strategies import create_strategy

    return create_strategy("mirrored", 2)


# Skips. Workers of pytest-xdist send theirs to the controller when they end.

_SKIPS = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[_SKIPS] = []
    config.pluginmanager.register(_Skips(config), "kdist-skips")


class _Skips:
    """Fails a session in CI in which a test was skipped that is not in `ALLOWED_SKIPS`."""

    def __init__(self, config):
        self._config = config
        self._skips = config.stash[_SKIPS]

    def pytest_runtest_logreport(self, report):
        self._note(report)

    def pytest_collectreport(self, report):
        self._note(report)

    def _note(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self._skips.append((report.nodeid, str(reason)))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self._skips += map(tuple, getattr(node, "workeroutput", {}).get("skips", ()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["skips"] = self._skips
        elif self._forbidden() and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for test, reason in self._forbidden():
            terminalreporter.write_line(
                f"SKIPPED BUT NOT ALLOWED IN CI: {test}: {reason}. Install what it needs, or add "
                "it to ALLOWED_SKIPS in tests/conftest.py",
                red=True,
            )

    def _forbidden(self):
        if os.environ.get("CI", "").lower() not in ("1", "true"):
            return []
        return sorted(
            {
                (test, reason)
                for test, reason in self._skips
                if not any(
                    test.startswith(allowed) and re.search(why, reason)
                    for allowed, why in ALLOWED_SKIPS
                )
            }
        )
