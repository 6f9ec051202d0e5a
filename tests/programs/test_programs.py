"""Programs as people publish them compute with one added line what one device computes."""

import concurrent.futures
import contextlib

import numpy as np
import pytest

from tests.programs import running
from tests.programs.expected import known_failure
from tests.programs.modes import MODES
from tests.programs.program import outcome, programs
from tests.tiers import seldom

PROGRAMS = programs()
# Other modes run every 72nd program in tests; `python -m tests.programs.table` runs all.
EACH = 72
# The slow programs that run in CI; before a release, all do.
SLOW_IN_CI = [name for name, program in PROGRAMS.items() if program.slow][::8]
ALSO = {
    "weights": ("denoising_diffusion", "masked_kernel", "momentum_encoder"),
    "servers": ("changed_learning_rate", "labeled_and_unlabeled", "lora", "masked_kernel"),
    "workers": ("continue_from_file", "vector_loss"),
    "weights_workers": ("accumulating_step", "gradient_penalty"),
}
_SELDOM = ["four", "workers", "optimizer", "weights", "weights_workers"]
_ORDER = ["four", "groups", "accumulate", "workers", "servers", *_SELDOM[2:]]
OFFSETS = {mode: number for number, mode in enumerate(_ORDER)}


@pytest.fixture(scope="module")
def directory(shared_directory):
    """Directory of the results of all test processes."""
    (shared_directory / "programs").mkdir(exist_ok=True)
    return shared_directory / "programs"


@pytest.fixture(scope="module")
def runners(directory):
    """Processes of plain Keras on one device, and of kdist on two."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(running.Runner(mode, directory)))
            for mode in ("plain", "two")
        ]


def _marks(program):
    if program.slow:
        yield pytest.mark.slow if program.name in SLOW_IN_CI else pytest.mark.exhaustive
    if reason := known_failure(program.name, "two"):
        yield pytest.mark.xfail(strict=True, reason=reason)


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[*_marks(program)]) for name, program in PROGRAMS.items()]
)
def test_two_devices_compute_what_one_computes(name, runners):
    program = PROGRAMS[name]
    for runner in runners:
        runner.start(name)
    expected, found = (runner.result(name) for runner in runners)
    assert running.finite(expected), expected
    text = running.verdict(found, expected, program.atol)
    if program.across:
        # It trains, to something else; otherwise it does not compute across examples.
        assert running.finite(found), found
        assert running.kind(text) == "wrong"
    else:
        assert text == running.RIGHT


def run_mode(mode, names, directory):
    """Runs programs in a mode, and by plain Keras at the same time; returns their verdicts."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [pool.submit(running.run_all, m, names, directory) for m in ("plain", mode)]
        plain, found = (job.result() for job in jobs)
    return {
        name: running.verdict(found[name][0], plain[name][0], PROGRAMS[name].atol) for name in names
    }


def _is_unlike(program, mode):
    """Returns True if a program is known to compute something else in a mode, or to fail."""
    across = program.across and mode != "servers"  # workers have whole batches
    return bool(across or mode in program.differs or known_failure(program.name, mode))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    ["groups", "accumulate", "servers", *seldom(_SELDOM)],
)
def test_other_modes_compute_what_one_device_computes(mode, directory):
    names = [*list(PROGRAMS)[OFFSETS[mode] :: EACH], *ALSO.get(mode, ())]
    if mode == "workers":  # an error in one of them would abort the collectives of all others
        names = [name for name in names if not PROGRAMS[name].differs.get(mode)]
    texts = run_mode(mode, names, directory)
    unlike = {name: text for name, text in texts.items() if text != running.RIGHT}
    expected = {name for name in names if _is_unlike(PROGRAMS[name], mode)}
    assert unlike.keys() == expected, unlike


def test_a_verdict_finds_small_and_missing_differences():
    one = outcome({"loss": [1.0, 0.5]}, predicted={"a": np.ones((2, 2)), "b": [np.zeros(3)]})
    assert running.verdict(dict(one), one, 1e-6) == running.RIGHT
    for name in one:
        other = {**one, name: one[name] + 1e-3}
        assert running.verdict(other, one, 1e-4).startswith("wrong by")
        other = {**one, name: one[name] * np.nan}
        assert running.kind(running.verdict(other, one, 1e-4)) == "wrong"
        other = {key: one[key] for key in one if key != name}
        assert running.kind(running.verdict(other, one, 1e-4)) == "wrong"
    assert running.kind(running.verdict("ValueError: no", one, 1e-4)) == "ValueError"


def test_every_program_says_what_it_is():
    assert len(PROGRAMS) >= 40
    for program in PROGRAMS.values():
        assert len(program.title.split()) > 3
        assert {*program.differs} <= {*MODES}
