"""The model as every server but ours loads it: a function of arrays."""

import os
import pathlib
from collections.abc import Callable

import numpy as np


def load(directory: str | os.PathLike) -> Callable[[np.ndarray], np.ndarray]:
    """From rows (B, …) to the first output (B, …), traced for common sizes of batches.

    Args:
        directory: of all versions; the latest is taken.
    """
    import tensorflow as tf

    latest = max(
        (path for path in pathlib.Path(directory).iterdir() if path.name.isdigit()),
        key=lambda path: int(path.name),
    )
    loaded = tf.saved_model.load(str(latest))
    signature = loaded.signatures["serving_default"]
    ((name, spec),) = signature.structured_input_signature[1].items()

    def predict(rows: np.ndarray) -> np.ndarray:
        outputs = signature(**{name: tf.constant(rows, spec.dtype)})
        return next(iter(outputs.values())).numpy()

    predict.model = loaded  # a signature does not keep its model
    for size in (1, 2, 4, 8, 16, 32):
        predict(np.zeros((size, *spec.shape[1:]), np.float32))
    return predict
