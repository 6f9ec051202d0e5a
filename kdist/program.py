"""Command-line programs: grouped `--help`, checks of flags, one-line errors, and exit codes.

with program.flag_group("Data"):
    flags.DEFINE_string("dataset", "digits", "Dataset to train on.")
    flags.DEFINE_string("output", None, "File for the result.")

program.writes_file("output")

if __name__ == "__main__":
    program.run(main)
"""

import contextlib
import difflib
import errno
import functools
import importlib.util
import io
import logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from absl import app, command_name, flags
from absl import logging as absl_logging

from kdist.exit_codes import INTERRUPTED, PEER_HANGS
from kdist.log import connect_to_null
from kdist.mirror.store import check_url, is_url
from kdist.run_directory import check_local, check_writable

FLAGS = flags.FLAGS

# Errors that a user can cause and correct. Any other is a defect and keeps its traceback.
_USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError, ArithmeticError, ImportError)
_OTHER = "Other"
# Error number of the operating system -> what to do about it.
_REMEDIES = {
    errno.ENOSPC: "free disk space, or write to another directory",
    errno.EDQUOT: "free disk space, or write to another directory",
    errno.ENOENT: "give a path in a directory that exists",
    errno.EACCES: "use a path for which you have the permission",
    errno.EPERM: "use a path for which you have the permission",
    errno.EROFS: "write to another directory",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
}
# Part of TensorFlow's messages that names an operation of kdist's graphs.
_GRAPH_NODE = re.compile(r"\{\{function_node [^}]*\}\} ?")

# Last words of a number's name -> its unit, and the largest number that makes sense in it. Larger
# ones overflow timers, or fill the memory, long after the start.
_UNITS = {
    "usd_per_hour": ("US dollars per hour", 1e6),
    "usd": ("US dollars", 1e9),
    "hours": ("hours", 1e6),
    "minutes": ("minutes", 1e6),
    "seconds": ("seconds", 1e8),
    "timeout": ("seconds", 1e8),
    "ms": ("milliseconds", 1e8),
    "us": ("microseconds", 1e8),
    "mb": ("megabytes", 1e6),
}
_LARGEST_INTEGER = 10**12  # without a unit
_REPEAT_SECONDS = 0.05  # until Python leaves what ignores an exception

# Heading -> names of its flags, both in the order in which `--help` shows them.
_groups: dict[str, list[str]] = {}
# Name of a flag that may be a URL -> whether it is then checked as one of object storage.
_url_flags: dict[str, bool] = {}
_running = "__main__"  # module of the running program


