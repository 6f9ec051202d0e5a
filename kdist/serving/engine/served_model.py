"""A served model and its versions, each with one queue per signature."""

import asyncio
import pathlib
from collections.abc import Callable, Collection, Mapping

import numpy as np
from tensorflow_serving.apis.get_model_metadata_pb2 import SignatureDefMap

from kdist.serving.core.errors import RequestError
from kdist.serving.core.model_directory import file_states, versions
from kdist.serving.core.signature import SERVING_DEFAULT, Signature
from kdist.serving.engine.batcher import Batcher
from kdist.serving.engine.in_process import VersionKey
from kdist.serving.policy.adaptation import Tuner

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
