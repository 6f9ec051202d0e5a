"""Runs `benchmarks/equivalence/run_keras_suite.py`; see there, or `--help`."""

import pathlib
import runpy
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # benchmarks/ is not installed
runpy.run_module("benchmarks.equivalence.run_keras_suite", run_name="__main__", alter_sys=True)
