"""Logging of the library: the logger `kdist` and its children write to standard error.

Importing kdist adds a handler that prints lines such as `kdist: auto chose mirrored`. Change it as
with any logger:

    logging.getLogger("kdist").setLevel(logging.WARNING)     # fewer messages
    logging.getLogger("kdist.planner").addFilter(my_filter)  # one package
    logging.getLogger("kdist").handlers.clear()              # no messages
    logging.getLogger("kdist").propagate = True              # also to the root logger's handlers
"""

import contextlib
import ctypes
import importlib.machinery
import logging
import os
import pathlib
import re
import stat
import sys
import tempfile


class _StderrHandler(logging.StreamHandler):
    """Handler for the current `sys.stderr`, which notebooks and tests replace."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


def configure():
    """Adds a handler to the logger `kdist`, unless it has one."""
    logger = logging.getLogger("kdist")
    if logger.handlers:
        return
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("kdist: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


# Libraries that log when they are loaded, before any level can be set: TensorFlow's own, and one
# that contains a second copy of the logger. Name of a Python module -> file that is loaded first.
_NOISY_LIBRARIES = {
    "tensorflow": "libtensorflow_framework.so.2",
    "tensorflow.python.profiler.internal._pywrap_profiler_plugin": "_pywrap_profiler_plugin.so",
}
# Lines of level INFO, such as `I0000 00:00:1795633768.239335    4839 port.cc:153] oneDNN …`.
_START_UP_LINE = re.compile(
    rb"I\d{4} [\d:.]+ +\d+ \S+:\d+\] |WARNING: All log messages before absl::InitializeLog\(\)"
)


class _QuietLibraries:
    """Finder that loads the noisy libraries just before the modules that need them.

    It leaves it to Python's own finders to import the modules.
    """

    def find_spec(self, name, path=None, target=None):
        del target
        if name in _NOISY_LIBRARIES:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec and spec.origin:
                library = pathlib.Path(spec.origin).with_name(_NOISY_LIBRARIES[name])
                if library.exists():
                    with _without_start_up_lines():
                        ctypes.CDLL(str(library))


@contextlib.contextmanager
def _without_start_up_lines():
    """Holds back what is written to file descriptor 2, and drops lines of TensorFlow's start."""
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(tempfile.TemporaryFile())
            original = os.dup(2)
        except OSError:  # Standard error is closed, or no directory can hold a temporary file.
            yield
            return
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)
            held.seek(0)
            for line in held:
                if not _START_UP_LINE.match(line):
                    os.write(2, line)


def hide_start_up_messages():
    """Hides what TensorFlow logs on import, unless `TF_CPP_MIN_LOG_LEVEL` is 0.

    TensorFlow 2.21 logs five lines about oneDNN and missing CUDA drivers while its libraries are
    loaded, before it reads the variable. Errors and all other lines still appear.
    """
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") != "0":
        sys.meta_path.insert(0, _QuietLibraries())


def connect_to_null(number):
    """Lets a descriptor be that of the null device, whether it is open or not."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)


def discard_output_of_closed_terminal():
    """Connects standard output and error to the null device if their terminal is closed.

    A progress bar that writes to it would raise an error, before a checkpoint is saved.
    """
    for number in (1, 2):
        try:
            is_device = stat.S_ISCHR(os.fstat(number).st_mode)
        except OSError:  # the descriptor is closed
            continue
        if is_device and not os.isatty(number):
            connect_to_null(number)
