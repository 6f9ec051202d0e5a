"""A process that computes batches, and the pipe to it."""

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import threading

from kdist.serving.batcher import BadInput
from kdist.serving.computing import InProcess, Key
from kdist.serving.latency_curve import LatencyCurve

# A copy of this process, with TensorFlow's threads, would hang. Workers are copies of a process
# that has imported TensorFlow and done nothing with it: a new one is there in a tenth of a second.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["kdist.serving.loading"])


class WorkerDied(RuntimeError):
    """Workers died by a batch, or took longer for it than they may."""


class Worker:
    """A process, and the pipe to it.

    Args:
        devices: that models are placed on; see `InProcess`.
        batch_seconds: after so long without a word it counts as dead and is killed; it may load
            models for longer.

    Attributes:
        loaded: the versions that it has, with what a batch of each takes.
        is_starting: whether it will have other versions soon.
    """

    def __init__(self, devices, batch_seconds):
        self._devices, self._batch_seconds = devices, batch_seconds
        self.is_starting = False
        self._changing, self._ended = threading.Lock(), False
        self.start()

    def start(self):
        """Makes the process."""
        with self._changing:
            if self._ended:
                raise WorkerDied("the server is ending")
            self._connection, theirs = _context.Pipe()
            _limit_sending(self._connection, self._batch_seconds)
            process = _context.Process(
                target=_work, args=[theirs, self._devices], name="kdist-serving-worker", daemon=True
            )
            process.start()
            self._process = process  # not before: only what has started can be ended
            self.loaded: dict[Key, LatencyCurve | None] = {}
            theirs.close()  # so that its death is the end of the pipe

    @property
    def pid(self):
        """Of the process."""
        return self._process.pid

    def is_alive(self):
        """Whether the process is there."""
        return self._process.is_alive()

    def load(self, key, path, sizes):
        """Has it load a version that it has not."""
        if key not in self.loaded:
            self.loaded[key] = self.ask(None, "load", key, path, sizes)

    def unload(self, key):
        """Has it free a version."""
        if key in self.loaded:
            del self.loaded[key]
            self.ask(self._batch_seconds, "unload", key)

    def compute(self, key, signature, arrays):
        """Has it compute a batch."""
        return self.ask(self._batch_seconds, "compute", key, signature, arrays)

    def ask(self, seconds, *command):
        """What it answers; raises EOFError or OSError if it dies, or takes longer."""
        try:
            self._connection.send(command)
            answered = self._connection.poll(seconds)
        except BlockingIOError:
            answered = False
        if not answered:
            self._process.kill()
            raise TimeoutError(f"no answer for {seconds or self._batch_seconds:g} s")
        outcome, value = self._connection.recv()
        if outcome == "failed":
            raise value
        return value

    def end(self, for_good=False):
        """Ends the process; it may be started again, unless for good."""
        with self._changing:
            self._ended = self._ended or for_good
            self._process.kill()
            self._process.join()
            self._connection.close()


def _limit_sending(connection, seconds):
    """Sending more than the pipe holds ends with BlockingIOError if nobody reads for so long."""
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:  # as one both ways is
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _work(connection, devices):
    """A worker's process: does what it is told until its parent is gone."""
    # Of a terminal or a service manager, to all processes: the parent still needs its workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    computing = InProcess(devices)
    with contextlib.suppress(EOFError, OSError):
        while True:
            command, *arguments = connection.recv()
            connection.send(_done(getattr(computing, command), arguments))
    os._exit(0)  # without TensorFlow's good-bye, which nobody waits for


def _done(function, arguments):
    try:
        return "done", function(*arguments)
    except BadInput as error:
        return "failed", error
    except Exception as error:
        return "failed", RuntimeError(f"{type(error).__name__}: {error}")
