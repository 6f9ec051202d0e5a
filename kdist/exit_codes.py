"""Exit codes of a task, and whether the engine that started the job starts it again.

    exit_codes.restart_after(143)     # Restart.FREE

The outermost engine restarts a job, and kdist resumes from the newest checkpoint. Restarts that are
counted have a limit, which starts again with each new checkpoint.
"""

import enum

DONE = 0
# Too few machines or places for the tasks; the code of `sysexits.h` for a missing service.
NO_ROOM = 69
# Another task has stopped, died, or runs something else. The code of `sysexits.h` for failures that
# may be temporary.
PEER_HANGS = 75
TIMED_OUT = 124  # the exit code of timeout(1)
INTERRUPTED = 130  # Ctrl-C, as in shells: 128 + SIGINT
# A checkpoint was saved because the task was asked to end, 128 + SIGTERM. Shells and engines report
# the same code for a process that SIGTERM ended before it had anything to save.
SAVED = 143


class Restart(enum.Enum):
    """Decision on a job that has ended."""

    NEVER = "never"
    FREE = "free"
    COUNTED = "counted"


_RESTARTS = {
    DONE: Restart.NEVER,
    PEER_HANGS: Restart.COUNTED,
    TIMED_OUT: Restart.NEVER,
    INTERRUPTED: Restart.NEVER,
    SAVED: Restart.FREE,
}


def restart_after(code: int) -> Restart:
    """Returns whether to start a job again after an exit code, and at whose expense.

    It accepts codes of shells, and those of `subprocess`, where -n means that signal n ended the
    process.

    >>> restart_after(137)
    <Restart.COUNTED: 'counted'>
    """
    return _RESTARTS.get(code, Restart.COUNTED)
