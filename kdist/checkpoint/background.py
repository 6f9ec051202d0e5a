"""Background thread that writes checkpoints while training continues.

writer = BackgroundWriter(files)
writer.put(step, arrays, state)          # returns immediately
writer.wait()                            # until it is on disk
writer.close()
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from kdist.checkpoint.files import CheckpointFiles

_logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes checkpoints in one thread; a newer checkpoint replaces a queued one.

    A failure, such as a full disk, is logged and training continues. Earlier checkpoints remain
    intact, and the next checkpoint is tried again.

    Args:
        files: destination of the checkpoints.
        after_write: function that the thread calls after each checkpoint. Defaults to None.

    Attributes:
        failed: number of failed writes since the last successful one.
        written: bytes and seconds of the last successful write; None before.
    """

    def __init__(self, files: CheckpointFiles, after_write: Callable[[], Any] | None = None):
        self._files, self._after_write = files, after_write
        self._changed = threading.Condition()
        self._queued: tuple[Any, ...] | None = None
        self._is_writing = self._is_closing = False
        self.failed = 0
        self.written: tuple[int, float] | None = None
        self._thread = threading.Thread(target=self._run, name="kdist-checkpoint", daemon=True)
        self._thread.start()

    def put(self, *checkpoint):
        """Queues a checkpoint; the arguments are those of `CheckpointFiles.write`.

        A queued best checkpoint is not replaced, but written first.
        """
        with self._changed:
            while self._queued is not None and self._queued[3:] == (True,):
                self._changed.wait()
            self._queued = checkpoint
            self._changed.notify_all()

    def wait(self):
        """Waits until all checkpoints are written."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued is None and not self._is_writing)

    def close(self):
        """Waits until all checkpoints are written, and ends the thread."""
        self.wait()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queued is not None or self._is_closing)
                if self._queued is None:
                    return
                checkpoint, self._queued, self._is_writing = self._queued, None, True
                self._changed.notify_all()
            try:
                self._write(checkpoint)
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _write(self, checkpoint):
        try:
            began = time.monotonic()
            path = self._files.write(*checkpoint)
            size = sum(file.stat().st_size for file in path.iterdir())
            self.failed, self.written = 0, (size, time.monotonic() - began)
            if self._after_write is not None:
                self._after_write()
        except OSError as error:
            self.failed += 1
            _logger.warning(
                "cannot write checkpoint %d to %s (%s); training continues and will retry with the "
                "next one. Free disk space, or use another --run_dir",
                checkpoint[0],
                self._files.directory,
                error,
            )
        except Exception:  # else `close` would wait for a thread that has ended
            self.failed += 1
            _logger.exception("cannot write checkpoint %d; training continues", checkpoint[0])
