"""Every private Keras interface that kdist leans on, in one place.

`tests/training/test_keras_internals.py` fails when Keras changes one of them, so that an upgrade
of Keras starts here and nowhere else.
"""

from keras.src import api_export
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.tensorflow import image as image_module
from keras.src.backend.tensorflow import nn as nn_module
from keras.src.backend.tensorflow import random as random_module
from keras.src.backend.tensorflow.core import Variable as KerasVariable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import (
    TensorFlowTrainer,
    TFEpochIterator,
    convert_to_np_if_not_ragged,
    potentially_ragged_concat,
    reduce_per_replica,
)
from keras.src.callbacks.progbar_logger import ProgbarLogger
from keras.src.layers import Normalization
from keras.src.losses import loss as loss_module
from keras.src.losses.loss import apply_mask
from keras.src.models.functional import Functional
from keras.src.models.functional import operation_fn as with_call_context
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils.python_utils import pythonify_logs
from keras.src.utils.traceback_utils import filter_traceback

__all__ = [
    "BaseOptimizer",
    "EpochIterator",
    "Functional",
    "KerasVariable",
    "ProgbarLogger",
    "TFEpochIterator",
    "TFOptimizer",
    "TensorFlowTrainer",
    "apply_mask",
    "convert_to_np_if_not_ragged",
    "filter_traceback",
    "get_keras_mask",
    "image_module",
    "lay_out",
    "loss_module",
    "nn_module",
    "potentially_ragged_concat",
    "pythonify_logs",
    "random_module",
    "recompute_constants",
    "reduce_per_replica",
    "save_as",
    "saved_name",
    "set_keras_mask",
    "train_validation_split",
    "with_call_context",
]

# Attributes and methods, private to Keras's trainer, that kdist/training reads, calls or overrides.
TRAINER_MEMBERS = (
    "_aggregate_additional_loss",
    "_assert_compile_called",
    "_autoconvert_optionals",
    "_distribute_strategy",
    "_compute_loss",
    "_flatten_metrics_in_order",
    "_get_metrics_result_or_logs",
    "_initial_epoch",
    "_loss_tracker",
    "_maybe_symbolic_build",
    "_should_eval",
    "_symbolic_build",
)
# What the trainer reads of the layer that every model is.
LAYER_MEMBERS = ("_call_has_training_arg", "_flatten_layers", "_get_own_losses")
# Of a functional model's graph, which kdist/parallel walks.
FUNCTIONAL_MEMBERS = (
    "_nodes_by_depth",
    "_outputs_struct",
    "_run_through_graph",
    "_standardize_inputs",
)
# Of the optimizer: what the hooks replace is named in `keras_hooks`.
OPTIMIZER_MEMBERS = ("_common_apply", "_trainable_variables", "_var_key")
# What a built optimizer holds, by which slots are told from the rest.
OPTIMIZER_STATE = (
    "_iterations",
    "_learning_rate",
    "_model_variables_moving_average",
    "_accumulated_gradients",
)
EPOCH_ITERATOR_MEMBERS = (
    "_enumerate_iterator",
    "_get_iterator",
    "_interrupted_warning",
    "catch_stop_iteration",
    "reset",
)


def lay_out(variable, layout):
    """Puts a variable of the JAX backend on the devices that a layout says.

    What optimizers make beside it later, such as slots, follows it.

    Args:
        variable: a `keras.Variable`.
        layout: a `keras.distribution.TensorLayout`.
    """
    variable._layout = layout
    variable.assign(variable.value)


def recompute_constants(model):
    """Has layers compute anew what they have computed of weights that were set since.

    A `Normalization` normalises by constants that it makes of its statistics when it is adapted or
    loaded; setting its weights leaves them as they were.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, Normalization):
            layer.finalize_state()


def saved_name(keras_class: type) -> str:
    """What a file calls a class."""
    own = f"{keras_class.__module__}.{keras_class.__name__}"
    return api_export.REGISTERED_OBJS_TO_NAMES.get(keras_class, own)


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
