"""Files under a URL, by fsspec: Google Cloud Storage, S3, a mounted directory, or memory."""

import contextlib
import functools
import os
import pathlib
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from kdist.run_directory import RUNS

# Protocol -> the extra of kdist that installs its package.
_EXTRAS = {"gs": "gs", "gcs": "gs", "s3": "s3", "s3a": "s3"}
# A store that is a directory of this machine, in which files have to be renamed into place.
_LOCAL = ("file", "local")


def is_url(text: str | os.PathLike | None) -> bool:
    """Returns whether a text is a URL such as gs://bucket/run."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", os.fspath(text or "")) is not None


def check_url(url: str):
    """Checks a URL without connecting to its store.

    Raises:
        ValueError: it is no URL of a prefix, or its protocol is unknown.
        ImportError: the package of its protocol is not installed.
    """
    protocol, separator, path = url.partition("://")
    if not separator or not is_url(url):
        raise ValueError(
            f"{url} is no URL; write gs://BUCKET/NAME, s3://BUCKET/NAME, or file:///NAME"
        )
    parts = path.strip("/").split("/")
    if not parts[-1] or (protocol in _EXTRAS and len(parts) < 2) or ".." in parts:
        raise ValueError(f"{url} names no directory of a bucket; write {protocol}://BUCKET/NAME")
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install 'kdist[{extra}]'" if extra else str(error)
        raise ImportError(f"{url}: the package for {protocol}:// is missing: {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{url}: fsspec knows no {protocol}://; use gs:// or s3://") from error


def local_directory(path: str | os.PathLike) -> pathlib.Path:
    """Returns the local run directory of a path or URL.

    Example:

        >>> str(local_directory("gs://bucket/cats/a"))
        'runs/gs/bucket/cats/a'
    """
    if not is_url(path):
        return pathlib.Path(path)
    protocol, _, rest = os.fspath(path).partition("://")
    return RUNS / protocol / rest.strip("/")


@contextlib.contextmanager
def fetched(url: str, names: Iterable[str]) -> Iterator[pathlib.Path]:
    """Copies files below a URL to a temporary directory; those that do not exist are left out.

    Args:
        url: the URL, such as gs://bucket/runs/a.
        names: names of the files, without directories.

    Yields:
        The directory, whose name is the last part of the URL.

    Raises:
        OSError: the store cannot be read.
    """
    store = Store(url)
    with tempfile.TemporaryDirectory(prefix="kdist-") as parent:
        directory = pathlib.Path(parent) / store.url.rpartition("/")[2]
        directory.mkdir()
        for name in names:
            if (content := store.read(name)) is not None:
                (directory / name).write_bytes(content)
        yield directory


class FileState(NamedTuple):
    """Size of a file in bytes, and a value that changes with its content.

    Example:

        store.listing()["config.json"].size
    """

    size: int
    state: list[str]


class Store:
    """Files under a URL. Their names are relative to it, such as "checkpoints/step-0000000150".

    Args:
        url: the URL, such as gs://bucket/runs/a. gcsfs, s3fs, or another package of fsspec takes
            credentials and endpoints from the environment.

    Attributes:
        url: the URL, without a slash at its end.
        is_local: whether it is a directory of this machine.

    Raises:
        ValueError: it is no URL of a prefix, or its protocol is unknown.
        ImportError: the package of its protocol is not installed.

    Example:

        store = kdist.mirror.Store("file:///mnt/bucket/runs/a")
        store.write("notes.txt", b"the first run")
        store.read("notes.txt"), store.names()
    """

    def __init__(self, url: str):
        check_url(url)
        self.url = url.rstrip("/")
        self.is_local = url.partition("://")[0] in _LOCAL

    def names(self, below: str = "") -> list[str]:
        """Returns the names of all files, or of those below a directory; sorted.

        Raises:
            OSError: the store cannot be read.
        """
        return list(self.listing(below))

    def listing(self, below: str = "") -> dict[str, FileState]:
        """Returns the sizes and states of all files, or of those below a directory, by their names.

        Raises:
            OSError: the store cannot be read.
        """
        with self._reporting("list", below):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._path(below), detail=True)
            except FileNotFoundError:
                return {}
        return {
            path.removeprefix(f"{self.root}/"): FileState(details["size"], _state_of(details))
            for path, details in sorted(found.items())
            if path.startswith(f"{self.root}/")  # not the URL itself, if it is a file
        }

    def states(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns {name: value that changes with the file} of those files that exist.

        Raises:
            OSError: the store cannot be read.
        """
        with self._reporting("list", ""):
            self._files.invalidate_cache()
            found = {name: self._state(name) for name in names}
        return {name: state for name, state in found.items() if state is not None}

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if it does not exist.

        Raises:
            OSError: the store cannot be read.
        """
        with self._reporting("read", name):
            self._files.invalidate_cache()
            try:
                return self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None

    def create(self, name: str, content: bytes) -> bool:
        """Writes a small file unless it exists; of several processes, one succeeds.

        Stores that cannot refuse to replace a file, such as fsspec's memory, only look for it
        before they write.

        Returns:
            Whether the file was written.

        Raises:
            OSError: the store cannot be written.
        """
        with self._reporting("write", name):
            if self._state(name) is not None:
                return False
            try:
                self._files.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
        return True

    def write(self, name: str, content: bytes):
        """Writes a small file; it is complete, or unchanged.

        Raises:
            OSError: the store cannot be written.
        """
        with self._reporting("write", name):
            if not self.is_local:
                self._files.pipe_file(self._path(name), content)
                return
            unfinished = self._path(f"{name}.{uuid.uuid4().hex[:8]}")
            self._files.pipe_file(unfinished, content)
            os.replace(unfinished, self._path(name))

    def put(self, path: str | os.PathLike, name: str, on_progress: Callable[[], Any] | None = None):
        """Copies a local file to the store.

        Args:
            path: the local file.
            name: its name in the store.
            on_progress: called whenever a part has been copied, by stores that report it.

        Raises:
            OSError: the file cannot be read, or the store cannot be written.
        """
        import fsspec

        hooks = {"progress": lambda *_, **__: on_progress and on_progress()}
        callback = fsspec.callbacks.Callback(hooks=hooks)
        with self._reporting("write", name):
            self._files.put_file(os.fspath(path), self._path(name), callback=callback)

    def get(self, name: str, path: str | os.PathLike):
        """Copies a file of the store to a local path.

        Raises:
            OSError: the file does not exist, or cannot be read or written.
        """
        with self._reporting("read", name):
            self._files.get_file(self._path(name), os.fspath(path))

    def remove(self, names: Iterable[str]):
        """Removes files in the order of their names.

        Raises:
            OSError: a file cannot be removed.
        """
        for name in names:
            with self._reporting("remove", name), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))
            if self.is_local:  # buckets have no directories
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.dirname(self._path(name)))

    @functools.cached_property
    def _files(self):
        """The file system, whose package may connect to the store when it is first used."""
        import fsspec

        options: dict[str, Any] = {"auto_mkdir": True} if self.is_local else {}
        with self._reporting("open", ""):
            return fsspec.core.url_to_fs(self.url, **options)[0]

    @property
    def root(self) -> str:
        """The URL as a path of its file system, without the protocol."""
        return self._files._strip_protocol(self.url).rstrip("/")

    def _path(self, name):
        return f"{self.root}/{name}".rstrip("/")

    def _state(self, name):
        try:
            details = self._files.info(self._path(name))
        except FileNotFoundError:
            return None
        return _state_of(details)

    @contextlib.contextmanager
    def _reporting(self, action, name):
        try:
            yield
        except Exception as error:  # each package has its own, some of them no OSError
            url = f"{self.url}/{name}".rstrip("/")
            reason = str(error).strip().partition("\n")[0] or "no reason given"
            raise OSError(f"cannot {action} {url} ({type(error).__name__}: {reason})") from error


def file_state(path: pathlib.Path) -> tuple[int, int, int] | None:
    """Returns a value that changes with a local file; None without the file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _state_of(details):
    """Returns a value that changes with a file, from what its store tells about it."""
    keys = ("size", "etag", "ETag", "updated", "LastModified", "mtime", "created")
    return [str(details.get(key)) for key in keys]
