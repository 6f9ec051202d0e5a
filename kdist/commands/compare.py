"""Runs `benchmarks/equivalence/compare.py` of a clone of the repository; see there, or `--help`.

kdist compare --features=clipnorm,dropout
"""

import runpy
import sys

from kdist.commands.repository import add_repository


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    try:
        add_repository("kdist compare")
    except ValueError as error:
        sys.exit(f"kdist compare: {error}")
    runpy.run_module("benchmarks.equivalence.compare", run_name="__main__", alter_sys=True)
