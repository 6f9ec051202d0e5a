"""A file or directory that one process at a time works with."""

import os

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Lock:
    """Held until it is released, or the process and those that it forked have ended.

    Args:
        path: a file or a directory that exists.

    Raises:
        BlockingIOError: it is held, by another process or by this one.
    """

    def __init__(self, path: str | os.PathLike):
        self._descriptor: int | None = None
        if fcntl is None:
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self):
        """Lets others have it."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also if a forked child has it
            os.close(self._descriptor)
            self._descriptor = None
