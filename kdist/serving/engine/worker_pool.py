"""Computes batches in a pool of worker processes, each with a copy of every model.

A worker that dies is replaced, and another one computes its batch. Clients are connected to this
process, so they only notice a delay. A batch that kills two workers fails; the batcher then retries
each of its requests alone.
"""

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence

from kdist.serving.core.requests import Arrays
from kdist.serving.engine.in_process import LoadTimeout, VersionKey
from kdist.serving.engine.worker_process import Worker, WorkerDied
from kdist.serving.policy.latency_curve import LatencyCurve

_logger = logging.getLogger(__name__)
# Deaths by one batch. The first may be an accident of the machine; the second blames the batch.
_MAX_DEATHS = 2
# Pause between starts of a worker that dies at once, so that it does not occupy a core.
_RESTART_SECONDS = 1.0
# Polling interval for a busy worker while the versions of all workers change.
_POLL_SECONDS = 0.01


class WorkerPool:
    """Pool of `count` processes that compute batches, one each (`slots`).

    A worker that takes longer than `batch_seconds` for a batch, or `load_seconds` to load a
    version, is killed. For the devices, see `InProcess`.
    """

    def __init__(
        self,
        count: int,
        batch_seconds: float = 120.0,
        devices: Sequence[str] = (),
        load_seconds: float = 600.0,
    ):
        self.slots, self._load_seconds = count, load_seconds
        self._versions: dict[VersionKey, tuple] = {}
        self._changing = threading.Lock()  # held while all workers load or free a version
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self._closed = False
        self._workers = [Worker(devices, batch_seconds, load_seconds) for _ in range(count)]
        for worker in self._workers:
            self._idle.put(worker)
        atexit.register(self.close)  # Python would send SIGTERM, which workers ignore

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.pid for worker in self._workers if worker.is_alive()]

    def load(self, key: VersionKey, path: str, sizes: Sequence[int]) -> LatencyCurve | None:
        """Loads a version in every worker; see `InProcess.load`.

        Raises LoadTimeout if a worker takes too long, and WorkerDied if it kills workers.
        """
        with self._changing:
            self._versions[key] = (path, list(sizes))
            try:
                for worker in self._each_once():
                    self._load_in(worker, key)
                return worker.loaded[key]
            except (EOFError, OSError) as error:
                _logger.warning("a serving worker died while it loaded %s: %s", key, error)
                self._forget(key)
                raise WorkerDied(f"{_MAX_DEATHS} workers died while they loaded {key}") from error
            except BaseException:
                self._forget(key)
                raise

    def unload(self, key: VersionKey) -> None:
        """Frees a version. None of its batches may be in flight."""
        with self._changing:
            self._forget(key)

    def compute(self, key: VersionKey, signature: str, arrays: Arrays):
        """Returns the outputs of a batch, computed by the worker that has been idle longest.

        Raises BadInput if the model rejects these rows, and WorkerDied if the batch killed workers.
        """
        deaths, dead_before = 0, 0
        while deaths < _MAX_DEATHS:
            worker = self._idle_with(key)
            try:
                outputs = worker.compute(key, signature, arrays)
            except (EOFError, OSError) as error:  # includes TimeoutError
                self._replace(worker, error)
                # The worker died while it was idle, before it read the batch.
                is_unread = isinstance(error, (BrokenPipeError, ConnectionResetError))
                if is_unread and dead_before < self.slots:
                    dead_before += 1
                else:
                    deaths += 1
                continue
            except Exception:
                self._idle.put(worker)
                raise
            self._idle.put(worker)
            return outputs
        raise WorkerDied(f"{_MAX_DEATHS} workers died by this batch of {key}")

    def close(self) -> None:
        """Ends all processes."""
        atexit.unregister(self.close)
        self._closed = True
        for worker in self._workers:
            worker.end(for_good=True)
        self._idle.put(None)  # wakes threads that wait for a worker

    def _next(self):
        """Returns the worker that has been idle longest."""
        worker = self._idle.get()
        if worker is None:
            self._idle.put(None)
            raise WorkerDied("the server is ending")
        return worker

    def _idle_with(self, key):
        """Returns the worker with the version that has been idle longest."""
        while True:
            worker = self._next()
            if key in worker.loaded:
                return worker
            self._idle.put(worker)
            if not any(key in each.loaded or each.is_starting for each in self._workers):
                raise RuntimeError(f"no worker has {key} any more")
            time.sleep(_POLL_SECONDS)

    def _each_once(self):
        """Yields each worker once, while it is idle. Waits for workers that are starting."""
        done = set()
        while len(done) < self.slots:
            worker = self._next()
            if worker in done:
                self._idle.put(worker)  # immediately, as batches wait for it
                time.sleep(_POLL_SECONDS)
                continue
            done.add(worker)
            try:
                yield worker
            finally:
                self._idle.put(worker)

    def _load_in(self, worker, key):
        try:
            worker.load(key, *self._versions[key])
        except TimeoutError as error:
            del self._versions[key]
            self._start(worker)  # with the other versions
            raise LoadTimeout(self._load_seconds) from error
        except (EOFError, OSError) as error:
            if self._closed:
                raise WorkerDied("the server is ending") from error
            _logger.warning("serving worker %d died; starting a new one: %s", worker.pid, error)
            self._start(worker)
            worker.load(key, *self._versions[key])

    def _forget(self, key):
        self._versions.pop(key, None)
        for worker in self._each_once():
            with contextlib.suppress(EOFError, OSError):  # a dead worker holds no versions
                worker.unload(key)

    def _replace(self, worker, error):
        """Restarts a worker in a thread. It becomes idle when it has loaded all versions."""
        if self._closed:
            raise WorkerDied("the server is ending") from error
        worker.is_starting = True
        _logger.warning("serving worker %d died; another worker takes over: %s", worker.pid, error)
        threading.Thread(target=self._revive, args=[worker], daemon=True).start()

    def _revive(self, worker):
        while not self._closed:
            try:
                self._start(worker)
                break
            except Exception as error:
                if not self._closed:
                    _logger.warning("a serving worker failed to start: %s", error)
                    time.sleep(_RESTART_SECONDS)
        self._idle.put(worker)

    def _start(self, worker):
        worker.is_starting = True
        worker.end()
        worker.start()
        for key, (path, sizes) in list(self._versions.items()):
            try:
                worker.load(key, path, sizes)
            except (EOFError, OSError):
                raise
            except Exception as error:  # its files were deleted; other workers still serve it
                _logger.warning("serving worker %d runs without %s: %s", worker.pid, key, error)
        worker.is_starting = False
