"""Environments of rivals, each with what its own file pins, so that no two get in their way."""

import pathlib
import subprocess
import sys

REQUIREMENTS = pathlib.Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))
_INSTALLED = "installed.txt"  # the requirements, once they are there


def python(directory: pathlib.Path, name: str) -> str | None:
    """The interpreter of an environment; None if it is not there, or made from other pins."""
    installed = directory / name / _INSTALLED
    if not installed.exists() or installed.read_text() != _pins(name).read_text():
        return None
    return str(directory / name / "bin" / "python")


def prepare(directory: pathlib.Path, name: str, timeout_seconds: float = 1800.0):
    """Makes an environment, or brings it to what is pinned.

    Raises:
        RuntimeError: its packages cannot be had.
    """
    if python(directory, name):
        return
    home = directory / name
    install = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", str(home)],
        [*install, "--requirement", str(_pins(name))],
    ):
        try:
            subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_seconds, check=True
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{name}: no environment in {timeout_seconds:.0f} s") from error
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{name}: no environment:\n{error.stderr[-2000:]}") from error
    (home / _INSTALLED).write_text(_pins(name).read_text())


def _pins(name):
    return REQUIREMENTS / f"{name}.txt"
