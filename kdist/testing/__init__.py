"""Helpers for tests of training on several devices, for kdist and for its users.

result = python("print(40 + 2)")              # in a new process
results = python_tasks(code, {"worker": 2})   # one process per task of a job
assert_same_weights(model.get_weights(), reference.get_weights())
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kdist.cluster import Cluster
from kdist.launch.local_engine import loopback_addresses, reserve_ports
from kdist.launch.watchdog import tied_command

# After a task of a job fails, the others get this time to report their own errors.
_GRACE_SECONDS = 5.0


def assert_same_weights(weights: Sequence, reference: Sequence, tolerance: float = 1e-5):
    """Asserts that two lists of arrays have equal shapes and differ by at most `tolerance`.

    Args:
        weights: list of arrays, such as `model.get_weights()`.
        reference: the expected arrays.
        tolerance: largest allowed absolute difference of any element. Defaults to 1e-5.

    Raises:
        AssertionError: a shape differs, or an element differs by more than `tolerance`.

    Example:

        assert_same_weights(model.get_weights(), reference.get_weights(), tolerance=1e-6)
    """
    shapes = [np.shape(w) for w in weights], [np.shape(w) for w in reference]
    assert shapes[0] == shapes[1], f"shapes differ: {shapes[0]} and {shapes[1]}"
    worst = largest_difference(weights, reference)
    assert worst <= tolerance, f"weights differ by {worst:.3g}, allowed are {tolerance:.3g}"


def largest_difference(weights: Sequence, reference: Sequence) -> float:
    """Returns the largest absolute difference of two lists of arrays, or NaN if one is NaN."""
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
    """Runs code in a new Python process.

    Logical devices can be configured only once per process, and a failed collective breaks all
    later strategies of its process. Tests with other devices therefore need a new process. On Linux
    it ends with this one, even if a signal ends it.

    Args:
        code: the program; its last line of output must be JSON.
        arguments: command-line arguments. Defaults to none.
        environment: additional environment variables. Defaults to none.
        timeout_seconds: time limit in seconds. Defaults to 300.

    Returns:
        The value of the last line of output, decoded from JSON.

    Raises:
        AssertionError: the process failed; the message contains the end of its output.
        subprocess.TimeoutExpired: the time limit was exceeded.

    Example:

        assert python("print(40 + 2)") == 42
    """
    process = subprocess.run(
        tied_command([sys.executable, "-c", code, *arguments]),
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
    """Runs code in one process per task of a job on this machine, with TF_CONFIG set.

    Args:
        code: the program, the same for all tasks.
        tasks: number of tasks per role, such as `{"worker": 2}`.
        arguments: command-line arguments. Defaults to none.
        timeout_seconds: time limit for the job in seconds. Defaults to 300.

    Returns:
        One value per task, in the order of `tasks`: the last line of its output that is JSON, or
        None if the task, such as a parameter server, prints none.

    Raises:
        AssertionError: a process failed; the message contains the end of its output.
        subprocess.TimeoutExpired: the time limit was exceeded.

    Example:

        code = "import os; print(os.environ['TF_CONFIG'])"
        configs = python_tasks(code, {"worker": 2})
    """
    processes = []
    deadline = time.monotonic() + timeout_seconds
    with reserve_ports(sum(tasks.values())) as ports, tempfile.TemporaryDirectory() as directory:
        job = loopback_addresses(tasks, ports)
        clusters = [Cluster(job, role, n) for role in job for n in range(len(job[role]))]
        try:
            for cluster in clusters:
                environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
                cluster.publish(environment)
                output = pathlib.Path(directory) / cluster.name
                with output.open("w") as file:
                    command = tied_command([sys.executable, "-c", code, *arguments])
                    process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
                processes.append((process, output))
            wait_for_exit(lambda: [process.poll() for process, _ in processes], deadline)
        finally:
            for process, _ in processes:
                process.kill()
                process.wait()
        return read_results([(output, process.returncode) for process, output in processes])


def wait_for_exit(exit_codes: Callable[[], Sequence[int | None]], deadline: float):
    """Waits until all processes exit, or for a grace period after one has failed.

    `exit_codes` returns the exit code of each process, or None while it runs. `deadline` is on the
    clock of `time.monotonic`.

    Raises:
        subprocess.TimeoutExpired: the time limit was exceeded.
    """
    while None in (codes := exit_codes()):
        left = deadline - time.monotonic()
        if any(codes):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if left < 0.2:
                return
        elif left <= 0:
            raise subprocess.TimeoutExpired("the tasks of a job", timeout=0)
        time.sleep(0.05)


def read_results(tasks: Sequence[tuple[pathlib.Path, int | None]]) -> list:
    """Returns the last JSON line of the outputs of tasks, pairs of a file and an exit code."""
    failed = [
        f"{output.name} exited with {code}: {output.read_text()[-3000:]}"
        for output, code in tasks
        if code != 0
    ]
    assert not failed, "\n---\n".join(failed)
    return [_last_json(output.read_text()) for output, _ in tasks]


def _last_json(text):
    """Returns the last line that starts like JSON, decoded; TensorFlow may log lines after it."""
    lines = [line for line in text.splitlines() if line.startswith(("{", "["))]
    return json.loads(lines[-1]) if lines else None
