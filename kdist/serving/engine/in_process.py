"""Loads models and computes batches in the current process.

`kdist.serving.engine.worker_pool.WorkerPool` has the same methods and uses other processes. The
methods block, so the server calls them in threads.
"""

import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from kdist.devices import find_devices
from kdist.serving.core.errors import BadInput
from kdist.serving.core.model_directory import check_devices
from kdist.serving.core.requests import Arrays
from kdist.serving.core.signature import SERVING_DEFAULT, Signature, read_signatures
from kdist.serving.exporting.warmup_file import warmup_requests
from kdist.serving.policy.latency_curve import LatencyCurve, measure_curve

# Total time for the measured calls of all batch sizes.
_MEASURE_SECONDS = 1.0
# Errors of operations that reject a value, such as bytes that are no image or an unknown word.
_INPUT_ERRORS = (tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError, tf.errors.NotFoundError)
_GRAPH_LINES = ("Graph execution error", "Detected at node", "<stack traces", "[[")
# Parsed requests are many small objects. With Python's default thresholds, garbage collection would
# visit all of TensorFlow's objects several times per second.
_GC_THRESHOLDS = (50_000, 50, 100)
# How long a thread with a result waits for a thread that runs Python code. Python's default of 5 ms
# is as long as a batch.
_SWITCH_SECONDS = 0.0005


@dataclasses.dataclass(frozen=True, order=True)
class VersionKey:
    """Name of a model and number of a version."""

    model: str
    version: int

    def __str__(self):
        return f"{self.model}/{self.version}"


class LoadTimeout(RuntimeError):
    """A version took longer than `seconds` to load."""

    def __init__(self, seconds: float):
        super().__init__(f"it did not load within {seconds:g} s (--load_seconds)")


class InProcess:
    """Computes batches in this process, `slots` at a time.

    The devices are those that split models are placed on, such as `["CPU:0", "CPU:1"]`, by default
    all GPUs, or the CPU. TensorFlow must not have run an operation yet.
    """

    slots = 1
    pids: Sequence[int] = ()  # of worker processes

    def __init__(self, devices: Sequence[str] = ()):
        find_devices(devices or None)
        self._loaded: dict[VersionKey, LoadedVersion] = {}

    def load(self, key: VersionKey, path: str, sizes: Sequence[int]) -> LatencyCurve | None:
        """Loads a version, warms it up with batches of each size, and returns its latency curve.

        The curve is None if no valid batch could be constructed. Raises whatever error TensorFlow
        has.
        """
        loaded = LoadedVersion(path)
        curve = warm_up(loaded, loaded.signatures, sizes, loaded.examples)
        self._loaded[key] = loaded
        gc.collect()  # loading leaves a second copy of the weights in reference cycles
        return curve

    def unload(self, key: VersionKey) -> None:
        """Frees a version. None of its batches may be in flight."""
        if self._loaded.pop(key, None):
            gc.collect()  # its graphs hold the weights in reference cycles

    def compute(self, key: VersionKey, signature: str, arrays: Arrays) -> dict[str, np.ndarray]:
        """Returns the outputs of a batch; raises BadInput if the model rejects these rows."""
        return self._loaded[key](signature, arrays)

    def close(self) -> None:
        """Frees all versions."""
        self._loaded.clear()


class LoadedVersion:
    """A loaded SavedModel that maps NumPy arrays to NumPy arrays. Runs no Python code of the model.

    `signatures` are those for predictions, by name. `examples` are the warm-up requests of the
    signature `serving_default`, if any. Raises ValueError if the model must not be loaded (see
    `read_signatures`), or is placed on devices that are not available.
    """

    def __init__(self, version_directory: str | os.PathLike):
        self.signatures, _ = read_signatures(version_directory)
        devices = [each.name for each in tf.config.list_logical_devices()]
        check_devices(version_directory, [each.removeprefix("/device:") for each in devices])
        options = tf.saved_model.LoadOptions(
            experimental_variable_policy=tf.saved_model.experimental.VariablePolicy.SAVE_VARIABLE_DEVICES
        )
        self._model = tf.saved_model.load(os.fspath(version_directory), options=options)
        requests = warmup_requests(version_directory)
        self.examples = [arrays for name, arrays in requests if name == SERVING_DEFAULT]
        self._functions = {name: self._model.signatures[name] for name in self.signatures}

    def __call__(self, signature: str, arrays: Arrays) -> dict[str, np.ndarray]:
        """Returns the outputs of a signature; raises BadInput if an operation rejects values."""
        try:
            tensors = {name: tf.constant(array) for name, array in arrays.items()}
            outputs = self._functions[signature](**tensors)
            return {name: tensor.numpy() for name, tensor in outputs.items()}
        except _INPUT_ERRORS as error:
            raise BadInput(f"the model cannot compute these rows: {_reason(error)}") from error


def _reason(error):
    """Returns the first line of an error that does not describe the graph."""
    lines = [line.strip() for line in str(error.message).splitlines()]
    reasons = [line for line in lines if line and not line.startswith(_GRAPH_LINES)]
    return (reasons or ["their values are not valid"])[0][:500]


def warm_up(
    compute: Callable[[str, Arrays], Arrays],
    signatures: Mapping[str, Signature],
    sizes: Sequence[int],
    examples: Sequence[Arrays] = (),
) -> LatencyCurve | None:
    """Returns the default signature's latency curve, after computing batches of all signatures.

    No client then waits for traces or allocations. The default signature is timed with each size,
    on the first row of `examples` or on zeros; others are computed with the smallest size. The
    curve is None if the model rejects rows of zeros, as it does when they should be encoded images.
    Raises BadInput if it rejects one of its own examples.
    """
    default = SERVING_DEFAULT if SERVING_DEFAULT in signatures else min(signatures)
    curve = None
    for name, signature in signatures.items():
        is_default = name == default
        row = example_row(signature, examples if is_default else ())
        own_sizes = list(sizes) if is_default else sizes[:1]
        call = functools.partial(compute, name)
        try:
            measured = measure_curve(call, row, own_sizes, _MEASURE_SECONDS)
        except BadInput:
            if is_default and examples:
                raise
            continue
        if is_default:
            curve = measured
    return curve


def example_row(signature: Signature, examples: Sequence[Arrays] = ()) -> dict[str, np.ndarray]:
    """Returns a request of one row: the first row of the examples, or zeros."""
    for example in examples:
        return {name: array[:1] for name, array in example.items()}
    return {
        name: np.full(
            [1, *(1 if size is None else size for size in (spec.shape or (1,))[1:])],
            b"" if spec.is_text else 0,
            spec.dtype,
        )
        for name, spec in signature.inputs.items()
    }


def prepare_interpreter() -> None:
    """Configures Python's garbage collector and thread switching for serving.

    Call it before models are loaded: objects that exist now are never collected, which would keep
    the weights of a loaded version alive.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
