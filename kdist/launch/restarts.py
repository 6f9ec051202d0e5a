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
        """Whether to start the job again; if so, after a while: each time in vain twice as long."""
        if not self._allows(say):
            return False
        seconds = min(_FIRST_WAIT_SECONDS * 2 ** (self._in_vain - 1), _LONGEST_WAIT_SECONDS)
        say(f"starting again from {self._place()} in {seconds:g} s; {self._count()}")
        time.sleep(seconds)
        return True

    def may_replace(self, name: str, say: Callable[[str], None]) -> bool:
        """Whether to start a task of this name again, while the others go on."""
        if not self._allows(say):
            return False
        say(f"starting {name} again; {self._count()}")
        return True

    def _allows(self, say):
        newest = self._newest_step()
        if newest != self._newest:
            self._newest, self._in_vain = newest, 0
        if self._in_vain < self._most:
            self._in_vain += 1
            return True
        if self._most:
            say(
                f"not started again: {self._most} restarts in a row came to no new checkpoint "
                "(more: --max_restarts)"
            )
        return False

    def _place(self):
        return "its beginning" if self._newest is None else f"the checkpoint of step {self._newest}"

    def _count(self):
        return f"restart {self._in_vain} of {self._most} since there was a new checkpoint"

    def _newest_step(self):
        steps = map(checkpoint_step, self._directory.glob("*"))
        return max((step for step in steps if step is not None), default=None)
