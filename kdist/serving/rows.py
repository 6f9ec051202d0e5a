"""Rows of named arrays."""

from collections.abc import Mapping, Sequence

import numpy as np


def rows_of(arrays: Mapping[str, np.ndarray]) -> int:
    """How many; raises ValueError if there are none, or not as many of each."""
    counts = {name: len(array) if np.ndim(array) else None for name, array in arrays.items()}
    first = next(iter(counts.values()), None)
    if not first or any(count != first for count in counts.values()):
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"rows of a request: {said or 'none'}; give as many of each, one at least")
    return first


def filled_up(parts: Sequence[np.ndarray], more: int) -> np.ndarray:
    """One array of all rows, and so many copies of the first: zeros may be no possible input."""
    if more:
        parts = [*parts, np.repeat(parts[0][:1], more, axis=0)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