def check_installed(package: str, extra: str):
    """Raises an ImportError that names kdist's extra, unless a package of it is installed."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{package} is not installed: pip install 'kdist[{extra}]'")


def check_backend(what: str = "this command"):
    """Raises a ValueError if the environment chooses another backend of Keras than TensorFlow.

    `what` is what needs it, for the message. Keras is not imported.
    """
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend != "tensorflow":
        raise ValueError(
            f"{what} requires Keras on TensorFlow, and KERAS_BACKEND is {backend}; set "
            "KERAS_BACKEND=tensorflow"
        )


def command(name: str, *arguments: object) -> str:
    """Returns the text of a `kdist` command that runs in this directory."""
    program = ["kdist"] if shutil.which("kdist") else [sys.executable, "-m", "kdist"]
    return shlex.join([*program, name, *map(str, arguments)])


@contextlib.contextmanager
def flag_group(heading: str) -> Iterator[None]:
    """Yields while flags are defined that `--help` shows below one heading, such as "Data".

    Headings and their flags appear in the order of definition, so common flags come first in a
    program. A heading that is used again is extended.
    """
    defined_before = set(FLAGS)
    yield
    _groups.setdefault(heading, []).extend(name for name in FLAGS if name not in defined_before)


def run(
    main: Callable[[Sequence[str]], int | None],
    positional: str | None = None,
    is_required: bool = True,
):
    """Parses the command line, calls `main`, and exits with the code that it returns.

    An error prints one line and exits with 1; with KDIST_TRACEBACK=1 in the environment it prints
    the traceback as well. A program whose output cannot be written, as on a full disk, continues,
    and exits with 1 if it would exit with 0. Ctrl-C exits with 130, and a step in which another
    task does not take part with 75 (`kdist.exit_codes`). `main` receives the program's name and the
    positional arguments, which `positional` describes; by default the program accepts flags only.
    With `is_required`, at least one must be given.
    """
    global _running
    _running = main.__module__
    _open_closed_streams()
    _escape_unprintable()
    output = _outlive_output()
    sys.unraisablehook = _repeat_lost_ctrl_c
    # TensorFlow logs every gradient reduction that it plans at the level INFO.
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    # gcsfs logs a traceback for every request that fails. The mirror logs the failure.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    app.define_help_flags()
    text = functools.partial(help_text, positional)
    flags.DEFINE_flag(_HelpFlag("help", text, short_name="?"))
    for name in ("h", "helpshort"):
        flags.DEFINE_flag(_HelpFlag(name, text))
    flags.DEFINE_flag(_HelpFlag("helpfull", FLAGS.get_help))
    guarded = functools.partial(_run_guarded, main, positional=positional, is_required=is_required)
    try:
        app.run(guarded, flags_parser=_parsed)
    except SystemExit as end:
        sys.stdout.flush()
        if output and output.is_incomplete and not end.code:
            sys.exit(1)
        raise


def help_text(positional: str | None = None) -> str:
    """Returns the running program's docstring and its flags, grouped by subject.

    `positional` describes its positional arguments, if it has some.
    """
    own = own_flags()
    grouped = {name for names in _groups.values() for name in names}
    groups = {**_groups, _OTHER: [name for name in own if name not in grouped]}
    parts = [(sys.modules[_running].__doc__ or "").strip("\n")]
    if sys.argv[0].startswith("kdist "):
        arguments = f" <{positional}>" if positional else ""
        parts.insert(0, f"Usage: {sys.argv[0]} [--flag=value …]{arguments}")
    for heading, names in groups.items():
        names = [name for name in names if name in own]  # others are of an imported program
        if names:
            parts.append("\n".join([f"{heading}:", *(_flag_text(own[name]) for name in names)]))
    parts.append(
        "Booleans are --name or --noname. --helpfull lists the flags of libraries as well."
    )
    return "\n\n".join(parts) + "\n"


def own_flags(module: str | None = None) -> dict[str, flags.Flag]:
    """Returns {name: flag} of the flags that a program defines itself.

    `module` is the program's module; by default that of the running program.
    """
    module = module or _running
    name = sys.argv[0] if module == "__main__" else module  # as absl names them
    return {flag.name: flag for flag in FLAGS.flags_by_module_dict().get(name, ())}


def _flags_of_kdist():
    """Returns the flags of the running program, and of programs of kdist that it imports."""
    modules = [name for name in FLAGS.flags_by_module_dict() if name.startswith("kdist.")]
    return [flag for name in (_running, *modules) for flag in own_flags(name).values()]


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


def missing_argument(positional: str) -> str:
    """Returns the message about a positional argument that is not given."""
    return f"missing argument: {positional} (--help)"


def _open_closed_streams():
    """Connects closed standard streams to the null device; Python has None instead of them.

    Another file that is opened would get the number of the stream, and its output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            connect_to_null(number)
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115  # to the end
            setattr(sys, name, stream)


