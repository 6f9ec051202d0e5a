"""Keras backend of this process: TensorFlow, or JAX (`pip install 'kdist[jax]'`).

Keras reads KERAS_BACKEND when it is imported, and keeps that backend. Strategies, `kdist.Model`,
and most callbacks require TensorFlow. Builders, pipelines, and schedules work on both, and
`kdist.parallel.Mesh` on JAX.
"""

import keras


def is_tensorflow() -> bool:
    """Returns True if Keras's backend is TensorFlow."""
    return keras.backend.backend() == "tensorflow"


def check_is_tensorflow(what: str):
    """Raises a RuntimeError, with `what` as its subject, if Keras has another backend."""
    if not is_tensorflow():
        raise RuntimeError(
            f"{what} requires Keras on TensorFlow, and KERAS_BACKEND is {keras.backend.backend()}: "
            "set KERAS_BACKEND=tensorflow; or, on jax, use models of kdist.models or keras.Model, "
            "and kdist.parallel.Mesh(layout)"
        )


def check_is_jax(what: str):
    """Raises a RuntimeError, with `what` as its subject, if Keras's backend is not JAX."""
    if keras.backend.backend() != "jax":
        raise RuntimeError(
            f"{what} requires Keras on JAX, and KERAS_BACKEND is {keras.backend.backend()}: set "
            "KERAS_BACKEND=jax before Keras is imported (kdist train --backend=jax); on "
            "TensorFlow use kdist.create_strategy(layout)"
        )


def check_no_distribution():
    """Raises a RuntimeError if a `keras.distribution` is set with the TensorFlow backend.

    Keras accepts it silently there, and trains on one device.
    """
    if is_tensorflow() and (given := keras.distribution.distribution()) is not None:
        raise RuntimeError(
            f"keras.distribution.set_distribution({type(given).__name__}(…)) does nothing on "
            "Keras's TensorFlow backend, which would use one device. Use kdist.create_strategy("
            "kdist.Layout(…)) instead and undo it with keras.distribution.set_distribution(None); "
            "or set KERAS_BACKEND=jax (kdist train --backend=jax)"
        )
