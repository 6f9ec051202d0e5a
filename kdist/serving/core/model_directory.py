"""Files in a model's directory: versions, metadata, and TensorFlow Serving's configuration.

Imports no TensorFlow.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from kdist.json_text import parse_json
from kdist.run_directory import write_text
from kdist.serving.core.settings import BatchSettings, padded_sizes

METADATA = pathlib.PurePath("assets.extra", "kdist.json")
# The file that makes a version complete. It is written last where a directory cannot be renamed.
SAVED_MODEL = "saved_model.pb"
BATCHING_PARAMETERS = "batching_parameters.txt"
MODEL_CONFIG = "models.config"


def versions(directory: str | os.PathLike) -> list[int]:
    """Returns the versions in a model's directory, ascending. Other files are ignored.

    Raises ValueError if `directory` is not a directory.
    """
    if not pathlib.Path(directory).is_dir():
        raise ValueError(f"{directory} is not a directory: give one that holds a model's versions")
    return sorted(
        int(path.name)
        for path in pathlib.Path(directory).iterdir()
        if path.name.isdecimal()
        and path.name == str(int(path.name))  # 01 would be a second path of version 1
        and (path / SAVED_MODEL).exists()
    )


def file_states(version_directory: str | os.PathLike) -> frozenset[tuple[str, int, int]]:
    """Returns (path, bytes, modification time) of each file of a version, to detect changes.

    Files that disappear during the call are left out.
    """
    states = set()
    for path in pathlib.Path(version_directory).rglob("*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            states.add((str(path), status.st_size, status.st_mtime_ns))
    return frozenset(states)


def check_within(version_directory: str | os.PathLike, home: str | os.PathLike) -> None:
    """Raises ValueError if a link leads from any file of a version to outside of `home`."""
    home, pending, seen = pathlib.Path(home).resolve(), [pathlib.Path(version_directory)], set()
    while pending:
        path = pending.pop()
        real = path.resolve()
        if not real.is_relative_to(home):
            raise ValueError(f"{path} leads out of {home}: copy the file that it points to")
        if real not in seen and real.is_dir():
            seen.add(real)
            pending += path.iterdir()


def read_metadata(version_directory: str | os.PathLike) -> dict[str, Any]:
    """Returns the metadata that `kdist.serving.export` wrote for a version.

    Its keys are `name`, `version`, `classes` (may be None), `devices` (see `needed_devices`),
    `inputs` and `outputs` (name -> `shape`, with None for rows, and `dtype`), `versions` of the
    packages that wrote it, and the time it was `written`. Raises OSError if another program
    exported the version, and ValueError if the file is damaged.
    """
    path = pathlib.Path(version_directory) / METADATA
    try:
        metadata = parse_json(path.read_text())
        if not isinstance(metadata, dict):
            raise TypeError("it is no JSON object")
        if not isinstance(metadata.get("devices") or [], list):
            raise TypeError("its devices are no list")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): export the version again") from error
    return metadata


def needed_devices(version_directory: str | os.PathLike) -> list[str]:
    """Returns the devices that a split model is placed on, such as `["CPU:0", "CPU:1"]`.

    The list is empty for a model that computes on any device. Call
    `kdist.devices.find_devices(needed_devices(path))` to create the devices.
    """
    try:
        return list(read_metadata(version_directory).get("devices") or [])
    except FileNotFoundError:
        return []


def all_needed_devices(directories: Iterable[str | os.PathLike], newest: int = 1) -> list[str]:
    """Returns the devices that the `newest` versions in each of the directories need, sorted.

    A version whose metadata are damaged needs none; an error names it when it is loaded.
    """
    devices: set[str] = set()
    for directory in directories:
        for number in versions(directory)[-newest:]:
            with contextlib.suppress(ValueError):
                devices |= set(needed_devices(pathlib.Path(directory) / str(number)))
    return sorted(devices)


def check_devices(version_directory: str | os.PathLike, available: Iterable[str]) -> None:
    """Raises ValueError if a version is placed on devices that are not `available`.

    TensorFlow would silently load all of it on one device.
    """
    needed, available = needed_devices(version_directory), list(available)
    missing = [name for name in needed if name not in available]
    if missing:
        raise ValueError(
            f"{version_directory} is placed on {', '.join(needed)}, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing here (available: "
            f'{", ".join(available)}): start with these devices, or export with placement="merged"'
        )


def mount_path(name: str) -> str:
    """Returns the path at which TensorFlow Serving finds the directory of a model."""
    return f"/models/{name}"


def write_serving_files(directory: str | os.PathLike, settings: BatchSettings) -> None:
    """Writes the configuration of TensorFlow Serving for the model in a directory.

        tensorflow_model_server --model_config_file=/models/fashion/models.config \\
            --enable_batching \\
            --batching_parameters_file=/models/fashion/batching_parameters.txt

    The files hold the protos `tensorflow.serving.BatchingParameters` and `ModelServerConfig` as
    text. TensorFlow Serving requires that the allowed sizes ascend to the largest batch.
    """
    directory = pathlib.Path(directory).resolve()
    parameters = [
        f"max_batch_size {{ value: {settings.max_batch} }}",
        f"batch_timeout_micros {{ value: {round(settings.timeout_seconds * 1e6)} }}",
        "max_enqueued_batches { value: 1000 }",
        "num_batch_threads { value: 1 }",
        *(f"allowed_batch_sizes: {size}" for size in padded_sizes(settings.max_batch)),
    ]
    config = [
        "model_config_list {",
        "  config {",
        f"    name: {json.dumps(directory.name)}",
        f"    base_path: {json.dumps(mount_path(directory.name))}",
        '    model_platform: "tensorflow"',
        "  }",
        "}",
    ]
    for name, lines in ((BATCHING_PARAMETERS, parameters), (MODEL_CONFIG, config)):
        write_text(directory / name, "\n".join(lines) + "\n")
