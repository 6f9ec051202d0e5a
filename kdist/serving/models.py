"""The models of a server: versions are found, made ready, swapped and drained while it serves."""

import asyncio
import contextlib
import functools
import logging
import os
import pathlib
import time
from collections.abc import Mapping, Sequence

from kdist.serving.adapting import Tuner
from kdist.serving.batcher import Batcher
from kdist.serving.bodies import Bodies
from kdist.serving.choosing_apart import choose_apart
from kdist.serving.computing import InProcess, Key
from kdist.serving.metrics import Metrics
from kdist.serving.model_directory import check_within, versions
from kdist.serving.refusals import Refusal
from kdist.serving.served_versions import GAUGES, Model, Version
from kdist.serving.serving_files import batch_sizes
from kdist.serving.settings import BatchSettings, Limits, Objective
from kdist.serving.shared_devices import Devices
from kdist.serving.signature import read_signatures

_log = logging.getLogger(__name__)


class Models:
    """What a server serves.

    Args:
        directories: {name: directory of its versions}.
        computing: where batches are computed; by default in this process.
        settings: of batches; where there is an objective, only the largest batch counts.
        objective: what settings are chosen for while the load changes; None for fixed ones.
        limits: of requests.
        newest: versions of a model that are served. Defaults to 1, the highest. Where none of them
            loads, an older one is served.
        metrics: by default new ones.
        sizes: rows that batches are filled up to; by default powers of two up to
            `settings.max_batch`.

    Raises:
        ValueError: a directory that is not there.
    """

    def __init__(
        self,
        directories: Mapping[str, str | os.PathLike],
        computing=None,
        settings: BatchSettings | None = None,
        objective: Objective | None = None,
        limits: Limits | None = None,
        newest: int = 1,
        metrics: Metrics | None = None,
        sizes: Sequence[int] | None = None,
    ):
        self.computing = computing or InProcess()
        self.settings, self.limits = settings or BatchSettings(), limits or Limits()
        self.metrics = metrics or Metrics()
        self.bodies = Bodies(self.limits.all_bodies_bytes)
        self.ending = False
        self._newest, self._objective = newest, objective
        self._sizes = list(sizes or batch_sizes(self.settings.max_batch))
        self._devices = Devices(self.computing.slots)
        self._models = {}
        for name, directory in directories.items():
            versions(directory)  # raises if there is no such directory
            self._models[name] = Model(name, pathlib.Path(directory))

    @property
    def names(self) -> list[str]:
        """Of the models."""
        return sorted(self._models)

    @property
    def ready(self) -> bool:
        """Whether every model has a version, and the server goes on."""
        return not self.ending and all(model.ready for model in self._models.values())

    def model(self, name: str) -> Model:
        """Raises Refusal if there is none of this name."""
        if name not in self._models:
            raise Refusal("not_found", f"the model {name!r} is not served; there are {self.names}")
        return self._models[name]

    def check_served(self) -> None:
        """Raises ValueError, and says why, unless every model has a version."""
        for model in self._models.values():
            if not model.ready:
                errors = [f"version {n}: {error}" for n, (_, error) in model.states.items()]
                raise ValueError(
                    f"{model.directory} holds no version that loads: "
                    + ("; ".join(errors) or "write one with kdist.serving.export")
                )

    async def refresh(self) -> None:
        """Loads new versions, then drains and frees those that they replace."""
        for model in self._models.values():
            try:
                found = model.found()
            except (OSError, ValueError) as error:
                _log.warning("%s cannot be read (%s); what is loaded is served", model.name, error)
                continue
            newest = found[-self._newest :]
            for number in newest:
                await self._try(model, number)
            for number in reversed(found[: -self._newest]):
                if not model.ready:  # an old one serves rather than none
                    await self._try(model, number)
            keep = [number for number in newest if number in model.ready]
            if keep:  # else the old one serves on
                for number in sorted(set(model.ready) - set(keep)):
                    await self._unload(model, number)
            model.forget_all_but({*found, *model.ready})

    async def watch(self, seconds: float = 1.0) -> None:
        """Refreshes for good."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.refresh()
            except Exception:
                _log.exception("looking for new versions failed; what is loaded is served")

    async def close(self, seconds: float = 30.0) -> None:
        """Takes no more requests, answers those that wait, frees all; within so many seconds."""
        self.ending = True
        versions = [each for model in self._models.values() for each in model.ready.values()]
        draining = asyncio.gather(*(version.drain() for version in versions))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(draining, seconds)
        await asyncio.to_thread(self.computing.close)
        self._devices.close()

    async def _try(self, model, number):
        if not model.may_load(number):
            return
        key, path = Key(model.name, number), model.directory / str(number)
        model.states[number] = ("LOADING", "")
        files, began = model.files(number), time.monotonic()
        try:
            version = await asyncio.to_thread(self._loaded, key, path)
        except Exception as error:
            model.failed(number, str(error), files)
            _log.warning("%s does not load: %s", key, error)
            return
        model.ready[number], model.states[number] = version, ("AVAILABLE", "")
        version.begin_tuning()
        self._show(version)
        _log.info("%s is served, after %.1f s of loading", key, time.monotonic() - began)

    def _loaded(self, key, path):
        """In a thread, so that what is served is served on."""
        check_within(path, path.parent)
        signatures, protos = read_signatures(path)
        curve = self.computing.load(key, os.fspath(path), self._sizes)
        return Version(key, signatures, protos, self._batcher_for, self._tuner(key, curve))

    def _tuner(self, key, curve):
        if curve is None or self._objective is None:
            return None
        choose = functools.partial(choose_apart, devices=self.computing.slots)
        say = functools.partial(_log.warning, "%s: %s", key)
        return Tuner(curve, self._objective, on_message=say, choose=choose)

    async def _unload(self, model, number):
        version = model.ready.pop(number)
        model.states[number] = ("UNLOADING", "")
        await version.drain()
        await asyncio.to_thread(self.computing.unload, version.key)
        model.states[number] = ("END", "")
        self.metrics.forget_version(model.name, number)
        _log.info("%s is served no more", version.key)

    def _batcher_for(self, key, signature, load):
        return Batcher(
            lambda arrays: self.computing.compute(key, signature, arrays),
            self.settings,
            self._sizes,
            self.limits.waiting_rows,
            self._devices,
            self.metrics.batch_observer(key.model, key.version),
            load,
        )

    def _show(self, version):
        labels = {"model": version.key.model, "version": str(version.key.version)}
        for name, (text, read) in GAUGES.items():
            self.metrics.gauge(name, text, functools.partial(read, version), **labels)
