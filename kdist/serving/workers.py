"""Batches computed in processes of their own, each with a copy of every model.

A worker that dies is replaced, and its batch is computed by another one: the clients, who are
connected to this process, see nothing of it but the time. A batch by which workers die twice is
given up; the batcher then tries each request of it alone.
"""

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence

from kdist.serving.computing import Arrays, Key
from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.worker_process import Worker, WorkerDied

_log = logging.getLogger(__name__)
# Of the same batch: the first may have been a machine's accident, the next is the batch's fault.
_MOST_DEATHS = 2
# Between starts of a worker that dies at once, so that it takes no core for itself.
_PAUSE_SECONDS = 1.0
# Between looks for a worker that is still busy while the models of all are changed.
_LOOK_SECONDS = 0.01


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
        self._wanted: dict[Key, tuple] = {}
        self._changing = threading.Lock()  # of the models, in all workers alike
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self._closed = False
        self._all = [Worker(devices, batch_seconds) for _ in range(count)]
        for worker in self._all:
            self._idle.put(worker)
        atexit.register(self.close)  # Python would end them by SIGTERM, which they do not hear

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
            except (EOFError, OSError) as error:
                self._forget(key)
                raise WorkerDied(f"{_MOST_DEATHS} workers died while they loaded {key}") from error
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
                outputs = worker.compute(key, signature, arrays)
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

    def close(self) -> None:
        """Ends the processes."""
        atexit.unregister(self.close)
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
            if not any(key in each.loaded or each.is_starting for each in self._all):
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
        worker.is_starting = True
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
        worker.is_starting = True
        worker.end()
        worker.start()
        for key, (path, sizes) in list(self._wanted.items()):
            try:
                worker.load(key, path, sizes)
            except (EOFError, OSError):
                raise
            except Exception as error:  # its files have gone, while another one serves it still
                _log.warning("serving worker %d does without %s: %s", worker.pid, key, error)
        worker.is_starting = False
