"""Every private Keras interface that kdist leans on, in one place.

`tests/training/test_keras_internals.py` fails when Keras changes one of them, so that an upgrade
of Keras starts here and nowhere else.
"""

from keras.src import api_export
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.models.functional import Functional

__all__ = ["Functional", "TensorFlowTrainer", "save_as"]


def save_as(keras_class: type, keras_name: str):
    """Class decorator: files hold the decorated class under the name of `keras_class`.

    A model that differs from Keras's own only in how it trains is, on disk, Keras's own: plain
    Keras opens it without kdist.

    Args:
        keras_class: the class that a file names; the decorated one must derive from it.
        keras_name: its importable name, `module.ClassName`.
    """

    def register(cls):
        assert issubclass(cls, keras_class), (cls, keras_class)
        api_export.REGISTERED_OBJS_TO_NAMES[cls] = keras_name
        return cls

    return register
