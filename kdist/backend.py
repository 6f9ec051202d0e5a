"""Which of Keras's backends this process has: TensorFlow, or JAX (`pip install 'kdist[jax]'`).

Keras takes one, from KERAS_BACKEND, when it is imported, and keeps it. Strategies, `kdist.Model`
and most callbacks are TensorFlow's; builders, pipelines and schedules work on both, and
`kdist.parallel.Mesh` on JAX.
"""

import keras


def is_tensorflow() -> bool:
    """Whether Keras computes with TensorFlow."""
    return keras.backend.backend() == "tensorflow"


def check_is_tensorflow(what: str):
    """Raises a RuntimeError, which names `what`, where Keras computes with something else."""
    if not is_tensorflow():
        raise RuntimeError(
            f"{what} is for Keras on TensorFlow, and KERAS_BACKEND is {keras.backend.backend()}: "
            "take KERAS_BACKEND=tensorflow; or, on jax, models of kdist.models or keras.Model, and "
            "kdist.parallel.Mesh(layout)"
        )


def check_is_jax(what: str):
    """Raises a RuntimeError, which names `what`, where Keras does not compute with JAX."""
    if keras.backend.backend() != "jax":
        raise RuntimeError(
            f"{what} is for Keras on JAX, and KERAS_BACKEND is {keras.backend.backend()}: set "
            "KERAS_BACKEND=jax before Keras is imported (scripts/train.py --backend=jax); on "
            "TensorFlow take kdist.create_strategy(layout)"
        )


def check_no_distribution():
    """Raises a RuntimeError where a `keras.distribution` is set, of which TensorFlow knows nothing.

    Keras takes it without a word, and trains on one device.
    """
    if is_tensorflow() and (given := keras.distribution.distribution()) is not None:
        raise RuntimeError(
            f"keras.distribution.set_distribution({type(given).__name__}(…)) does nothing on "
            "Keras's TensorFlow backend: all would be on one device. Take kdist.create_strategy("
            "kdist.Layout(…)) in its place and undo it with keras.distribution.set_distribution("
            "None); or KERAS_BACKEND=jax (scripts/train.py --backend=jax)"
        )
