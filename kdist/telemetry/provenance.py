"""Versions and git commit of a training program. Imports no TensorFlow."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys


def versions(*more: str) -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect the results."""
    found = {"python": sys.version.split()[0]}
    for name in ("kdist", "tensorflow", "keras", "numpy", *more):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit(program: str | None = None) -> str | None:
    """Returns the commit of the program's checkout, or of the working directory; None without.

    Args:
        program: path of the program. Defaults to that of this process.
    """
    return _git(["rev-parse", "HEAD"], program)


def git_remote(program: str | None = None) -> str | None:
    """Returns the address of the git remote, without the user and the password that it may hold.

    Args:
        program: path of the program. Defaults to that of this process.
    """
    url = _git(["config", "--get", "remote.origin.url"], program)
    if url is None:
        return None
    scheme, separator, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    # Without a scheme it is a path, or git@host:path, whose user is no secret.
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}" if separator else url


def _git(arguments, program):
    path = pathlib.Path(sys.argv[0] if program is None else program).resolve()
    # A console command lies in an environment, whose checkout says nothing about the program.
    is_own = path.is_file() and not path.is_relative_to(pathlib.Path(sys.prefix).resolve())
    for directory in [path.parent] * is_own + [pathlib.Path.cwd()]:
        if answer := _answer(["git", *arguments], directory):
            return answer
    return None


def _answer(command, directory):
    try:
        return subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
