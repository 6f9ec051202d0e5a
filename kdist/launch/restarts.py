"""Restarts of a job that has ended early, as long as it makes progress."""

import pathlib
import time
from collections.abc import Callable

from kdist.exit_codes import Restart, restart_after
from kdist.run_directory import newest_step

_FIRST_WAIT_SECONDS = 1.0
_MAX_WAIT_SECONDS = 60.0


class RestartPolicy:
    """Limits the number of consecutive restarts without a new checkpoint.

    Whether a restart counts depends on the exit code (`kdist.exit_codes`). The directory holds the
    job's checkpoints, such as `step-0000000150`. Messages to the user are passed to `announce`.
    """

    def __init__(self, max_restarts: int, directory: pathlib.Path, announce: Callable[[str], None]):
        self._max_restarts, self._directory, self._announce = max_restarts, directory, announce
        self._restarts = 0
        self._newest = newest_step(self._directory)

    def wait_before_restart(self, code: int) -> bool:
        """Returns whether to restart the job, after a pause that doubles with each restart.

        `code` is the exit code of the task that ended the job, -n if signal n ended it.
        """
        restart = restart_after(code)
        if restart is Restart.NEVER and self._max_restarts:
            self._announce(f"not started again after exit code {code}")
        if restart is Restart.NEVER or not self._may_restart(restart):
            return False
        seconds = min(_FIRST_WAIT_SECONDS * 2 ** max(self._restarts - 1, 0), _MAX_WAIT_SECONDS)
        step = newest_step(self._directory)
        start = "its beginning" if step is None else f"the checkpoint of step {step}"
        status = self._status() if restart is Restart.COUNTED else "not counted, as it has saved"
        self._announce(f"starting again from {start} in {seconds:g} s; {status}")
        time.sleep(seconds)
        return True

    def may_replace(self, name: str) -> bool:
        """Returns whether to restart one task while the others continue."""
        if not self._count_restart():
            return False
        self._announce(f"starting {name} again; {self._status()}")
        return True

    def _may_restart(self, restart):
        return self._count_restart() if restart is Restart.COUNTED else self._max_restarts > 0

    def _count_restart(self):
        newest = newest_step(self._directory)
        if newest != self._newest:
            self._newest, self._restarts = newest, 0
        if self._restarts < self._max_restarts:
            self._restarts += 1
            return True
        if self._max_restarts:
            self._announce(
                f"not started again: {self._max_restarts} restarts in a row produced no new "
                "checkpoint (more: --max_restarts)"
            )
        return False

    def _status(self):
        return f"restart {self._restarts} of {self._max_restarts} since the last new checkpoint"
