"""Start of the Python processes that run modules of kdist: a user's files replace none of Python's.

    subprocess.run([sys.executable, *child_python.options(), "-m", "kdist", "train"])

For `-m` and `-c`, Python looks for modules in the working directory first. A user's `queue.py` or
`random.py` there would be imported instead of the module of the standard library.
"""

import os
import pathlib


def options() -> list[str]:
    """Returns the option of Python that leaves out the working directory, as `kdist` itself does.

    It is [] if kdist is imported from there, as in a clone in which it is not installed.
    """
    package = pathlib.Path(__file__).parents[1]
    return [] if os.path.samefile(package.parent, os.curdir) else ["-P"]


def variables() -> dict[str, str]:
    """Returns the environment variable that acts as `options`, also on children of the process."""
    return {"PYTHONSAFEPATH": "1"} if options() else {}
