"""A version of a model in this process, as functions of NumPy arrays."""

import os
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from kdist.serving.batcher import BadInput
from kdist.serving.model_directory import check_devices
from kdist.serving.signature import SERVING_DEFAULT, read_signatures
from kdist.serving.warmup_file import warmup_requests

# What operations say of values that they cannot take: an image that is none, an unknown word.
_OF_INPUTS = (tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError, tf.errors.NotFoundError)
_OF_GRAPHS = ("Graph execution error", "Detected at node", "<stack traces", "[[")


class LoadedVersion:
    """A SavedModel that computes; of what it holds, no Python code is run.

    Args:
        version_directory: with `saved_model.pb`.

    Attributes:
        signatures: for predictions, by their names.
        examples: requests to warm up with, to the signature `serving_default`; may be none.

    Raises:
        ValueError: there is none that may be loaded (see `read_signatures`), or it is placed on
            devices that are not there.
    """

    def __init__(self, version_directory: str | os.PathLike):
        self.signatures, _ = read_signatures(version_directory)
        there_are = [each.name for each in tf.config.list_logical_devices()]
        check_devices(version_directory, [each.removeprefix("/device:") for each in there_are])
        options = tf.saved_model.LoadOptions(
            experimental_variable_policy=tf.saved_model.experimental.VariablePolicy.SAVE_VARIABLE_DEVICES
        )
        self._model = tf.saved_model.load(os.fspath(version_directory), options=options)
        requests = warmup_requests(version_directory)
        self.examples = [arrays for name, arrays in requests if name == SERVING_DEFAULT]
        self._functions = {name: self._model.signatures[name] for name in self.signatures}

    def __call__(self, signature: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of a signature.

        Raises:
            BadInput: the model's operations refuse these values.
        """
        try:
            tensors = {name: tf.constant(array) for name, array in arrays.items()}
            outputs = self._functions[signature](**tensors)
            return {name: tensor.numpy() for name, tensor in outputs.items()}
        except _OF_INPUTS as error:
            raise BadInput(f"the model cannot compute these rows: {_first_line(error)}") from error


def _first_line(error):
    """TensorFlow adds the graph's nodes, of which a client knows nothing."""
    lines = [line.strip() for line in str(error.message).splitlines()]
    said = [line for line in lines if line and not line.startswith(_OF_GRAPHS)]
    return (said or ["they are not what it takes"])[0][:500]
