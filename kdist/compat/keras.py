"""Private interfaces of Keras that kdist uses, in one place, and checks of its backend.

`tests/compat/test_keras.py` fails if Keras changes one of them, so that an upgrade of Keras starts
here.

Keras reads KERAS_BACKEND when it is imported, and keeps that backend. Strategies, `kdist.Model`,
and most callbacks require TensorFlow. Builders, pipelines, and schedules work on both TensorFlow
and JAX (`pip install 'kdist[jax]'`), and `kdist.parallel.Mesh` on JAX.
"""

import contextlib
import contextvars
import functools

import keras
from keras.src import api_export
from keras.src import export as export_module
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope
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
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as loss_module
from keras.src.losses.loss import apply_mask
from keras.src.models import cloning as cloning_module
from keras.src.models.functional import Functional
from keras.src.models.functional import operation_fn as with_call_context
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.saving import object_registration, saving_lib
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils.python_utils import is_default, pythonify_logs
from keras.src.utils.traceback_utils import filter_traceback

__all__ = [
    "GLOBAL_SEED_GENERATOR",
    "MULTI_OPTIMIZERS",
    "BaseOptimizer",
    "EpochIterator",
    "Functional",
    "KerasVariable",
    "ProgbarLogger",
    "TFEpochIterator",
    "TFOptimizer",
    "TensorFlowTrainer",
    "apply_mask",
    "cloning_module",
    "convert_to_np_if_not_ragged",
    "export_module",
    "filter_traceback",
    "get_keras_mask",
    "global_state",
    "image_module",
    "in_stateless_scope",
    "is_default",
    "legacy_h5_format",
    "loss_module",
    "nn_module",
    "potentially_ragged_concat",
    "pythonify_logs",
    "random_module",
    "reduce_per_replica",
    "saving_lib",
    "set_keras_mask",
    "train_validation_split",
    "with_call_context",
]


def attached_to(tensor) -> dict:
    """Returns what Keras attaches to an output and its losses read: its mask, and its logits.

    Activations such as softmax attach the logits, of which cross-entropies are computed.

    Args:
        tensor: a tensor, or anything else.

    Returns:
        Those of the entries "mask" and "logits" that it has.
    """
    found = {"mask": get_keras_mask(tensor), "logits": getattr(tensor, "_keras_logits", None)}
    return {name: value for name, value in found.items() if value is not None}


def attach(tensor, mask=None, logits=None):
    """Attaches what `attached_to` returns.

    Args:
        tensor: a tensor.
        mask: its mask. Defaults to None, for none.
        logits: its logits. Defaults to None, for none.

    Returns:
        The same tensor.
    """
    if mask is not None:
        set_keras_mask(tensor, mask)
    if logits is not None:
        tensor._keras_logits = logits
    return tensor


# Classes that apply several optimizers to one model; Keras 3.14 has none.
MULTI_OPTIMIZERS = tuple(filter(None, [getattr(keras.optimizers, "MultiOptimizer", None)]))

# Private attributes and methods of Keras's trainer that kdist/training reads, calls, or overrides.
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
# Attributes of layers that the trainer reads, since every model is a layer.
LAYER_MEMBERS = ("_call_has_training_arg", "_flatten_layers", "_get_own_losses")
# Attributes of a functional model's graph, which kdist/parallel and kdist/commands traverse.
FUNCTIONAL_MEMBERS = (
    "_inbound_nodes",
    "_nodes_by_depth",
    "_outputs_struct",
    "_run_through_graph",
    "_standardize_inputs",
)
# Attributes of optimizers, besides those in `kdist.training.replica.hooks`.
OPTIMIZER_MEMBERS = (
    *("_clip_gradients", "_common_apply", "_distribution_strategy", "_get_variable_index"),
    *("_trainable_variables", "_trainable_variables_indices", "_untrack_variable", "_var_key"),
    "_use_weight_decay",
)
# Variables of a built optimizer that are no slots.
OPTIMIZER_STATE = (
    "_iterations",
    "_learning_rate",
    "_model_variables_moving_average",
    "_accumulated_gradients",
)
# Attributes of `keras.callbacks.SwapEMAWeights`, which kdist/callbacks and kdist/checkpoint use.
SWAP_EMA_MEMBERS = ("_ema_weights_in_model", "_tf_swap_variables")
EPOCH_ITERATOR_MEMBERS = (
    "_enumerate_iterator",
    "_get_iterator",
    "_interrupted_warning",
    "catch_stop_iteration",
    "reset",
)


def set_layout(variable, layout):
    """Places a variable of the JAX backend on the devices of a layout.

    Variables that optimizers derive from it later, such as slots, have the same layout.

    Args:
        variable: a `keras.Variable`.
        layout: a `keras.distribution.TensorLayout`.
    """
    variable._layout = layout
    variable.assign(variable.value)


