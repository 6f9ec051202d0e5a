"""Helpers for tests of training on several devices: kdist's own, and its users'.

result = python("print(40 + 2)")       # in a process of its own
assert_same_weights(model.get_weights(), reference.get_weights())
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np


def assert_same_weights(weights: Sequence, reference: Sequence, tolerance: float = 1e-5):
    """Fails unless both lists hold arrays of equal shapes that differ by `tolerance` at most.

    Args:
        weights: arrays, as of `model.get_weights()`.
        reference: the same of the model to compare with.
        tolerance: the largest absolute difference of any element. Defaults to 1e-5.
    """
    shapes = [np.shape(w) for w in weights], [np.shape(w) for w in reference]
    assert shapes[0] == shapes[1], f"different shapes: {shapes[0]} and {shapes[1]}"
    worst = largest_difference(weights, reference)
    assert worst <= tolerance, f"weights differ by {worst:.3g}, allowed is {tolerance:.3g}"


def largest_difference(weights: Sequence, reference: Sequence) -> float:
    """The largest absolute difference between two lists of arrays; NaN if any differs by NaN."""
    differences = [
        float(np.max(np.abs(np.asarray(a, "float64") - np.asarray(b, "float64"))))
        for a, b in zip(weights, reference, strict=True)
        if np.size(a)
    ]
    return float(np.max(differences, initial=0.0))


def python(
    code: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 300.0,
):
    """Runs `code` in a new Python process and gives what its last line of output holds, as JSON.

    Logical devices can be configured once a process, and a failed collective spoils all later
    strategies of its process: what needs another number of devices runs in its own.

    Raises:
        AssertionError: the process failed; the message holds the end of its output.
        subprocess.TimeoutExpired: it ran longer than `timeout_seconds`.
    """
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    return json.loads(process.stdout.strip().splitlines()[-1])
