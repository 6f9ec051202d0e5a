"""Runs Keras's own tests with kdist's trainer instead of Keras's.

  python scripts/keras_suite.py                            # with and without a strategy
  python scripts/keras_suite.py --suite=callbacks          # one suite; all by default
  python scripts/keras_suite.py --trainer=keras            # the same tests of Keras alone
  python scripts/keras_suite.py --tests="fit and not jax"  # a selection, as with pytest -k

Keras ships the tests of its trainer, callbacks, models, saving, optimizers, metrics, and losses.
Each runs without a strategy, and in the scope of one. Some need jax, grain, tensorboard, and orbax
(`make keras-suite` installs them), or torch. The program prints the number of tests that passed,
and why the others failed. It exits with 1 if a test fails that is not known to fail, or if a test
passes that is known to fail.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

from absl import flags

from benchmarks.equivalence import keras_suite
from kdist import program

FLAGS = flags.FLAGS

with program.flag_group("Tests"):
    flags.DEFINE_multi_enum(
        "trainer",
        ["kdist"],
        keras_suite.TRAINERS,
        "Library of the trainer. Repeat the flag for both.",
    )
    flags.DEFINE_multi_enum(
        "strategy",
        list(keras_suite.STRATEGIES),
        keras_suite.STRATEGIES,
        "default: no strategy. mirrored: MirroredStrategy on two logical CPUs. Repeat it for both.",
    )
    flags.DEFINE_multi_enum(
        "suite",
        list(keras_suite.SUITES),
        list(keras_suite.SUITES),
        "Folder of Keras's tests. Repeat the flag for several. Suites that call losses, metrics, "
        "and optimizers alone have no run with a strategy.",
    )
    flags.DEFINE_string("tests", None, "Expression that selects tests by name, as with pytest -k.")
    flags.DEFINE_integer(
        "timeout_seconds", 1800, "Time limit for each trainer and strategy.", lower_bound=1
    )

# {class.test: why it fails with kdist}, without a strategy and with one.
EXPECTED = {
    f"TestTrainer.test_steps_per_execution_steps_per_epoch_match_multi_epoch_{mode}": (
        "expects epochs of 5 steps to have 6 and 4, in groups of 2; with kdist they have 5 and 5"
    )
    for mode in ("eager", "jit", "non_jit")
}
EXPECTED["SavingBattleTest.test_legacy_load_skips_missing_nested_containers"] = (
    "needs a file that is not in Keras's wheel"
)
if importlib.util.find_spec("torch") is None:
    EXPECTED |= {
        f"TestTrainer.test_fit_with_data_adapter_torch_dataloader_{kind}": "needs PyTorch"
        for kind in ("tensor", "iterable", "iterable_with_len")
    }
# The same with a strategy only.
EXPECTED_WITH_STRATEGY = {
    f"ReduceLROnPlateauTest.test_{test}": "builds its model in setUp, outside of the scope"
    for test in ("cooldown", "honors_min_lr", "reduces_lr_with_model_fit", "verbose_logging")
}
EXPECTED_WITH_STRATEGY["SwapEMAWeightsTest.test_swap_ema_weights_with_tf_distribute"] = (
    "creates a strategy of its own in the scope of another"
)
EXPECTED_WITH_STRATEGY["FunctionalTest.test_warning_for_mismatched_inputs_structure"] = (
    "counts one warning; each replica traces the model, and warns"
)


def main(_):
    as_expected = True
    for trainer in FLAGS.trainer:
        for strategy in FLAGS.strategy:
            outcomes = run(trainer, strategy)
            if not outcomes:
                continue
            with_strategy = {} if strategy == "default" else EXPECTED_WITH_STRATEGY
            expected = EXPECTED | with_strategy if trainer == "kdist" else {}
            report(trainer, strategy, outcomes, expected)
            if trainer == "kdist":
                as_expected &= is_as_expected(outcomes, expected)
    return int(not as_expected)


def run(trainer, strategy):
    """Returns {class.test: None if it passed, "skipped", or the first line of the failure}."""
    suites = FLAGS.suite
    if strategy != "default":
        suites = [suite for suite in suites if suite not in keras_suite.WITHOUT_STRATEGY]
    if not suites:
        return {}
    with tempfile.TemporaryDirectory() as directory:
        results = pathlib.Path(directory) / "results.xml"
        for file in keras_suite.copy_tests(pathlib.Path(directory), suites):
            print(f"  {file}: left out, needs the package {keras_suite.PACKAGES[file]}")
        selection = ["-k", FLAGS.tests] if FLAGS.tests else []
        command = [sys.executable, "-m", "pytest", "-p", keras_suite.__name__, directory, "-q"]
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
    """Returns the outcome of each test in a JUnit report; see `run`."""
    outcomes = {}
    for case in xml.etree.ElementTree.parse(results).iter("testcase"):
        test = f"{case.get('classname').rpartition('.')[-1]}.{case.get('name')}"
        bad = next(
            (case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None
        )
        if bad is not None:
            outcomes[test] = bad.get("message", "").strip().partition("\n")[0][:160]
        else:
            outcomes[test] = "skipped" if case.find("skipped") is not None else None
    return outcomes


def report(trainer, strategy, outcomes, expected):
    """Prints the number of tests that passed, and each failure."""
    failed = {name: why for name, why in outcomes.items() if why not in (None, "skipped")}
    passed = sum(why is None for why in outcomes.values())
    skipped = len(outcomes) - passed - len(failed)
    print(f"{trainer}, {strategy}: {passed} of {len(outcomes)} passed, {skipped} skipped")
    for name, why in failed.items():
        print(f"  {name}: {expected.get(name, why)}")


def is_as_expected(outcomes, expected):
    """Returns False, and prints the tests, if others fail than those that are known to."""
    failed = {name for name, why in outcomes.items() if why not in (None, "skipped")}
    new = failed - expected.keys()
    fixed = {name for name in expected if name in outcomes and name not in failed}
    if new:
        print(f"  new failures: {', '.join(sorted(new))}")
    if fixed:
        print(f"  pass unexpectedly: {', '.join(sorted(fixed))}; remove them from the list")
    return not new and not fixed


if __name__ == "__main__":
    program.run(main)
