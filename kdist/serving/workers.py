"""Batches computed in processes of their own, each with a copy of every model.

A worker that dies is replaced, and its batch is computed by another one: the clients, who are
connected to this process, see nothing of it but the time. A batch by which workers die twice is
given up; the batcher then tries each request of it alone.
"""

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence

from kdist.serving.computing import Arrays, InProcess, Key
from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.refusals import BadInput

_log = logging.getLogger(__name__)
# Of the same batch: the first may have been a machine's accident, the next is the batch's fault.
_MOST_DEATHS = 2
# Between starts of a worker that dies at once, so that it takes no core for itself.
_PAUSE_SECONDS = 1.0
# Between looks for a worker that is still busy while the models of all are changed.
_LOOK_SECONDS = 0.01


# A copy of this process, with TensorFlow's threads, would hang. Workers are copies of a process
# that has imported TensorFlow and done nothing with it: a new one is there in a tenth of a second.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["kdist.serving.loading"])


class WorkerDied(RuntimeError):
    """Workers died by a batch, or took longer for it than they may."""


class Workers:
    """So many processes that compute.

    Args:
        count: of processes.
        batch_seconds: after so long over a batch a worker counts as dead and is killed. Defaults
            to 120.
        devices: that models are placed on; see `InProcess`.

    Attributes:
        slots: batches that are computed at a time: one a worker.
    """

    def __init__(self, count: int, batch_seconds: float = 120.0, devices: Sequence[str] = ()):
        self.slots = count
        self._batch_seconds = batch_seconds
        self._wanted: dict[Key, tuple] = {}
        self._changing = threading.Lock()  # of the models, in all workers alike
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._closed = False
        self._all = [_Worker(devices) for _ in range(count)]
        for worker in self._all:
            self._idle.put(worker)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that live."""
        return [worker.pid for worker in self._all if worker.is_alive()]

    def load(self, key: Key, path: str, sizes: Sequence[int]) -> LatencyCurve | None:
        """Makes a version ready in every worker; see `InProcess.load`."""
        with self._changing:
            self._wanted[key] = (path, list(sizes))
            try:
                for worker in self._each_once():
                    self._see_to(worker, key)
                return worker.loaded[key]
            except BaseException:
                self._forget(key)
                raise

    def unload(self, key: Key) -> None:
        """Frees a version; no batch of it may be under way."""
        with self._changing:
            self._forget(key)

    def compute(self, key: Key, signature: str, arrays: Arrays):
        """The outputs of a batch, by the worker that has been idle for longest.

        Raises:
            BadInput: the model refuses these rows.
            WorkerDied: workers died by it.
        """
        deaths, dead_before = 0, 0
        while deaths < _MOST_DEATHS:
            worker = self._idle_with(key)
            try:
                outputs = worker.ask(self._batch_seconds, "compute", key, signature, arrays)
            except (EOFError, OSError) as error:  # TimeoutError is one of the latter
                self._replace(worker, error)
                # It had not read the batch: each may have died while it was idle.
                unread = isinstance(error, (BrokenPipeError, ConnectionResetError))
                if unread and dead_before < self.slots:
                    dead_before += 1
                else:
                    deaths += 1
                continue
            except Exception:
                self._idle.put(worker)
                raise
            self._idle.put(worker)
            return outputs
        raise WorkerDied(f"{_MOST_DEATHS} workers died by this batch of {key}")

    def alive(self) -> int:
        """How many live, of `slots`."""
        return len(self.pids)

    def close(self) -> None:
        """Ends the processes."""
        self._closed = True
        for worker in self._all:
            worker.end(for_good=True)
        self._idle.put(None)  # for who waits

    def _next(self):
        """The worker that has been idle for longest."""
        worker = self._idle.get()
        if worker is None:
            self._idle.put(None)
            raise WorkerDied("the server is ending")
        return worker

    def _idle_with(self, key):
        """The worker that has been idle for longest, of those that have the version."""
        while True:
            worker = self._next()
            if key in worker.loaded:
                return worker
            self._idle.put(worker)
            if not any(key in each.loaded or not each.is_alive() for each in self._all):
                raise RuntimeError(f"no worker has {key} any more")
            time.sleep(_LOOK_SECONDS)

    def _each_once(self):
        """Each worker while it is idle, those that start anew when they have started."""
        done = set()
        while len(done) < self.slots:
            worker = self._next()
            if worker in done:
                self._idle.put(worker)  # at once, as batches wait for it
                time.sleep(_LOOK_SECONDS)
                continue
            done.add(worker)
            try:
                yield worker
            finally:
                self._idle.put(worker)

    def _see_to(self, worker, key):
        try:
            worker.load(key, *self._wanted[key])
        except (EOFError, OSError) as error:
            _log.warning("serving worker %d died (%s); another one starts", worker.pid, error)
            self._start(worker)
            worker.load(key, *self._wanted[key])

    def _forget(self, key):
        self._wanted.pop(key, None)
        for worker in self._each_once():
            with contextlib.suppress(EOFError, OSError):  # a dead one has forgotten
                worker.unload(key)

    def _replace(self, worker, error):
        """Starts it anew in a thread; it is idle when it has all models."""
        if self._closed:
            raise WorkerDied("the server is ending") from error
        reason = str(error) or type(error).__name__
        _log.warning("serving worker %d died (%s); another one takes over", worker.pid, reason)
        threading.Thread(target=self._revive, args=[worker], daemon=True).start()

    def _revive(self, worker):
        while not self._closed:
            try:
                self._start(worker)
                break
            except Exception as error:
                if not self._closed:
                    _log.warning("a serving worker does not start: %s", error)
                    time.sleep(_PAUSE_SECONDS)
        self._idle.put(worker)

    def _start(self, worker):
        worker.end()
        worker.start()
        for key, (path, sizes) in list(self._wanted.items()):
            try:
                worker.load(key, path, sizes)
            except (EOFError, OSError):
                raise
            except Exception as error:  # its files have gone, while another one serves it still
                _log.warning("serving worker %d does without %s: %s", worker.pid, key, error)


class _Worker:
    """A process, and the pipe to it."""

    def __init__(self, devices):
        self._devices = devices
        self._changing, self._ended = threading.Lock(), False
        self.start()

    def start(self):
        with self._changing:
            if self._ended:
                raise WorkerDied("the server is ending")
            self._connection, theirs = _context.Pipe()
            self._process = _context.Process(
                target=_work, args=[theirs, self._devices], name="kdist-serving-worker", daemon=True
            )
            self._process.start()
            self.loaded: dict[Key, LatencyCurve | None] = {}
            theirs.close()  # so that its death is the end of the pipe

    @property
    def pid(self):
        return self._process.pid

    def is_alive(self):
        return self._process.is_alive()

    def load(self, key, path, sizes):
        if key not in self.loaded:
            self.loaded[key] = self.ask(None, "load", key, path, sizes)

    def unload(self, key):
        if key in self.loaded:
            del self.loaded[key]
            self.ask(None, "unload", key)

    def ask(self, seconds, *command):
        self._connection.send(command)
        if not self._connection.poll(seconds):
            self._process.kill()
            raise TimeoutError(f"no answer for {seconds:g} s")
        outcome, value = self._connection.recv()
        if outcome == "failed":
            raise value
        return value

    def end(self, for_good=False):
        with self._changing:
            self._ended = self._ended or for_good
            self._process.kill()
            self._process.join()
            self._connection.close()


def _work(connection, devices):
    """A worker's process: does what it is told until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the parent ends its workers
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
