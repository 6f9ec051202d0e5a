"""Runs Keras's own tests of training with kdist's trainer in the place of Keras's.

  python scripts/keras_suite.py                            # with and without a strategy
  python scripts/keras_suite.py --trainer=keras            # the same tests of Keras alone
  python scripts/keras_suite.py --tests="fit and not jax"  # some of them, as pytest's -k

The tests are those that Keras ships (keras/src/trainers/trainer_test.py), each in the scope of the
strategy. Some need jax and grain (`make keras-suite` installs them) or torch. Prints how many
passed, and why the others did not. Exits with 1 if a test fails that is not known to, or if one
that is known to fail passes.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

from absl import flags

from kdist import program
from kdist.equivalence import keras_suite

FLAGS = flags.FLAGS

flags.DEFINE_multi_enum("trainer", ["kdist"], keras_suite.TRAINERS, "Whose; repeat it for both.")
flags.DEFINE_multi_enum(
    "strategy",
    list(keras_suite.STRATEGIES),
    keras_suite.STRATEGIES,
    "default is none; mirrored is MirroredStrategy on two logical CPUs. Repeat it for both.",
)
flags.DEFINE_string("tests", None, "Only tests whose names match, as pytest's -k says it.")
flags.DEFINE_integer("timeout_seconds", 1800, "For each trainer and strategy.", lower_bound=1)

# Tests that fail with kdist, and why; the same with and without a strategy.
EXPECTED = {
    f"test_steps_per_execution_steps_per_epoch_match_multi_epoch_{mode}": (
        "wants Keras's epochs of 5 steps to have 6 and 4, in groups of 2; kdist's have 5 and 5"
    )
    for mode in ("eager", "jit", "non_jit")
}
if importlib.util.find_spec("torch") is None:
    EXPECTED |= {
        f"test_fit_with_data_adapter_torch_dataloader_{kind}": "needs PyTorch"
        for kind in ("tensor", "iterable", "iterable_with_len")
    }


def main(_):
    as_expected = True
    for trainer in FLAGS.trainer:
        for strategy in FLAGS.strategy:
            outcomes = run(trainer, strategy)
            report(trainer, strategy, outcomes)
            if trainer == "kdist":
                as_expected &= is_as_expected(outcomes, EXPECTED)
    return int(not as_expected)


def run(trainer, strategy):
    """Test name -> None if it passed, "skipped", or the first line of what went wrong."""
    with tempfile.TemporaryDirectory() as directory:
        results = pathlib.Path(directory) / "results.xml"
        tests = keras_suite.copy_tests(pathlib.Path(directory))
        selection = ["-k", FLAGS.tests] if FLAGS.tests else []
        command = [sys.executable, "-m", "pytest", "-p", keras_suite.__name__, str(tests), "-q"]
        options = [f"--junit-xml={results}", f"--rootdir={directory}", "-p", "no:cacheprovider"]
        process = subprocess.run(
            [*command, *options, *selection],
            env={**os.environ, **keras_suite.environment(trainer, strategy)},
            capture_output=True,
            text=True,
            timeout=FLAGS.timeout_seconds,
            check=False,
        )
        if not results.exists():
            raise RuntimeError(
                f"pytest did not run: {process.stdout[-2000:]}{process.stderr[-2000:]}"
            )
        outcomes = outcomes_of(results)
        if not outcomes:
            raise ValueError(f"no test matches --tests={FLAGS.tests}; leave it out to run all")
        return outcomes


def outcomes_of(results):
    """What pytest's report says of each test."""
    outcomes = {}
    for case in xml.etree.ElementTree.parse(results).iter("testcase"):
        bad = next(
            (case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None
        )
        if bad is not None:
            outcomes[case.get("name")] = bad.get("message", "").strip().partition("\n")[0][:160]
        else:
            outcomes[case.get("name")] = "skipped" if case.find("skipped") is not None else None
    return outcomes


def report(trainer, strategy, outcomes):
    """How many passed, and which did not."""
    failed = {name: why for name, why in outcomes.items() if why not in (None, "skipped")}
    passed = sum(why is None for why in outcomes.values())
    skipped = len(outcomes) - passed - len(failed)
    print(f"{trainer}, {strategy}: {passed} of {len(outcomes)} passed, {skipped} skipped")
    for name, why in failed.items():
        known = EXPECTED.get(name) if trainer == "kdist" else None
        print(f"  {name}: {known or why}")


def is_as_expected(outcomes, expected):
    """Says which tests fail that should not, or pass that were known to fail."""
    failed = {name for name, why in outcomes.items() if why not in (None, "skipped")}
    new = failed - expected.keys()
    mended = {name for name in expected if name in outcomes and name not in failed}
    if new:
        print(f"  fail and did not before: {', '.join(sorted(new))}")
    if mended:
        print(f"  pass and are expected to fail: {', '.join(sorted(mended))}; strike them out")
    return not new and not mended


if __name__ == "__main__":
    program.run(main)
