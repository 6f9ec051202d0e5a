"""A model's versions that are ready, each with its queues."""

import asyncio
import pathlib
from collections.abc import Callable, Collection, Mapping

import numpy as np
from tensorflow_serving.apis.get_model_metadata_pb2 import SignatureDefMap

from kdist.serving.adapting import Tuner
from kdist.serving.batcher import Batcher
from kdist.serving.computing import Key
from kdist.serving.model_directory import contents, versions
from kdist.serving.refusals import Refusal
from kdist.serving.signature import SERVING_DEFAULT, Signature

_MOST_TRIES = 3  # of the same files
# Name -> (what it is, of a version): for Prometheus.
GAUGES: Mapping[str, tuple[str, Callable]] = {
    "waiting_rows": ("Rows that are in no batch yet.", lambda version: version.waiting_rows),
    "batch_timeout_seconds": (
        "What the oldest request of a batch waits for others.",
        lambda version: version.batcher().settings.timeout_seconds,
    ),
    "max_batch": (
        "Rows of a full batch.",
        lambda version: version.batcher().settings.max_batch,
    ),
}


class Version:
    """A version that is ready."""

    def __init__(self, key: Key, signatures, protos, batcher_for, tuner: Tuner | None):
        self.key, self.tuner = key, tuner
        self.signatures: Mapping[str, Signature] = signatures
        self._protos = protos
        self._batcher_for = batcher_for
        self._batchers: dict[str, Batcher] = {}
        self._tuning: asyncio.Task | None = None

    def signature(self, name: str) -> Signature:
        """Raises Refusal if there is none of this name."""
        if name not in self.signatures:
            raise Refusal(
                "invalid", f"{self.key} has the signatures {sorted(self.signatures)}, not {name!r}"
            )
        return self.signatures[name]

    def signature_map(self) -> SignatureDefMap:
        """All signatures, as metadata tells them."""
        return SignatureDefMap(signature_def=self._protos)

    def batcher(self, name: str = SERVING_DEFAULT) -> Batcher:
        """Of a signature; each has a queue of its own."""
        if name not in self._batchers:
            load = self.tuner.load if self.tuner and name == SERVING_DEFAULT else None
            self._batchers[name] = self._batcher_for(self.key, name, load)
        return self._batchers[name]

    def begin_tuning(self) -> None:
        """Has the settings of the default signature follow its load."""
        if self.tuner and SERVING_DEFAULT in self.signatures:
            self._tuning = asyncio.create_task(self.tuner.run(self._apply))

    def _apply(self, settings):
        self.batcher().settings = settings

    async def predict(
        self, arrays: Mapping[str, np.ndarray], signature: str = SERVING_DEFAULT
    ) -> dict[str, np.ndarray]:
        """The outputs for a request's rows; see `Batcher` for what it raises."""
        return await self.batcher(signature)(arrays)

    @property
    def waiting_rows(self) -> int:
        """Of all its queues."""
        return sum(batcher.waiting_rows for batcher in self._batchers.values())

    async def drain(self) -> None:
        """Takes no more, and answers what waits."""
        if self._tuning:
            self._tuning.cancel()
        await asyncio.gather(*(batcher.close() for batcher in self._batchers.values()))


class Model:
    """The versions of a model."""

    def __init__(self, name: str, directory: pathlib.Path):
        self.name, self.directory = name, directory
        self.ready: dict[int, Version] = {}
        self.states: dict[int, tuple[str, str]] = {}  # version -> (state, why it failed)
        # Of versions that did not load: version -> (tries, what its files were).
        self._failures: dict[int, tuple[int, frozenset]] = {}

    def version(self, number: int | None = None) -> Version:
        """The highest that is ready, or one by its number; raises Refusal if it is not."""
        if number is None and self.ready:
            return self.ready[max(self.ready)]
        if number not in self.ready:
            what = self.name if number is None else f"version {number} of {self.name}"
            raise Refusal("not_found", f"{what} is not served; there are {sorted(self.ready)}")
        return self.ready[number]

    def states_of(self, number: int | None) -> dict[int, tuple[str, str]]:
        """(state, why it failed) of one version, or of all; raises Refusal if there are none."""
        states = {n: state for n, state in self.states.items() if number in (None, n)}
        if not states:
            said = "yet" if number is None else number
            raise Refusal("not_found", f"{self.name} has no version {said}")
        return states

    def may_load(self, number: int) -> bool:
        """Whether a version is to be loaded, or to be tried again.

        A disk may have been late; and while files still come, as in a slow copy, it is not whole.
        """
        if number in self.ready:
            return False
        tries, files = self._failures.get(number, (0, frozenset()))
        return tries < _MOST_TRIES or files != self.files(number)

    def files(self, number: int) -> frozenset:
        """What a version's files are now."""
        return contents(self.directory / str(number))

    def failed(self, number: int, error: str, files: frozenset) -> None:
        """A version did not load, when its files were these."""
        tries, before = self._failures.get(number, (0, files))
        self._failures[number] = (tries + 1 if files == before else 1, files)
        self.states[number] = ("END", error)

    def forget_all_but(self, numbers: Collection[int]) -> None:
        """What became of other versions is kept no longer."""
        for kept in (self.states, self._failures):
            for number in set(kept) - set(numbers):
                del kept[number]

    def found(self) -> list[int]:
        """The versions in its directory, ascending."""
        return versions(self.directory)
