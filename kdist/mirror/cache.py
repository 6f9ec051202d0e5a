"""Local copies of data in object storage.

    directory = kdist.mirror.cached("gs://bucket/pets")   # ~/.cache/kdist/gs/bucket/pets
    train, test = kdist.data.load(directory, batch=batch)

A file is fetched once, and again after it has changed in the bucket. `kdist.data.load` does this
for a dataset or a `data_dir` that is a URL.
"""

import concurrent.futures
import contextlib
import json
import logging
import os
import pathlib
import shutil
import time
from collections.abc import Iterable, Iterator

from kdist.json_text import parse_json
from kdist.mirror.store import FileState, Store
from kdist.run_directory import FileLock

_logger = logging.getLogger(__name__)

# Environment variable with the directory of all copies.
CACHE_DIR = "KDIST_CACHE_DIR"
# What was fetched, one file per line. Hidden, so that it is no file of a dataset.
_RECORDS = ".kdist-fetched.jsonl"
_PART = ".kdist-part-"
# Small files take a round trip each: fetching some at the same time hides it.
_THREADS = 16
_LOG_SECONDS = 10.0
_LOCK_POLL_SECONDS = 0.5


def cache_directory(url: str) -> pathlib.Path:
    """Returns the directory of the local copy of a URL, which need not exist."""
    protocol, _, rest = url.partition("://")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = os.environ.get(CACHE_DIR) or os.path.join(home, "kdist")
    return pathlib.Path(root, protocol, rest.strip("/")).absolute()


def cached(url: str) -> pathlib.Path:
    """Copies the files below a URL to a local directory, unless they are there and unchanged.

    Processes of one machine share the copy: one of them fetches it, and the others wait. If it is
    interrupted, the next call continues. Progress is logged.

    Args:
        url: the URL, such as gs://bucket/pets.

    Returns:
        The directory: `~/.cache/kdist/gs/bucket/pets`, or below KDIST_CACHE_DIR. It has the files
        of the URL and no others. A file:// URL is not copied.

    Raises:
        FileNotFoundError: there are no files below the URL.
        ValueError: it is no URL, or its protocol is unknown.
        ImportError: the package of its protocol is not installed.
        OSError: the store cannot be read, or the directory cannot be written or is too small.

    Example:

        directory = kdist.mirror.cached("s3://bucket/pets")
        sorted(directory.glob("*/*.jpg"))
    """
    store = Store(url)
    if store.is_local:
        return _existing(pathlib.Path(store.root))
    directory = cache_directory(store.url)
    listing = _files_of(store.listing())
    if not listing:
        raise FileNotFoundError(f"{url} has no files; check the name of the bucket and the prefix")
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        known = _read_records(directory / _RECORDS)
        for name in known.keys() - listing.keys():
            (directory / name).unlink(missing_ok=True)
        missing = {
            name: file
            for name, file in listing.items()
            if not _is_there(directory, name, known, file)
        }
        if missing:
            _check_space(directory, url, missing)
            _fetch(store, directory, missing)
    return directory


def _existing(directory):
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory; check the file:// URL")
    return directory


def _files_of(listing):
    """Returns a listing without placeholders of folders, and without names that lead elsewhere."""
    folders = {str(parent) for name in listing for parent in pathlib.PurePosixPath(name).parents}
    return {
        name: file
        for name, file in listing.items()
        if name.rstrip("/") not in folders
        and not name.endswith("/")
        and ".." not in pathlib.PurePosixPath(name).parts
    }


def _is_there(directory, name, known, file):
    try:
        size = (directory / name).stat().st_size
    except OSError:
        return False
    return size == file.size and known.get(name) == file.state


def _read_records(path):
    """Returns {name: state} of the files that were fetched; of the last line of each name."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(
                ValueError, KeyError, TypeError
            ):  # the last one may be cut off
                record = parse_json(line)
                found[record["name"]] = record["state"]
    return found


def _check_space(directory, url, missing):
    needed = sum(file.size for file in missing.values())
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(
            f"{url}: {needed / 1e9:.1f} GB are to be fetched, and {directory} has {free / 1e9:.1f} "
            f"GB left; set {CACHE_DIR} to a directory on a larger disk"
        )


def _fetch(store, directory, missing: dict[str, FileState]):
    """Fetches files in threads, and records each of them when it is complete."""
    whole = sum(file.size for file in missing.values())
    _logger.info(
        "fetching %s: %d files, %.1f MB, to %s", store.url, len(missing), whole / 1e6, directory
    )

    def fetch(name):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{_PART}{path.name}")
        store.get(name, part)
        os.replace(part, path)
        return name

    began = time.monotonic()
    with (
        open(directory / _RECORDS, "a") as records,
        concurrent.futures.ThreadPoolExecutor(_THREADS) as pool,
    ):
        futures = [pool.submit(fetch, name) for name in missing]
        try:
            names = (future.result() for future in concurrent.futures.as_completed(futures))
            for name in _logging_progress(names, store.url, missing, whole, began):
                records.write(json.dumps({"name": name, "state": missing[name].state}) + "\n")
                records.flush()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _logging_progress(
    names: Iterable[str], url: str, files: dict[str, FileState], whole: int, began: float
) -> Iterator[str]:
    """Yields names, and logs now and then how much of all files they are."""
    done, logged = 0, began
    for name in names:
        yield name
        done += files[name].size
        now = time.monotonic()
        if now - logged >= _LOG_SECONDS:
            logged = now
            _logger.info(
                "fetched %.1f of %.1f MB of %s (%.1f MB/s)",
                done / 1e6,
                whole / 1e6,
                url,
                done / 1e6 / (now - began),
            )


@contextlib.contextmanager
def _locked(directory):
    """Waits until no other process fetches to a directory, and keeps others from doing so."""
    waits = False
    while True:
        try:
            lock = FileLock(directory)
            break
        except BlockingIOError:
            if not waits:
                _logger.info("waiting for another process that fetches to %s", directory)
            waits = True
            time.sleep(_LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()
