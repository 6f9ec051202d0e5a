"""The programs in benchmarks/ as a user runs them."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def cores():
    """As many as the programs may take here, two at most."""
    return min(2, len(os.sched_getaffinity(0)))


def run(name, *flags):
    """The process of `python -m benchmarks.<name>`, ended."""
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", f"--cores={cores()}", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
