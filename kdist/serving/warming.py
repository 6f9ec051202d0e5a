"""A version computes before it is asked to, so that no client waits for traces and allocations."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.refusals import BadInput
from kdist.serving.signature import SERVING_DEFAULT, Signature

# The most that the measured calls of all sizes take, and calls of a size.
_MEASURE_SECONDS = 2.0
_MOST_CALLS = 9


def warm_up(
    compute: Callable[[str, Mapping[str, np.ndarray]], object],
    signatures: Mapping[str, Signature],
    sizes: Sequence[int],
    examples: Sequence[Mapping[str, np.ndarray]] = (),
) -> LatencyCurve | None:
    """Computes and times batches of each size, and the smallest with other signatures.

    Args:
        compute: `LoadedVersion`.
        signatures: of the version.
        sizes: rows of batches, ascending.
        examples: requests to the default signature; without any, rows of zeros.

    Returns:
        Seconds by size; None where the model refuses rows of zeros, such as images in bytes.
    """
    default = SERVING_DEFAULT if SERVING_DEFAULT in signatures else min(signatures)
    curve = None
    for name, signature in signatures.items():
        row = _row(signature, examples if name == default else ())
        wanted = list(sizes) if name == default else sizes[:1]
        try:
            seconds = [_median_seconds(compute, name, row, n, len(wanted)) for n in wanted]
        except BadInput:
            continue
        if name == default:
            curve = LatencyCurve(wanted, seconds)
    return curve


def _row(signature, examples):
    """{input: array of one row}."""
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


def _median_seconds(compute, name, row, size, sizes):
    arrays = {key: np.repeat(array, size, axis=0) for key, array in row.items()}
    compute(name, arrays)  # traces
    seconds: list[float] = []
    while len(seconds) < _MOST_CALLS and sum(seconds) < _MEASURE_SECONDS / sizes:
        began = time.perf_counter()
        compute(name, arrays)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))
