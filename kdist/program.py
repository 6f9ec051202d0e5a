"""What kdist's programs share: an error is one line with its remedy, and the exit code says it.

if __name__ == "__main__":
    program.run(main)
"""

import os
import sys
from collections.abc import Callable, Sequence

from absl import app

# What a user can cause and mend; anything else is a defect and shows where it is.
_USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError, ArithmeticError, ImportError)


def run(main: Callable[[Sequence[str]], int | None]):
    """Parses the command line, calls `main`, and exits with its code: 0, 1 for an error.

    An error prints its message alone; with KDIST_TRACEBACK=1 in the environment, where it came
    from as well. Ctrl-C ends with 130, as shells expect.
    """
    app.run(lambda arguments: _guarded(main, arguments))


def _guarded(main, arguments):
    name = os.path.basename(arguments[0])
    if len(arguments) > 1:
        return _fail(name, f"unknown argument {arguments[1]!r}; flags are --name=value (--help)")
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
