"""Command-line programs: grouped `--help`, one-line errors, and exit codes.

with program.flag_group("Data"):
    flags.DEFINE_string("dataset", "digits", "Dataset to train on.")

if __name__ == "__main__":
    program.run(main)
"""

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from absl import app, flags

from kdist.run_directory import check_local

FLAGS = flags.FLAGS

# Errors that a user can cause and correct. Any other is a defect and keeps its traceback.
_USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError, ArithmeticError, ImportError)
_OTHER = "Other"
_EXIT_INTERRUPTED = 130  # what shells expect after Ctrl-C

# Heading -> names of its flags, both in the order in which `--help` shows them.
_groups: dict[str, list[str]] = {}


@contextlib.contextmanager
def flag_group(heading: str) -> Iterator[None]:
    """Yields while flags are defined that `--help` shows below one heading, such as "Data".

    Headings and their flags appear in the order of definition, so common flags come first in a
    program. A heading that is used again is extended.
    """
    defined_before = set(FLAGS)
    yield
    names = _groups.setdefault(heading, [])
    names.extend(name for name in _own_flags() if name not in defined_before)


def run(main: Callable[[Sequence[str]], int | None], positional: str | None = None):
    """Parses the command line, calls `main`, and exits with the code that it returns.

    An error prints one line and exits with 1; with KDIST_TRACEBACK=1 in the environment it prints
    the traceback as well. Ctrl-C exits with 130. `main` receives the program's name and the
    positional arguments, which `positional` describes; by default the program accepts flags only.
    """
    # TensorFlow logs every gradient reduction that it plans at the level INFO.
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    app.define_help_flags()
    flags.DEFINE_flag(_HelpFlag("help", help_text, short_name="?"))
    flags.DEFINE_flag(_HelpFlag("helpshort", help_text))
    flags.DEFINE_flag(_HelpFlag("helpfull", FLAGS.get_help))
    app.run(lambda arguments: _run_guarded(main, arguments, positional))


def help_text() -> str:
    """Returns the running program's docstring and its flags, grouped by subject."""
    own = _own_flags()
    grouped = {name for names in _groups.values() for name in names}
    groups = {**_groups, _OTHER: [name for name in own if name not in grouped]}
    parts = [(sys.modules["__main__"].__doc__ or "").strip("\n")]
    for heading, names in groups.items():
        if names:
            parts.append("\n".join([f"{heading}:", *(_flag_text(own[name]) for name in names)]))
    parts.append(
        "Booleans are --name or --noname. --helpfull lists the flags of libraries as well."
    )
    return "\n\n".join(parts) + "\n"


def _own_flags():
    """Returns {name: flag} of the flags that the running program defines itself."""
    return {flag.name: flag for flag in FLAGS.flags_by_module_dict().get(sys.argv[0], ())}


def _flag_text(flag):
    name = f"[no]{flag.name}" if flag.boolean else flag.name
    words = " ".join(flag.help.partition(";\n")[0].split())  # absl appends a line to list flags
    if flag.default not in (None, False, "", []):
        several = isinstance(flag.default, list)
        default = ",".join(map(str, flag.default)) if several else str(flag.default)
        words += f" (default: {default})"
    return flags.text_wrap(f"--{name}: {words}", indent="      ", firstline_indent="  ")


class _HelpFlag(flags.BooleanFlag):
    """Help flag that prints `text()` and exits with 0; absl's own exits with 1."""

    def __init__(self, name, text, short_name=None):
        super().__init__(name, False, "show help", short_name, allow_override=True)
        self._text = text

    def parse(self, argument):
        if self._parse(argument):
            sys.stdout.write(self._text())
            sys.exit(0)


def _run_guarded(main, arguments, positional):
    name = os.path.basename(arguments[0])
    if len(arguments) > 1 and not positional:
        return _fail(name, f"unknown argument {arguments[1]!r}; flags are --name=value (--help)")
    if len(arguments) == 1 and positional:
        return _fail(name, f"missing argument: {positional} (--help)")
    if wrong := next(filter(None, map(_objection, _own_flags().values())), None):
        return _fail(name, wrong)
    try:
        return main(arguments)
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{name}: stopped by Ctrl-C\n")
        return _EXIT_INTERRUPTED
    except _USER_ERRORS as error:
        if os.environ.get("KDIST_TRACEBACK"):
            raise
        return _fail(name, str(error) or type(error).__name__)


def _objection(flag):
    """Returns what is wrong with a flag's value whatever it means; None if nothing is."""
    values = flag.value if isinstance(flag.value, list) else [flag.value]
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            return f"--{flag.name}={value}: give a finite number"
        if isinstance(value, str):
            try:
                check_local(value.rpartition("=")[2])  # also that of NAME=DIRECTORY
            except ValueError as error:
                return f"--{flag.name}={value}: {error}"
    return None


def _fail(name, message):
    sys.stderr.write(f"{name}: {message}\n")
    return 1
