"""Programs that start a Ray cluster, and the processes that they leave behind."""

import contextlib
import pathlib
import subprocess
import sys
import uuid

import psutil

from kdist.launch.function_job import with_module_paths

_MARK = "KDIST_TEST_RAY"


def ray_environment(mark: str) -> dict[str, str]:
    """Returns environment variables of a program that starts a cluster, which `mark` identifies."""
    # A cluster of Ray has no authentication by default.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    return {**token, _MARK: mark, "RAY_USAGE_STATS_ENABLED": "0"}


def run_ray_program(program: pathlib.Path, directory: str, seconds: float, **environment: str):
    """Runs a program with a directory as its argument; it finds the modules of this process.

    Returns:
        (output, command lines of the processes that it left, which are killed).
    """
    mark = uuid.uuid4().hex
    output = pathlib.Path(directory) / "output"
    try:
        with output.open("w") as file:
            code = subprocess.run(
                [sys.executable, str(program), directory],
                stdout=file,
                stderr=file,
                env={**with_module_paths(), **ray_environment(mark), **environment},
                timeout=seconds,
                check=False,
            ).returncode
    finally:
        left = end_marked(mark)
    said = output.read_text()
    assert code == 0, said[-5000:]
    return said, left


def end_marked(mark: str) -> list[str]:
    """Kills processes that a program left behind; returns their command lines."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != "zombie":
                left.append(" ".join(process.cmdline())[:200])
                process.kill()
    return left
