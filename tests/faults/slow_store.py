"""Object storage in a directory that takes some time for each file: slow:///a/directory."""

import time

import fsspec
from fsspec.implementations.local import LocalFileSystem

SECONDS_PER_FILE = 0.5


class SlowStore(LocalFileSystem):
    """Directory whose files take half a second each to write."""

    protocol = "slow"

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("slow://").rstrip("/")

    def put_file(self, source, target, **options):
        """Copies a file to the store."""
        time.sleep(SECONDS_PER_FILE)
        super().put_file(source, target, **options)


def slow_url(directory) -> str:
    """Returns the URL of a directory as a slow store, which fsspec can open afterwards."""
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    return f"slow://{directory}"
