"""Writes a model as a SavedModel with the signature `serving_default` of named tensors."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.parallel.placement.patterns import functional_graph
from kdist.serving.core.signature import SERVING_DEFAULT, read_signatures

_KEEP_DEVICES = tf.saved_model.SaveOptions(
    experimental_variable_policy=tf.saved_model.experimental.VariablePolicy.SAVE_VARIABLE_DEVICES
)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Inputs, outputs, and computation of a signature. Specs have the shape `(None, …)`."""

    inputs: Mapping[str, tf.TensorSpec]
    outputs: Mapping[str, tf.TensorSpec]
    predict: Callable[..., dict[str, tf.Tensor]]  # of tensors in the order of `inputs`
    parts: tuple[keras.Model, ...]  # models whose weights the function uses


def create_endpoint(model: keras.Model, preprocessing: Any = None) -> Endpoint:
    """Returns the signature of a built model, which includes preprocessing.

    A single input is named `inputs`, and a single output `outputs`. Several are named after the
    layers that compute them, or after the arguments of the preprocessing function.

    Raises ValueError if preprocessing is neither a model of the same kind nor a `tf.function` with
    an `input_signature`, or does not accept rows.
    """
    names = _names(model.outputs, "outputs")
    before: Callable[..., Any]
    parts: tuple[keras.Model, ...] = (model,)
    if preprocessing is None:
        inputs, before = _input_specs(model), _packer(model)
    elif isinstance(preprocessing, keras.Model):
        inputs, parts = _input_specs(preprocessing), (model, preprocessing)
        pack = _packer(preprocessing)

        def before(*tensors):
            return preprocessing(pack(*tensors), training=False)
    else:
        inputs, before = _argument_specs(preprocessing), preprocessing

    def predict(*tensors):
        outputs = keras.tree.flatten(model(before(*tensors), training=False))
        return dict(zip(names, outputs, strict=True))

    outputs = {name: _spec(name, x) for name, x in zip(names, model.outputs, strict=True)}
    return Endpoint(inputs, outputs, predict, parts)


def write_saved_model(
    endpoint: Endpoint,
    path: str | os.PathLike,
    examples: Mapping[str, np.ndarray],
    keep_devices: bool = False,
) -> None:
    """Writes a SavedModel to a new directory after it has computed the examples.

    `keep_devices` loads variables on the devices where they are now; operations always stay on the
    devices that the model chose. Raises ValueError if the examples ({input: rows}) cannot be
    computed, or a server would not load the model because it calls Python code.
    """
    archive = keras.export.ExportArchive()
    # The archive finds the variables that are used. If it tracked the models directly, it would
    # write their variables a second time; through a module, it tracks their tables only.
    parts = tf.Module()
    parts.parts = endpoint.parts
    archive.track(parts)
    specs = list(endpoint.inputs.values())
    traced = archive.add_endpoint(SERVING_DEFAULT, endpoint.predict, input_signature=specs)
    if examples:
        rows = [tf.constant(examples[name]) for name in endpoint.inputs]
        _check_computes(traced.get_concrete_function(), rows)
    options = _KEEP_DEVICES if keep_devices else None
    archive.write_out(os.fspath(path), options=options, verbose=False)
    read_signatures(path)


def _check_computes(function, tensors):
    """Computes the examples: a server does not load a model whose warm-up fails."""
    try:
        function(*tensors)
    except tf.errors.OpError as error:
        reason = str(error.message).strip().splitlines()[0]
        raise ValueError(
            f"the model cannot compute the rows to warm up with: {reason}. Give other rows as "
            "examples=…, or examples={} for no warm-up"
        ) from error


def _input_specs(model):
    names = _names(model.inputs, "inputs")
    return {name: _spec(name, tensor) for name, tensor in zip(names, model.inputs, strict=True)}


def _packer(model):
    """Returns a function that packs tensors in the structure of the model's inputs."""
    structure = functional_graph(model)._inputs_struct
    return lambda *tensors: keras.tree.pack_sequence_as(structure, list(tensors))


def _argument_specs(function):
    try:
        arguments, _ = function.get_concrete_function().structured_input_signature
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"preprocessing={function!r}: give a functional or Sequential model, or a function "
            "with types, such as @tf.function(input_signature=[tf.TensorSpec((None,), tf.string)])"
        ) from error
    for spec in arguments:
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank or spec.shape[0] is not None:
            raise ValueError(f"preprocessing has {spec}: its first size must be None, for rows")
    names = ["inputs"] if len(arguments) == 1 else [spec.name for spec in arguments]
    return {name: _spec(name, spec) for name, spec in zip(names, arguments, strict=True)}


def _spec(name, tensor):
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype, name)


def _names(tensors, single_name):
    """Returns names for tensors: `single_name` for one, else the names of their layers."""
    if len(tensors) == 1:
        return [single_name]
    layers = [tensor._keras_history.operation.name for tensor in tensors]
    numbered = [f"{layer}_{number}" for number, layer in enumerate(layers)]
    pairs = zip(layers, numbered, strict=True)
    return [layer if layers.count(layer) == 1 else unique for layer, unique in pairs]
