"""A worker process that computes batches, the pipe to it, and its standard error."""

import collections
import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading

from kdist.launch.task_group import signal_name
from kdist.serving.core.errors import BadInput
from kdist.serving.core.resources import return_free_memory
from kdist.serving.engine.in_process import InProcess, VersionKey
from kdist.serving.policy.latency_curve import LatencyCurve

# A fork of this process would hang, because TensorFlow runs threads in it. Workers are forked from
# a server process that has only imported TensorFlow, which takes a tenth of a second.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["kdist.serving.engine.in_process"])
# Time between the end of a worker's pipe and that of its process.
_EXIT_SECONDS = 1.0
_IDLE_SECONDS = 1.0

_KEPT_LINES = 5
# Longer lines are passed in pieces.
_MAX_LINE_BYTES = 1 << 12
# Time to read what an ended process wrote; longer only if a child of it has the pipe.
_END_SECONDS = 1.0


class WorkerDied(RuntimeError):
    """Workers died or exceeded the time limit while they computed a batch."""


class Worker:
    """A worker process and the pipe to it.

    A worker that exceeds `batch_seconds` for a batch, or `load_seconds` to load one, is killed.
    `loaded` is {version: latency curve}. While `is_starting`, versions are being loaded.
    """

    def __init__(self, devices, batch_seconds, load_seconds):
        self._devices = devices
        self._batch_seconds, self._load_seconds = batch_seconds, load_seconds
        self.is_starting = False
        self._changing, self._ended = threading.Lock(), False
        self.start()

    def start(self):
        """Starts the process."""
        with self._changing:
            if self._ended:
                raise WorkerDied("the server is ending")
            self._connection, worker_end = _context.Pipe()
            _limit_sending(self._connection, self._batch_seconds)
            output, output_end = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_work,
                args=[worker_end, output_end, self._devices],
                name="kdist-serving-worker",
                daemon=True,
            )
            process.start()
            self._process = process  # assigned last: only a process that has started can be killed
            self.loaded: dict[VersionKey, LatencyCurve | None] = {}
            for end in (worker_end, output_end):
                end.close()  # so that the pipes end when the worker dies
            self._output = WorkerOutput(output)

    @property
    def pid(self):
        """Process id of the worker."""
        return self._process.pid

    def is_alive(self):
        """Returns whether the process is running."""
        return self._process.is_alive()

    def load(self, key, path, sizes):
        """Loads a version that is not loaded yet."""
        if key not in self.loaded:
            self.loaded[key] = self.call(self._load_seconds, "load", key, path, sizes)

    def unload(self, key):
        """Frees a version."""
        if key in self.loaded:
            del self.loaded[key]
            self.call(self._batch_seconds, "unload", key)

    def compute(self, key, signature, arrays):
        """Returns the outputs of a batch."""
        return self.call(self._batch_seconds, "compute", key, signature, arrays)

    def call(self, seconds, *command):
        """Runs a command in the worker and returns its result.

        Raises EOFError or OSError if the worker dies or exceeds the time limit. The error has the
        reason.
        """
        try:
            self._connection.send(command)
            outcome, value = self._receive(seconds)
        except (BlockingIOError, TimeoutError) as error:
            self._process.kill()
            raise TimeoutError(f"no answer for {seconds:g} s") from error
        except (EOFError, OSError) as error:
            raise type(error)(self._describe_end()) from error
        if outcome == "failed":
            raise value
        return value

    def _receive(self, seconds):
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv()

    def _describe_end(self):
        """Returns the exit code and the last output of a worker that has closed its pipe."""
        self._process.join(_EXIT_SECONDS)
        code = self._process.exitcode
        if code is None:
            return "it closed its connection"
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        lines = "".join(f"\n    {line}" for line in self._output.last_lines())
        return f"{how}; the end of its output:{lines}" if lines else f"{how}; it wrote no output"

    def end(self, for_good=False):
        """Kills the process. It can be started again unless `for_good`."""
        with self._changing:
            self._ended = self._ended or for_good
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._output.join()


def _limit_sending(connection, seconds):
    """Sets a send timeout: a full pipe that nobody reads then raises BlockingIOError."""
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:  # a duplex pipe is a socket
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _work(connection, output, devices):
    """Runs in the worker process: executes commands until the parent disconnects."""
    redirect_stderr(output)
    # A terminal or a service manager signals all processes; the parent still needs its workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    engine = InProcess(devices)
    with contextlib.suppress(EOFError, OSError):
        while True:
            command, *arguments = _receive(connection)
            connection.send(_call(getattr(engine, command), arguments))
    os._exit(0)  # skips the slow shutdown of TensorFlow


def _receive(connection):
    """Returns the next command, and returns freed memory if there is none for a while."""
    if not connection.poll(_IDLE_SECONDS):
        return_free_memory()
    return connection.recv()


def _call(function, arguments):
    try:
        return "done", function(*arguments)
    except BadInput as error:
        return "failed", error
    except Exception as error:
        return "failed", RuntimeError(f"{type(error).__name__}: {error}")


class WorkerOutput:
    """Passes lines from a pipe to standard error in a thread, and keeps the last ones.

    `redirect_stderr` runs in the worker, with the other end of the pipe. The thread ends when the
    worker does.
    """

    def __init__(self, connection):
        self._last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._pass, args=[connection], daemon=True)
        self._thread.start()

    def last_lines(self) -> list[str]:
        """Returns the last lines of a worker that has ended."""
        self.join()
        return list(self._last)

    def join(self):
        """Waits until everything from a worker that has ended is read."""
        self._thread.join(_END_SECONDS)

    def _pass(self, connection):
        with connection, open(connection.fileno(), "rb", closefd=False) as pipe:
            while data := pipe.readline(_MAX_LINE_BYTES):
                line = data.decode("utf-8", "replace")
                self._last.append(line.rstrip())
                with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed
                    sys.stderr.write(line)
                    sys.stderr.flush()


def redirect_stderr(connection):
    """Redirects the standard error of this process to a pipe."""
    os.dup2(connection.fileno(), 2)
    connection.close()
