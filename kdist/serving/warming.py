"""A version computes before it is asked to, so that no client waits for traces and allocations."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kdist.serving.batcher import BadInput
from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.measured_curve import measure_curve
from kdist.serving.signature import SERVING_DEFAULT, Signature

# For the measured calls of all sizes together.
_MEASURE_SECONDS = 1.0


def warm_up(
    compute: Callable[[str, Mapping[str, np.ndarray]], Mapping[str, np.ndarray]],
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

    Raises:
        BadInput: the model refuses an example of its own.
    """
    default = SERVING_DEFAULT if SERVING_DEFAULT in signatures else min(signatures)
    curve = None
    for name, signature in signatures.items():
        row = example_row(signature, examples if name == default else ())
        wanted = list(sizes) if name == default else sizes[:1]
        try:
            found = measure_curve(functools.partial(compute, name), row, wanted, _MEASURE_SECONDS)
        except BadInput:
            if name == default and examples:
                raise
            continue
        if name == default:
            curve = found
    return curve


def example_row(
    signature: Signature, examples: Sequence[Mapping[str, np.ndarray]] = ()
) -> dict[str, np.ndarray]:
    """A request of one row: of the first example, or of zeros."""
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
