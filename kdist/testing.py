"""Helpers for tests of training on several devices: kdist's own, and its users'.

result = python("print(40 + 2)")       # in a process of its own
results = python_tasks(code, {"worker": 2})   # a process for each task of a job
assert_same_weights(model.get_weights(), reference.get_weights())
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import numpy as np

from kdist.cluster import Cluster
from kdist.launch.ports import addresses, reserved

# After one task of a job has failed, the others have so long to say something.
_GRACE_SECONDS = 5.0


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


def python_tasks(
    code: str,
    tasks: Mapping[str, int],
    arguments: Sequence[str] = (),
    timeout_seconds: float = 300.0,
) -> list:
    """Runs `code` in a process for each task of a job on loopback; TF_CONFIG tells them of it.

    Args:
        code: the same for all.
        tasks: role -> how many, such as `{"worker": 2}`.
        arguments: of the command line.
        timeout_seconds: for all of them together; then they are killed.

    Returns:
        What each one's last line of output holds, as JSON, in the order of `tasks`; None for a
        task that only serves.

    Raises:
        AssertionError: a process failed; the message holds the end of its output.
        subprocess.TimeoutExpired: they ran too long.
    """
    processes = []
    deadline = time.monotonic() + timeout_seconds
    with reserved(sum(tasks.values())) as ports, tempfile.TemporaryDirectory() as directory:
        job = addresses(tasks, ports)
        everyone = [Cluster(job, role, n) for role in job for n in range(len(job[role]))]
        try:
            for cluster in everyone:
                environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
                cluster.publish(environment)
                output = pathlib.Path(directory) / cluster.name
                with output.open("w") as file:
                    command = [sys.executable, "-c", code, *arguments]
                    process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
                processes.append((process, output))
            _wait([process for process, _ in processes], deadline)
        finally:
            for process, _ in processes:
                process.kill()
                process.wait()
        failed = [
            f"{output.name} ended with {process.returncode}: {output.read_text()[-3000:]}"
            for process, output in processes
            if process.returncode
        ]
        assert not failed, "\n---\n".join(failed)
        return [_last_json(output.read_text()) for _, output in processes]


def _wait(processes, deadline):
    """Returns when all have ended, or a little after one has failed."""
    while any(process.poll() is None for process in processes):
        left = deadline - time.monotonic()
        if left <= 0:
            raise subprocess.TimeoutExpired("the tasks of a job", timeout=0)
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if left < 0.2:
                return
        time.sleep(0.05)


def _last_json(text):
    """What the last line holds that begins as JSON does; TensorFlow may say something after it."""
    lines = [line for line in text.splitlines() if line.startswith(("{", "["))]
    return json.loads(lines[-1]) if lines else None
