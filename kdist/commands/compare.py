"""Programs that only a clone of the repository has: `benchmarks/` is not part of the package.

`kdist compare` runs `benchmarks/equivalence/compare.py`; see there, or `--help`.

    kdist compare --features=clipnorm,dropout
"""

import importlib
import pathlib
import sys
from types import ModuleType

from kdist import program


def add_repository(what: str):
    """Makes `benchmarks` importable, from the clone that contains this package or this directory.

    Args:
        what: what needs it, for the message.

    Raises:
        ValueError: there is no clone.
    """
    for root in (pathlib.Path(__file__).parents[2], pathlib.Path.cwd()):
        if (root / "benchmarks" / "equivalence" / "compare.py").is_file():
            sys.path.insert(0, str(root))
            return
    raise ValueError(
        f"{what} needs benchmarks/, which is not part of the installed package: clone the "
        "repository of kdist, and run the command there"
    )


def import_benchmark(name: str, what: str) -> ModuleType:
    """Returns a module of `benchmarks`, such as "planner_validation.validate".

    Args:
        name: the module, below `benchmarks`.
        what: what needs it, for the message.

    Raises:
        ValueError: there is no clone of the repository.
    """
    add_repository(what)
    return importlib.import_module(f"benchmarks.{name}")


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    try:
        add_repository("kdist compare")
    except ValueError as error:
        sys.exit(f"kdist compare: {error}")
    program.run(importlib.import_module("benchmarks.equivalence.compare").main)
