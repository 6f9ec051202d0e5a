"""All models of a server: finds, loads, swaps, and drains versions while it serves.

Each version of a model has one queue per signature.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from tensorflow_serving.apis.get_model_metadata_pb2 import SignatureDefMap

from kdist.serving.core.errors import RequestError
from kdist.serving.core.metrics import Metrics
from kdist.serving.core.model_directory import check_within, file_states, versions
from kdist.serving.core.requests import BodyMemory
from kdist.serving.core.resources import (
    MemoryCeiling,
    default_memory_bytes,
    return_free_memory,
    used_bytes,
)
from kdist.serving.core.settings import BatchSettings, Objective, ServerLimits, padded_sizes
from kdist.serving.core.signature import SERVING_DEFAULT, Signature, read_signatures
from kdist.serving.engine.batcher import Batcher, DevicePool
from kdist.serving.engine.in_process import InProcess, LoadTimeout, VersionKey
from kdist.serving.policy.adaptation import Tuner
from kdist.serving.policy.selection import choose_in_subprocess

_MAX_ATTEMPTS = 3  # to load the same files
# Name of a Prometheus gauge -> (description, function of a version).
GAUGES: Mapping[str, tuple[str, Callable]] = {
    "waiting_rows": ("Rows in the queue.", lambda version: version.waiting_rows),
    "batch_timeout_seconds": (
        "Longest time that a request waits for others.",
        lambda version: version.batcher().settings.timeout_seconds,
    ),
    "max_batch": ("Rows of a full batch.", lambda version: version.batcher().settings.max_batch),
}

_logger = logging.getLogger(__name__)
# Growth after which freed memory is returned to the operating system, once bodies hold little.
_BURST_BYTES, _QUIET_BYTES = 128 << 20, 1 << 20


class ServedVersion:
    """A loaded version of a model that accepts requests."""

    def __init__(self, key: VersionKey, signatures, protos, batcher_for, tuner: Tuner | None):
        self.key, self.tuner = key, tuner
        self.signatures: Mapping[str, Signature] = signatures
        self._protos = protos
        self._batcher_for = batcher_for
        self._batchers: dict[str, Batcher] = {}
        self._tuning: asyncio.Task | None = None

    def signature(self, name: str) -> Signature:
        """Returns a signature by its name; raises RequestError if it does not exist."""
        if name not in self.signatures:
            raise RequestError(
                "invalid", f"{self.key} has the signatures {sorted(self.signatures)}, not {name!r}"
            )
        return self.signatures[name]

    def signature_map(self) -> SignatureDefMap:
        """Returns all signatures as the proto of a metadata response."""
        return SignatureDefMap(signature_def=self._protos)

    def batcher(self, name: str = SERVING_DEFAULT) -> Batcher:
        """Returns the batcher of a signature, which has its own queue."""
        if name not in self._batchers:
            load = self.tuner.load if self.tuner and name == SERVING_DEFAULT else None
            self._batchers[name] = self._batcher_for(self.key, name, load)
        return self._batchers[name]

    def start_tuning(self) -> None:
        """Starts to adapt the settings of the default signature to its load."""
        if self.tuner and SERVING_DEFAULT in self.signatures:
            self._tuning = asyncio.create_task(self.tuner.run(self._apply))

    def _apply(self, settings):
        self.batcher().settings = settings

    async def predict(
        self, arrays: Mapping[str, np.ndarray], signature: str = SERVING_DEFAULT
    ) -> dict[str, np.ndarray]:
        """Returns the outputs for the rows of a request. Raises errors as `Batcher` does."""
        return await self.batcher(signature)(arrays)

    @property
    def waiting_rows(self) -> int:
        """Rows in all queues of the version."""
        return sum(batcher.waiting_rows for batcher in self._batchers.values())

    async def drain(self) -> None:
        """Stops accepting requests, and answers those in the queues."""
        if self._tuning:
            self._tuning.cancel()
        await asyncio.gather(*(batcher.close() for batcher in self._batchers.values()))


class ServedModel:
    """A model and its loaded versions."""

    def __init__(self, name: str, directory: pathlib.Path):
        self.name, self.directory = name, directory
        self.ready: dict[int, ServedVersion] = {}
        self.states: dict[int, tuple[str, str]] = {}  # version -> (state, error message)
        # Versions that failed to load: version -> (attempts, state of its files).
        self._failures: dict[int, tuple[int, frozenset]] = {}

    def version(self, number: int | None = None) -> ServedVersion:
        """Returns a loaded version by its number, or the highest, or raises RequestError."""
        if number is None and self.ready:
            return self.ready[max(self.ready)]
        if number not in self.ready:
            label = self.name if number is None else f"version {number} of {self.name}"
            served = sorted(self.ready)
            raise RequestError("not_found", f"{label} is not served; versions: {served}")
        return self.ready[number]

    def states_of(self, number: int | None) -> dict[int, tuple[str, str]]:
        """Returns {version: (state, error message)} of one or all versions.

        Raises RequestError if there are none.
        """
        states = {n: state for n, state in self.states.items() if number in (None, n)}
        if not states:
            label = "yet" if number is None else number
            raise RequestError("not_found", f"{self.name} has no version {label}")
        return states

    def may_load(self, number: int) -> bool:
        """Returns whether to load a version, possibly after failed attempts.

        A disk may have been slow, and a version is incomplete while its files are being copied.
        """
        if number in self.ready:
            return False
        attempts, files = self._failures.get(number, (0, frozenset()))
        return attempts < _MAX_ATTEMPTS or files != self.files(number)

    def files(self, number: int) -> frozenset:
        """Returns the current state of a version's files."""
        return file_states(self.directory / str(number))

    def failed(self, number: int, error: str, files: frozenset, is_final: bool = False) -> None:
        """Records that a version failed to load, and the state of its files at that time.

        If it `is_final`, the same files are not tried again.
        """
        attempts, before = self._failures.get(number, (0, files))
        attempts = attempts + 1 if files == before else 1
        self._failures[number] = (_MAX_ATTEMPTS if is_final else attempts, files)
        self.states[number] = ("END", error)

    def forget_all_but(self, numbers: Collection[int]) -> None:
        """Forgets the states and failures of all other versions."""
        for records in (self.states, self._failures):
            for number in set(records) - set(numbers):
                del records[number]

    def list_versions(self) -> list[int]:
        """Returns the versions in its directory, ascending."""
        return versions(self.directory)


