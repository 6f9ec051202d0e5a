"""Becomes a command that ends when its parent does.

    python -I -S tied.py PARENT COMMAND [ARGUMENT …]

PARENT is the process id of the parent. On Linux the kernel is asked to kill this process when the
thread that started it ends, by whatever way; the request outlives exec. Elsewhere it is the command
alone, and the watchdog (`orphans`) does the rest. A program of its own, because between fork and
exec a process that has threads, as a notebook's does, may hardly do anything safely.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent, *command):
    # What Python ignores, and what the launcher's shell did, is none of the command's business.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before the kernel was asked
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(126)


if __name__ == "__main__":
    main(*sys.argv[1:])
