"""What lies in a model's directory: its versions, and what each needs. Imports no TensorFlow."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

METADATA = pathlib.PurePath("assets.extra", "kdist.json")


def versions(directory: str | os.PathLike) -> list[int]:
    """The versions of a model that are there, ascending; other files are none.

    Raises:
        ValueError: `directory` is none.
    """
    if not pathlib.Path(directory).is_dir():
        raise ValueError(f"{directory} is no directory: give one with a model's versions")
    return sorted(
        int(path.name)
        for path in pathlib.Path(directory).iterdir()
        if path.name.isdecimal()
        and path.name == str(int(path.name))  # not 01, which is another path
        and (path / "saved_model.pb").exists()
    )


def contents(version_directory: str | os.PathLike) -> frozenset[tuple[str, int, int]]:
    """What a version's files are known by: (path, bytes, when changed), to see whether they change.

    A file that goes meanwhile is left out.
    """
    found = set()
    for path in pathlib.Path(version_directory).rglob("*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.add((str(path), status.st_size, status.st_mtime_ns))
    return frozenset(found)


def check_within(version_directory: str | os.PathLike, home: str | os.PathLike) -> None:
    """Refuses a version any of whose files is elsewhere, by whatever links.

    Raises:
        ValueError: a link leads out of `home`.
    """
    home, to_see, seen = pathlib.Path(home).resolve(), [pathlib.Path(version_directory)], set()
    while to_see:
        path = to_see.pop()
        real = path.resolve()
        if not real.is_relative_to(home):
            raise ValueError(f"{path} leads out of {home}: copy what it points to")
        if real not in seen and real.is_dir():
            seen.add(real)
            to_see += path.iterdir()


def read_metadata(version_directory: str | os.PathLike) -> dict[str, Any]:
    """What `export` has written of a version.

    Returns:
        `name`, `version`, `classes` (None without), `devices` (see `needed_devices`), `inputs` and
        `outputs` (name -> `shape`, with None for rows, and `dtype`), `versions` of the packages
        that wrote it, and when it was `written`.

    Raises:
        OSError: nothing was written: another program has exported it.
    """
    return json.loads((pathlib.Path(version_directory) / METADATA).read_text())


def needed_devices(version_directory: str | os.PathLike) -> list[str]:
    """The devices that a version of a split model is placed on, such as `["CPU:0", "CPU:1"]`.

    Empty for one that computes anywhere. Such devices are there after
    `kdist.devices.find_devices(needed_devices(path))`.
    """
    try:
        return list(read_metadata(version_directory).get("devices", []))
    except FileNotFoundError:
        return []


def all_needed_devices(directories: Iterable[str | os.PathLike]) -> list[str]:
    """`needed_devices` of all versions of models, each once.

    Args:
        directories: of models' versions.

    Raises:
        ValueError: one is none.
    """
    found = {
        device
        for directory in directories
        for number in versions(directory)
        for device in needed_devices(pathlib.Path(directory) / str(number))
    }
    return sorted(found)


def check_devices(version_directory: str | os.PathLike, there_are: Iterable[str]) -> None:
    """Refuses a version that is placed on devices that are not there.

    TensorFlow would load it and, without a word, put all of it on one device.

    Args:
        version_directory: of any SavedModel.
        there_are: devices of the process that is to load it, such as `["CPU:0", "GPU:0"]`.

    Raises:
        ValueError: some are missing.
    """
    needed, there_are = needed_devices(version_directory), list(there_are)
    missing = [name for name in needed if name not in there_are]
    if missing:
        raise ValueError(
            f"{version_directory} is placed on {', '.join(needed)}, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing here (there are "
            f'{", ".join(there_are)}): start with these devices, or export with placement="joined"'
        )
