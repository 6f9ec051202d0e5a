"""What kdist's programs share: an error is one line with its remedy, and the exit code says it.

if __name__ == "__main__":
    program.run(main)
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence

from absl import app

# What a user can cause and mend; anything else is a defect and shows where it is.
_USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError, ArithmeticError, ImportError)


def run(main: Callable[[Sequence[str]], int | None], takes: str | None = None):
    """Parses the command line, calls `main`, and exits with its code: 0, 1 for an error.

    An error prints its message alone; with KDIST_TRACEBACK=1 in the environment, where it came
    from as well. Ctrl-C ends with 130, as shells expect.

    Args:
        main: the program; it gets the arguments that are no flags, after the program's own name.
        takes: what these arguments are, in words; None if the program takes flags alone.
    """
    # TensorFlow tells of every reduction that it plans; what goes wrong is still said.
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    app.run(lambda arguments: _guarded(main, arguments, takes))


def _guarded(main, arguments, takes):
    name = os.path.basename(arguments[0])
    if len(arguments) > 1 and not takes:
        return _fail(name, f"unknown argument {arguments[1]!r}; flags are --name=value (--help)")
    if len(arguments) == 1 and takes:
        return _fail(name, f"name {takes} (--help)")
    try:
        return main(arguments)
    except KeyboardInterrupt:
        print(f"\n{name}: stopped by Ctrl-C", file=sys.stderr)
        return 130
    except _USER_ERRORS as error:
        if os.environ.get("KDIST_TRACEBACK"):
            raise
        return _fail(name, str(error) or type(error).__name__)


def _fail(name, message):
    print(f"{name}: {message}", file=sys.stderr)
    return 1
