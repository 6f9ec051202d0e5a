"""A job that failed is started again, as long as that gets it anywhere.

restarts = Restarts(most=3, directory=run_dir / "checkpoints")
while job_fails() and restarts.wait_for_next(say):
    ...
"""

import pathlib
import time
from collections.abc import Callable

from kdist.run_directory import checkpoint_step

_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0


class Restarts:
    """Counts restarts without progress: since a checkpoint was last added, there was none.

    Args:
        most: restarts in a row without progress; 0 for none at all.
        directory: where the job's checkpoints are, directories such as `step-0000000150`.
    """

    def __init__(self, most: int, directory: pathlib.Path):
        self._most, self._directory = most, directory
        self._in_vain = 0
        self._newest = self._newest_step()

    def wait_for_next(self, say: Callable[[str], None]) -> bool:
        """Whether to start again; if so, after a while: each time in vain twice as long."""
        newest = self._newest_step()
        if newest != self._newest:
            self._newest, self._in_vain = newest, 0
        if self._in_vain >= self._most:
            if self._most:
                say(
                    f"not started again: {self._most} restarts in a row came to no new checkpoint "
                    "(more: --max_restarts)"
                )
            return False
        seconds = min(_FIRST_WAIT_SECONDS * 2**self._in_vain, _LONGEST_WAIT_SECONDS)
        self._in_vain += 1
        place = "its beginning" if newest is None else f"the checkpoint of step {newest}"
        say(
            f"starting again from {place} in {seconds:g} s; restart {self._in_vain} of "
            f"{self._most} since there was a new checkpoint"
        )
        time.sleep(seconds)
        return True

    def _newest_step(self):
        steps = map(checkpoint_step, self._directory.glob("*"))
        return max((step for step in steps if step is not None), default=None)