class Models:
    """All models of a server, by name. Raises ValueError if a directory of versions does not exist.

    Batches are computed by `compute_engine` (`InProcess()` by default), and padded to `sizes`, by
    default powers of two up to `settings.max_batch`. With an objective, only this maximum of the
    settings is used; without one, they are fixed. The `newest` versions of a model are served, or
    an older one if none of them loads.
    """

    def __init__(
        self,
        directories: Mapping[str, str | os.PathLike],
        compute_engine=None,
        settings: BatchSettings | None = None,
        objective: Objective | None = None,
        limits: ServerLimits | None = None,
        newest: int = 1,
        metrics: Metrics | None = None,
        sizes: Sequence[int] | None = None,
    ):
        self.compute_engine = compute_engine or InProcess()
        self.settings, self.limits = settings or BatchSettings(), limits or ServerLimits()
        self.metrics = metrics or Metrics()
        self.body_memory = self._create_body_memory()
        self._least_bytes = sys.maxsize
        self.ending = False
        self._newest, self._objective = newest, objective
        self._sizes = list(sizes or padded_sizes(self.settings.max_batch))
        self._devices = DevicePool(self.compute_engine.slots)
        self._models = {}
        for name, directory in directories.items():
            versions(directory)  # raises if the directory does not exist
            self._models[name] = ServedModel(name, pathlib.Path(directory))

    @property
    def names(self) -> list[str]:
        """Names of all models, sorted."""
        return sorted(self._models)

    @property
    def ready(self) -> bool:
        """True if every model has a loaded version and the server is not shutting down."""
        return not self.ending and all(model.ready for model in self._models.values())

    @property
    def default(self) -> str:
        """Name of the first model, for requests that do not name one."""
        return next(iter(self._models))

    def is_ready(self, name: str, number: int | None = None) -> bool:
        """Returns whether a model, or one version of it, accepts requests.

        Raises RequestError if there is no such model or version.
        """
        model = self.model(name)
        model.states_of(number)
        return not self.ending and bool(model.ready if number is None else number in model.ready)

    def model(self, name: str) -> ServedModel:
        """Returns a model by its name; raises RequestError if it does not exist."""
        if name not in self._models:
            raise RequestError(
                "not_found", f"the model {name!r} is not served; models: {self.names}"
            )
        return self._models[name]

    def check_served(self) -> None:
        """Raises ValueError with the reasons if a model has no loaded version."""
        for model in self._models.values():
            if not model.ready:
                errors = [f"version {n}: {error}" for n, (_, error) in model.states.items()]
                raise ValueError(
                    f"{model.directory} holds no version that loads: "
                    + ("; ".join(errors) or "write one with kdist.serving.export")
                )

    def used_bytes(self) -> int:
        """Returns the memory of this process and the worker processes."""
        return used_bytes([os.getpid(), *self.compute_engine.pids])

    def _create_body_memory(self):
        max_bytes = self.limits.memory_bytes
        ceiling = MemoryCeiling(
            default_memory_bytes() if max_bytes is None else max_bytes, self.used_bytes
        )
        self.metrics.gauge(
            "memory_bytes", "Memory of all processes of the server.", self.used_bytes
        )
        return BodyMemory(self.limits.all_bodies_bytes, ceiling, self.metrics.record_rejection)

    async def refresh(self) -> None:
        """Loads new versions, then drains and frees the versions that they replace."""
        for model in self._models.values():
            try:
                available = model.list_versions()
            except (OSError, ValueError) as error:
                _logger.warning(
                    "%s cannot be read (%s); loaded versions stay in service", model.name, error
                )
                continue
            newest = available[-self._newest :]
            for number in newest:
                await self._try_to_load(model, number)
            for number in reversed(available[: -self._newest]):
                if not model.ready:  # an old version is better than none
                    await self._try_to_load(model, number)
            keep = [number for number in newest if number in model.ready]
            if keep:  # otherwise the old version stays in service
                for number in sorted(set(model.ready) - set(keep)):
                    await self._unload(model, number)
            model.forget_all_but({*available, *model.ready})

    async def watch(self, seconds: float = 1.0) -> None:
        """Calls `refresh` periodically until the task is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            await self._return_memory_of_burst()
            try:
                await self.refresh()
            except Exception:
                _logger.exception(
                    "looking for new versions failed; loaded versions stay in service"
                )

    async def _return_memory_of_burst(self):
        used = used_bytes([os.getpid()])
        self._least_bytes = min(self._least_bytes, used)
        is_quiet = self.body_memory.held_bytes < _QUIET_BYTES
        if is_quiet and used - self._least_bytes >= _BURST_BYTES:
            await asyncio.to_thread(return_free_memory)
            self._least_bytes = used_bytes([os.getpid()])  # more if a version was loaded

    async def close(self, seconds: float = 30.0) -> None:
        """Rejects new requests, answers those in the queues within a time limit, and frees all."""
        self.ending = True
        versions = [each for model in self._models.values() for each in model.ready.values()]
        draining = asyncio.gather(*(version.drain() for version in versions))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(draining, seconds)
        await asyncio.to_thread(self.compute_engine.close)
        self._devices.close()

    async def _try_to_load(self, model, number):
        if not model.may_load(number):
            return
        key, path = VersionKey(model.name, number), model.directory / str(number)
        model.states[number] = ("LOADING", "")
        files, began = model.files(number), time.monotonic()
        try:
            version = await self._load_in_time(key, path)
        except Exception as error:
            model.failed(number, str(error), files, is_final=isinstance(error, LoadTimeout))
            _logger.warning("%s failed to load: %s", key, error)
            return
        model.ready[number], model.states[number] = version, ("AVAILABLE", "")
        version.start_tuning()
        self._register_gauges(version)
        _logger.info("%s is served; it loaded in %.1f s", key, time.monotonic() - began)

    async def _load_in_time(self, key, path):
        """Loads a version in a thread, which is abandoned if it takes too long.

        Workers are ended by their pool before that. The thread is a daemon, so that it does not
        outlive the server.
        """
        loading: concurrent.futures.Future = concurrent.futures.Future()
        loading.set_running_or_notify_cancel()
        seconds = self.limits.load_seconds

        def run():
            try:
                loading.set_result(self._load(key, path))
            except BaseException as error:
                loading.set_exception(error)

        threading.Thread(target=run, name="kdist-loading", daemon=True).start()
        try:
            async with asyncio.timeout(seconds * (1 + len(self.compute_engine.pids))):
                return await asyncio.wrap_future(loading)
        except TimeoutError as error:
            loading.add_done_callback(lambda _: self.compute_engine.unload(key))
            raise LoadTimeout(seconds) from error

    def _load(self, key, path):
        """Loads a version. Runs in a thread while other versions serve."""
        check_within(path, path.parent)
        signatures, protos = read_signatures(path)
        curve = self.compute_engine.load(key, os.fspath(path), self._sizes)
        return ServedVersion(key, signatures, protos, self._batcher_for, self._tuner(key, curve))

    def _tuner(self, key, curve):
        if curve is None or self._objective is None:
            return None
        choose = functools.partial(choose_in_subprocess, devices=self.compute_engine.slots)
        on_message = functools.partial(_logger.warning, "%s: %s", key)
        return Tuner(curve, self._objective, on_message=on_message, choose=choose)

    async def _unload(self, model, number):
        version = model.ready.pop(number)
        model.states[number] = ("UNLOADING", "")
        await version.drain()
        await asyncio.to_thread(self.compute_engine.unload, version.key)
        model.states[number] = ("END", "")
        self.metrics.forget_version(model.name, number)
        _logger.info("%s is no longer served", version.key)

    def _batcher_for(self, key, signature, load):
        return Batcher(
            lambda arrays: self.compute_engine.compute(key, signature, arrays),
            self.settings,
            self._sizes,
            self.limits.waiting_rows,
            self._devices,
            self.metrics.batch_observer(key.model, key.version),
            load,
        )

    def _register_gauges(self, version):
        labels = {"model": version.key.model, "version": str(version.key.version)}
        for name, (description, read) in GAUGES.items():
            self.metrics.gauge(name, description, functools.partial(read, version), **labels)
