"""Exported models in object storage.

    put_version("models/fashion/1", "gs://bucket/models/fashion")   # gs://bucket/models/fashion/1

Buckets have no rename. The metadata are written first and claim the version, and the SavedModel is
written last and makes it complete. Servers pass over a version without it.
"""

import json
import os
import pathlib

from kdist.mirror.store import Store
from kdist.serving.core.model_directory import (
    BATCHING_PARAMETERS,
    METADATA,
    MODEL_CONFIG,
    SAVED_MODEL,
    read_metadata,
)


def next_version(url: str) -> int:
    """Returns one more than the highest version at a URL, which may be incomplete.

    Raises:
        OSError: the store cannot be read.
    """
    return max(_versions(Store(url)), default=0) + 1


def check_version(url: str, version: int):
    """Raises a FileExistsError if a version exists at a URL, complete or not."""
    if version in _versions(Store(url)):
        raise _exists(url, version)


def put_version(directory: str | os.PathLike, url: str, version: int | None = None) -> str:
    """Copies an exported version to object storage.

    Args:
        directory: local directory of the version, as `kdist.serving.export` returns it.
        url: URL of all versions, such as gs://bucket/models/fashion.
        version: positive integer. Defaults to one more than the highest existing version.

    Returns:
        The URL of the version.

    Raises:
        FileExistsError: the version exists.
        OSError: the store cannot be read or written. The version is then incomplete.
    """
    directory, store = pathlib.Path(directory), Store(url)
    if version is not None:
        check_version(url, version)
    number = version or next_version(url)
    metadata = read_metadata(directory) | {"name": store.url.rpartition("/")[2]}
    while not store.create(
        f"{number}/{METADATA.as_posix()}",
        (json.dumps({**metadata, "version": number}, indent=1) + "\n").encode(),
    ):
        if version is not None:
            raise _exists(url, version)
        number += 1
    names = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    for name in sorted(names, key=lambda name: (name.name == SAVED_MODEL, name)):
        if name != METADATA:
            store.put(directory / name, f"{number}/{name.as_posix()}")
    for configuration in (BATCHING_PARAMETERS, MODEL_CONFIG):
        store.put(directory.parent / configuration, configuration)
    return f"{store.url}/{number}"


def _versions(store):
    heads = {name.partition("/")[0] for name in store.names()}
    return [int(head) for head in heads if head.isdecimal()]


def _exists(url, version):
    return FileExistsError(
        f"{url.rstrip('/')}/{version} exists, and servers do not reload a version: give another, "
        "or none"
    )