def _escape_unprintable():
    """Prints characters that the terminal's encoding lacks as escapes, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # as Python does for stderr
        sys.stdout.reconfigure(errors="backslashreplace")


class _Output(io.FileIO):
    """Standard output that discards what cannot be written: no reader, or a full disk.

    A training goes to the end, and a plan is saved. Libraries and child processes write to the same
    descriptor, which then is that of the null device.

    Attributes:
        is_incomplete: whether a reader, or a file, lacks a part of the output.
    """

    is_incomplete = False

    def write(self, data):
        """Returns the number of bytes that are written or discarded."""
        try:
            return super().write(data)
        except OSError as error:
            connect_to_null(self.fileno())
            self.is_incomplete = not isinstance(error, BrokenPipeError)
            problem = f"cannot be written ({error.strerror})"
            if not self.is_incomplete:
                problem = "has no reader any more"
            name = os.path.basename(sys.argv[0])
            sys.stderr.write(f"{name}: the output {problem}; the program continues\n")
            return super().write(data)


def _outlive_output() -> _Output | None:
    """Lets the program continue if its output cannot be written; returns what writes it."""
    output = None
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        output = _Output(sys.stdout.fileno(), "w", closefd=False)
        is_unbuffered = sys.stdout.write_through  # python -u, as tasks of a job are started
        sys.stdout = io.TextIOWrapper(
            output if is_unbuffered else io.BufferedWriter(output),
            sys.stdout.encoding,
            sys.stdout.errors,
            line_buffering=sys.stdout.line_buffering,
            write_through=is_unbuffered,
        )
    return output


def _repeat_lost_ctrl_c(unraisable):
    """Repeats a Ctrl-C whose exception was raised where Python ignores exceptions.

    Examples are destructors, and callbacks of the garbage collector, such as JAX's.
    """
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    # Not in this thread, where the next exception would be ignored as well.
    threading.Timer(_REPEAT_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()


def _parsed(arguments):
    """Returns the positional arguments; exits with an error of one line if a flag is wrong."""
    try:
        return FLAGS(arguments)
    except flags.Error as error:
        text = str(error)
        if "invalid literal" in text or "could not convert" in text:
            kind, example = ("an integer", "1281167") if "int()" in text else ("a number", "0.05")
            text = f"{text.partition(': ')[0]} is not {kind}; write it as {example}"
        unknown = getattr(error, "flagname", "")  # absl itself finds names with a typing error
        if "Did you mean" not in text and (
            close := difflib.get_close_matches(unknown, own_flags(), n=2, cutoff=0.6)
        ):
            text += f"; did you mean {' or '.join(f'--{name}' for name in close)}?"
        sys.exit(_fail(os.path.basename(arguments[0]), f"{text} (--help)"))


def _run_guarded(main, arguments, positional, is_required):
    name = os.path.basename(arguments[0])
    # absl has set it to "kdist train". Slurm does not find, nor signal, a child with a space in it.
    command_name.set_kernel_process_name(name.replace(" ", "-"))
    if len(arguments) > 1 and not positional:
        return _fail(name, f"unknown argument {arguments[1]!r}; flags are --name=value (--help)")
    if len(arguments) == 1 and positional and is_required:
        return _fail(name, missing_argument(positional))
    if wrong := next(filter(None, map(objection, _flags_of_kdist())), None):
        return _fail(name, wrong)
    if not FLAGS["verbosity"].present:  # TensorFlow logs how it writes a SavedModel as INFO
        absl_logging.set_verbosity(absl_logging.WARNING)
    try:
        return main(arguments)
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{name}: stopped by Ctrl-C\n")
        return INTERRUPTED
    except Exception as error:
        reason = _reason(error)
        if reason is None or os.environ.get("KDIST_TRACEBACK"):
            raise
        return _fail(name, reason, PEER_HANGS if _is_peer_late(error) else 1)


def _reason(error):
    """Returns the message of an error that the user can correct; None for a defect."""
    text = str(error)
    if _is_peer_late(error):  # after the stack of the graph
        found = re.search(r"aborted by: (.*)", text)
        return found[1] if found else text.strip()
    # TensorFlow's error, which only some programs import, is longer than a line.
    if isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError":
        details = without_graph_node(text.strip().partition("\n")[0])
        if os.strerror(errno.ENOSPC) in details:  # TensorFlow has no type of its own for it
            return f"{details}; {_REMEDIES[errno.ENOSPC]}"
        return f"out of memory ({details}); use smaller batches, examples, or models"
    if isinstance(error, OSError) and error.strerror:  # of the system, not of kdist
        where = (
            f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        )
        remedy = _REMEDIES.get(error.errno)
        return f"{where}{error.strerror}{f'; {remedy}' if remedy else ''}"
    return (text or type(error).__name__) if isinstance(error, _USER_ERRORS) else None


def without_graph_node(text: str) -> str:
    """Returns a message of TensorFlow without the operation of a graph that it names."""
    return _GRAPH_NODE.sub("", text)


def _is_peer_late(error):
    """Returns whether a step ended because another task did not take part in it in time."""
    return type(error).__name__ == "DeadlineExceededError"  # TensorFlow's, as in `_reason`


def objection(flag: flags.Flag) -> str | None:
    """Returns what is wrong with a flag's value, whatever it means; None if nothing is.

    Numbers must be finite, not negative unless the flag has a lower bound that is, and not larger
    than makes sense in the unit that ends the flag's name. Only flags of `accept_urls` may be URLs.
    """
    values = flag.value if isinstance(flag.value, list) else [flag.value]
    for value in values:
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int | float):
            problem = _number_problem(flag.name, value, getattr(flag.parser, "lower_bound", None))
        else:
            problem = _url_problem(flag.name, str(value))
        if problem:
            return f"--{flag.name}={value}: {problem}"
    return None


def _number_problem(name, number, lower_bound):
    if not math.isfinite(number):
        return "give a finite number"
    if number < 0 and lower_bound is None:
        return "give 0 or more"
    ending = next((ending for ending in _UNITS if f"_{name}".endswith(f"_{ending}")), None)
    unit, largest = _UNITS[ending] if ending else ("", _LARGEST_INTEGER)
    if number > largest and (unit or isinstance(number, int)):
        return f"give at most {largest:,.0f} {unit}".rstrip()
    return None


def _url_problem(name, text):
    try:
        if name not in _url_flags:
            check_local(text.rpartition("=")[2])  # also that of NAME=DIRECTORY
        elif _url_flags[name] and is_url(text):
            check_url(text)
    except (ValueError, ImportError) as error:
        return str(error)
    return None


def read_numbers(name: str, lower_bound: int = 1) -> tuple[int, ...] | None:
    """Returns the integers of a list flag such as `--input_shape=224,224,3`; None without it.

    Raises:
        ValueError: an item is not an integer, or is outside of the bounds.
    """
    texts = FLAGS[name].value
    if texts is None:
        return None
    if not all(re.fullmatch(r"[+-]?[0-9]{1,12}", text.strip()) for text in texts):
        raise ValueError(f"--{name}={','.join(texts)} is not a list of integers")
    numbers = tuple(map(int, texts))
    if not numbers or min(numbers) < lower_bound:
        raise ValueError(
            f"--{name}={','.join(texts)}: give at least one number, and none below {lower_bound}"
        )
    return numbers


def read_rate(name: str) -> float | None:
    """Returns the number of a flag that is a rate; None without it.

    Raises:
        ValueError: it is not above 0.
    """
    rate = FLAGS[name].value
    if rate is not None and not rate > 0:
        raise ValueError(f"--{name}={rate:g}; give a rate above 0")
    return rate


def check_name(kind: str, name: str, names: Sequence[str]):
    """Raises a ValueError that lists `names`, and names the closest, unless `name` is one of them.

    `kind` is what the names are for, such as "model".
    """
    if name in names:
        return
    raise ValueError(f"unknown {kind} {name!r}{hint(name, names)} Available are {', '.join(names)}")


def hint(name: str, names: Sequence[str]) -> str:
    """Returns the end of a sentence about an unknown name, with the closest one, if any is."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def check_items(name: str, known: Iterable[str]):
    """Raises a ValueError unless all items of the list flag `name` are among the `known` ones."""
    for item in FLAGS[name].value or ():
        check_name(f"--{name}", item, tuple(known))


