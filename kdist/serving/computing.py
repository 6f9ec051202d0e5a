"""Where batches are computed: in this process, or in others (`kdist.serving.workers`).

Both have the same methods. They block, and are called in threads.
"""

import dataclasses
import gc
from collections.abc import Mapping, Sequence

import numpy as np

from kdist.devices import find_devices
from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.loading import LoadedVersion
from kdist.serving.warming import warm_up

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    """A version of a model."""

    model: str
    version: int

    def __str__(self):
        return f"{self.model}/{self.version}"


class InProcess:
    """Batches are computed in this process, one at a time.

    Args:
        devices: that split models are placed on, such as `["CPU:0", "CPU:1"]`; by default all
            GPUs, or the CPU. To be given before TensorFlow runs anything.

    Attributes:
        slots: batches that are computed at a time.
    """

    slots = 1

    def __init__(self, devices: Sequence[str] = ()):
        find_devices(devices or None)
        self._loaded: dict[Key, LoadedVersion] = {}

    def load(self, key: Key, path: str, sizes: Sequence[int]) -> LatencyCurve | None:
        """Makes a version ready, and computes batches of each size with it.

        Returns:
            What a batch takes; None where no such batch could be made up.

        Raises:
            Exception: as TensorFlow says why it does not load.
        """
        loaded = LoadedVersion(path)
        curve = warm_up(loaded, loaded.signatures, sizes, loaded.examples)
        self._loaded[key] = loaded
        gc.collect()  # loading leaves the weights once more, in cycles; a server seldom looks
        return curve

    def unload(self, key: Key) -> None:
        """Frees a version; no batch of it may be under way."""
        if self._loaded.pop(key, None):
            gc.collect()  # its graphs hold its weights, in cycles

    def compute(self, key: Key, signature: str, arrays: Arrays) -> dict[str, np.ndarray]:
        """The outputs of a batch.

        Raises:
            BadInput: the model refuses these rows.
        """
        return self._loaded[key](signature, arrays)

    def close(self) -> None:
        """Frees all."""
        self._loaded.clear()
