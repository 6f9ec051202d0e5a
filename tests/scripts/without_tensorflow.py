"""Runs programs in forks of one process, in which importing TensorFlow or Keras is an error.

    python -m tests.scripts.without_tensorflow < cases.json > outcomes.json

Cases are `[program, [argument, …], {variable: value, …}]`, and outcomes `[exit code, output]`. With
null instead of arguments, the output is `{flag: [absurd numbers that it accepts]}` as JSON. A fork
costs milliseconds, a new process half a second.
"""

import importlib
import importlib.abc
import json
import os
import runpy
import sys
import tempfile
import traceback

from absl import flags

from kdist import program

# Imports of the programs, which the forks share.
_SHARED = (
    *("absl.app", "numpy", "kdist.data.operations", "kdist.launch.local_engine"),
    *("kdist.planner.planning", "kdist.report.page", "kdist.serving.core.settings"),
    *("kdist.commands.training_run.on_jax", "kdist.commands.training_run.on_tensorflow"),
)
_ABSURD = ("nan", "inf", "-inf", "-1", "1e30", "1000000000000000000000000000000")


class _NoTensorFlow(importlib.abc.MetaPathFinder):
    """Finder that fails the import of packages that take seconds."""

    def find_spec(self, name, path=None, target=None):
        if name in ("tensorflow", "keras"):
            raise AssertionError(f"{name} was imported")


def _run(path, arguments, environment):
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.environ.update(environment)
            _run_here(path, arguments)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")


def _run_here(path, arguments):
    """Runs a program and exits."""
    code = 1
    sys.argv = [path, *(arguments or ())]
    if arguments is None:
        program.run = _print_accepted_numbers
    try:
        runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _print_accepted_numbers(main, **_):
    """Prints which absurd values each flag accepts that holds a number."""
    accepted = {}
    for flag in program.own_flags(main.__module__).values():
        if flag.flag_type() in ("int", "float"):
            accepted[flag.name] = [text for text in _ABSURD if _is_accepted(flag, text)]
    json.dump(accepted, sys.stdout)


def _is_accepted(flag, text):
    try:
        flag.parse(text)
    except flags.Error:
        return False
    return program.objection(flag) is None


if __name__ == "__main__":
    sys.meta_path.insert(0, _NoTensorFlow())
    for name in _SHARED:
        importlib.import_module(name)
    json.dump([_run(*case) for case in json.load(sys.stdin)], sys.stdout)