def accept_urls(*names: str, is_checked: bool = True):
    """Lets the values of flags be URLs of object storage; unless `is_checked`, or contain any."""
    _url_flags.update(dict.fromkeys(names, is_checked))


def reads_file(name: str, remedy: str, unless: Sequence[str] = ()):
    """Makes the parser refuse a value of flag `name` at which there is no file.

    Args:
        name: the flag; without a value nothing is checked.
        remedy: what to do about it, such as "create it with kdist plan --output".
        unless: values that are not paths.
    """

    def check(path):
        if path is None or path in unless:
            return
        check_local(path)
        if os.path.isdir(path) or not os.path.exists(path):
            raise ValueError(f"there is no such file; {remedy}")

    _add_validator(name, check)


def writes_file(name: str, unless: Sequence[str] = (), only_with: str | None = None):
    """Makes the parser refuse a value of flag `name` at which no file can be written.

    Args:
        name: the flag; without a value nothing is checked.
        unless: values that are not paths.
        only_with: a flag without which the file is not written, and not checked.
    """

    def check(path):
        if path is None or path in unless or (only_with and not FLAGS[only_with].value):
            return
        check_local(path)
        if not path or os.path.isdir(path):
            raise ValueError("this is not a file; give the path of one")
        directory = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(directory):
            raise ValueError("cannot write the file; give one in a directory that exists")
        check_writable(path)

    _add_validator(name, check)


def _add_validator(name, check):
    def validate(value):
        try:
            check(value)
        except (ValueError, OSError) as error:
            raise flags.ValidationError(str(error)) from error
        return True

    flags.register_validator(name, validate)


def _fail(name, message, code=1):
    sys.stderr.write(f"{name}: {message}\n")
    return code
