"""Separate virtual environments of the rivals, each with its own pinned packages."""

import pathlib
import subprocess
import sys

REQUIREMENTS = pathlib.Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))
_INSTALLED = "installed.txt"  # the requirements, once they are there


def python(directory: pathlib.Path, name: str) -> str | None:
    """Returns the interpreter of an environment; None if it is missing or has other pins."""
    installed = directory / name / _INSTALLED
    if not installed.exists() or installed.read_text() != _pins(name).read_text():
        return None
    return str(directory / name / "bin" / "python")


def prepare(directory: pathlib.Path, name: str, timeout_seconds: float = 1800.0):
    """Creates an environment, or updates it to the pinned packages.

    Raises:
        RuntimeError: the packages cannot be installed.
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