def keras_variable_of(variable):
    """Returns the Keras variable of a weight, also of one that a program created by `tf.Variable`.

    Keras's optimizers accept both. Each variable of TensorFlow has one of Keras, of the same value.
    """
    if isinstance(variable, KerasVariable):
        return variable
    found = vars(variable).get("_keras_variable")
    if found is None:
        name = variable.name.partition(":")[0].replace("/", "_")
        found = keras.Variable(variable, trainable=variable.trainable, name=name)
        variable._keras_variable = found
    return found


def adopt_optimizer(optimizer, strategy):
    """Creates the variables of an optimizer again if they do not belong to `strategy`.

    Args:
        optimizer: a Keras optimizer of the TensorFlow backend.
        strategy: a `tf.distribute.Strategy`.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    parts = [optimizer, *([inner] if inner else getattr(optimizer, "optimizers", []))]
    if all(part._distribution_strategy is strategy for part in parts):
        return
    with strategy.scope():
        for variable in optimizer.variables:
            variable._initialize(variable.numpy())
    for part in parts:
        part._distribution_strategy = strategy


def adopt_variables(variables, strategy):
    """Creates those variables again, with their values, that do not belong to `strategy`.

    Args:
        variables: Keras variables of the TensorFlow backend.
        strategy: a `tf.distribute.Strategy`.
    """
    with strategy.scope():
        for variable in variables:
            if getattr(variable.value, "_distribute_strategy", None) is not strategy:
                variable._initialize(variable.numpy())


def unbuild_optimizer(optimizer):
    """Removes the slots and other variables that `build` has added to a Keras optimizer.

    Args:
        optimizer: an optimizer that has been built. Those that it wraps are not changed.
    """
    kept = {id(optimizer._iterations), id(optimizer._learning_rate)}
    for variable in list(optimizer._variables):
        if id(variable) not in kept:
            optimizer._untrack_variable(variable)
    optimizer._trainable_variables_indices = {}
    optimizer.built = False


def recompute_constants(model):
    """Recomputes the constants that a model's layers derive from weights which have since been set.

    A `Normalization` computes constants from its statistics when it is adapted or loaded, but not
    when its weights are set.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, Normalization):
            layer.finalize_state()


def copy_flags(copies, originals):
    """Sets trainability and dtype policies of layers to those of other layers.

    Args:
        copies: layers, each before the layers in it, since Keras's setter changes all of these.
        originals: as many layers, or more or fewer if calls of layers create layers.
    """
    for copy, original in zip(copies, originals, strict=False):
        copy.trainable, copy.dtype_policy = original.trainable, original.dtype_policy


# `Lambda` layers that are being copied, by id; None outside of `sharing_functions`.
_copied_lambdas: contextvars.ContextVar = contextvars.ContextVar("copied_lambdas", default=None)


@contextlib.contextmanager
def sharing_functions():
    """Returns a context in which copies of `Lambda` layers have the functions of the originals.

    Keras writes a Python lambda to the configuration as bytecode, which lacks the names of its
    module, and which `from_config` refuses to run. It looks up other functions in modules only.
    """
    token = _copied_lambdas.set({})
    try:
        yield
    finally:
        _copied_lambdas.reset(token)


def _share_functions(cls):
    keras_get_config, keras_from_config = cls.get_config, cls.from_config.__func__

    @functools.wraps(keras_get_config)
    def get_config(self):
        if (copied := _copied_lambdas.get()) is None:
            return keras_get_config(self)
        copied[id(self)] = self
        return {**super(cls, self).get_config(), "original": id(self)}

    @functools.wraps(keras_from_config)
    def from_config(cls, config, *args, **kwargs):
        if "original" not in config:
            return keras_from_config(cls, config, *args, **kwargs)
        own = {name: value for name, value in config.items() if name != "original"}
        layer = _copied_lambdas.get()[config["original"]]
        return cls(layer.function, layer._output_shape, layer.mask, layer.arguments, **own)

    cls.get_config, cls.from_config = get_config, classmethod(from_config)


_share_functions(keras.layers.Lambda)


def save_as(keras_class: type):
    """Returns a class decorator that stores the class in files under the name of `keras_class`.

    A model that differs from Keras's only in training is, in a file, Keras's own, and opens without
    kdist.

    Args:
        keras_class: the class that files name. The decorated class must derive from it.
    """
    own = f"{keras_class.__module__}.{keras_class.__name__}"
    keras_name = api_export.REGISTERED_OBJS_TO_NAMES.get(keras_class, own)

    def register(cls):
        assert issubclass(cls, keras_class), (cls, keras_class)
        if keras_name.startswith("keras."):
            api_export.REGISTERED_OBJS_TO_NAMES[cls] = keras_name
        else:  # a class of the program, whose name and module `cls` has
            names = object_registration.GLOBAL_CUSTOM_NAMES
            names[cls] = object_registration.get_registered_name(keras_class)
        return cls

    return register


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
