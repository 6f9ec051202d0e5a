"""Checkpoints are written while training goes on.

writer = BackgroundWriter(files)
writer.put(step, arrays, state)          # returns at once
writer.wait()                            # until it is on disk
writer.close()
"""

import sys
import threading
from typing import Any

from kdist.checkpoint.files import CheckpointFiles


class BackgroundWriter:
    """Writes what it is given, in one thread; of several that wait, the last one.

    A failure (a full disk, say) is said, and training goes on: what was written before is as it
    was, and the next checkpoint is tried again.

    Args:
        files: where to.

    Attributes:
        failed: how many could not be written since one was.
    """

    def __init__(self, files: CheckpointFiles):
        self._files = files
        self._changed = threading.Condition()
        self._waiting: tuple[Any, ...] | None = None
        self._writes = self._ends = False
        self.failed = 0
        self._thread = threading.Thread(target=self._run, name="kdist-checkpoint", daemon=True)
        self._thread.start()

    def put(self, *checkpoint):
        """Takes the arguments of `CheckpointFiles.write`.

        A best one that has not been written yet is not forgotten for one that is not.
        """
        with self._changed:
            while self._waiting is not None and self._waiting[3:] == (True,):
                self._changed.wait()
            self._waiting = checkpoint
            self._changed.notify_all()

    def wait(self):
        """Returns when nothing is left to write."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._writes)

    def close(self):
        """Writes what is left."""
        self.wait()
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._ends)
                if self._waiting is None:
                    return
                checkpoint, self._waiting, self._writes = self._waiting, None, True
                self._changed.notify_all()
            try:
                self._write(checkpoint)
            finally:
                with self._changed:
                    self._writes = False
                    self._changed.notify_all()

    def _write(self, checkpoint):
        try:
            self._files.write(*checkpoint)
            self.failed = 0
        except OSError as error:
            self.failed += 1
            print(
                f"kdist: checkpoint {checkpoint[0]} cannot be written to {self._files.directory} "
                f"({error}); training goes on, and the next is tried. Make room, or set another "
                "--run_dir",
                file=sys.stderr,
                flush=True,
            )
