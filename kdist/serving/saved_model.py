"""A model as a SavedModel with one signature, `serving_default`, of named tensors."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.parallel.split_plan import functional_graph
from kdist.serving.signature import SERVING_DEFAULT, read_signatures

_KEEP_DEVICES = tf.saved_model.SaveOptions(
    experimental_variable_policy=tf.saved_model.experimental.VariablePolicy.SAVE_VARIABLE_DEVICES
)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """What a signature takes, computes and gives.

    Attributes:
        inputs: name -> spec, of shape (None, …).
        outputs: the same.
        predict: a function of tensors in the order of `inputs`; gives {output: tensor}.
        parts: models whose weights it uses.
    """

    inputs: Mapping[str, tf.TensorSpec]
    outputs: Mapping[str, tf.TensorSpec]
    predict: Callable[..., dict[str, tf.Tensor]]
    parts: tuple[keras.Model, ...]


def endpoint_of(model: keras.Model, preprocessing: Any = None) -> Endpoint:
    """The signature of a model, one that preprocessing is part of.

    One input is called `inputs`, one output `outputs`; several are called after the layers that
    give them, or after the arguments of a function.

    Args:
        model: functional or Sequential, built.
        preprocessing: a model of the same kind, or a `tf.function` with an `input_signature`.

    Raises:
        ValueError: preprocessing of another kind, or that does not take rows.
    """
    names = _names(model.outputs, "outputs")
    before: Callable[..., Any]
    parts: tuple[keras.Model, ...] = (model,)
    if preprocessing is None:
        inputs, before = _inputs_of(model), _in_structure(model)
    elif isinstance(preprocessing, keras.Model):
        inputs, parts = _inputs_of(preprocessing), (model, preprocessing)
        packed = _in_structure(preprocessing)

        def before(*tensors):
            return preprocessing(packed(*tensors), training=False)
    else:
        inputs, before = _arguments_of(preprocessing), preprocessing

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
    """Writes it, once it has computed the examples.

    Args:
        endpoint: what.
        path: a new directory.
        examples: input -> rows; may be empty.
        keep_devices: variables that are loaded are on the devices where they are now. Operations
            are on those that the model has put them on, in any case.

    Raises:
        ValueError: the examples cannot be computed, or the server would not load it, because it
            calls Python.
    """
    archive = keras.export.ExportArchive()
    # It finds the variables that are used. Tracked as such, models would have theirs written, and
    # loaded, a second time; within a module, they have their tables alone.
    parts = tf.Module()
    parts.parts = endpoint.parts
    archive.track(parts)
    specs = list(endpoint.inputs.values())
    traced = archive.add_endpoint(SERVING_DEFAULT, endpoint.predict, input_signature=specs)
    if examples:
        _check_computes(
            traced.get_concrete_function(),
            [tf.constant(examples[name]) for name in endpoint.inputs],
        )
    options = _KEEP_DEVICES if keep_devices else None
    archive.write_out(os.fspath(path), options=options, verbose=False)
    read_signatures(path)


def _check_computes(function, tensors):
    """A server that cannot compute a request to warm up with does not load the model."""
    try:
        function(*tensors)
    except tf.errors.OpError as error:
        reason = str(error.message).strip().splitlines()[0]
        raise ValueError(
            f"the model cannot compute the rows to warm up with: {reason}. Give others as "
            "examples=…, or examples={} for no warm-up"
        ) from error


def _inputs_of(model):
    names = _names(model.inputs, "inputs")
    return {name: _spec(name, tensor) for name, tensor in zip(names, model.inputs, strict=True)}


def _in_structure(model):
    """A function of a model's inputs that gives them as the model was called when it was built."""
    structure = functional_graph(model)._inputs_struct
    return lambda *tensors: keras.tree.pack_sequence_as(structure, list(tensors))


def _arguments_of(function):
    try:
        arguments, _ = function.get_concrete_function().structured_input_signature
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"preprocessing={function!r}: a functional or Sequential model, or a function with its "
            "types, as @tf.function(input_signature=[tf.TensorSpec((None,), tf.string)]) gives"
        ) from error
    for spec in arguments:
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank or spec.shape[0] is not None:
            raise ValueError(f"preprocessing takes {spec}: the first size is of rows, so None")
    names = ["inputs"] if len(arguments) == 1 else [spec.name for spec in arguments]
    return {name: _spec(name, spec) for name, spec in zip(names, arguments, strict=True)}


def _spec(name, tensor):
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype, name)


def _names(tensors, alone):
    """One is called `alone`; several are called after the layers that give them."""
    if len(tensors) == 1:
        return [alone]
    layers = [tensor._keras_history.operation.name for tensor in tensors]
    numbered = [f"{layer}_{number}" for number, layer in enumerate(layers)]
    pairs = zip(layers, numbered, strict=True)
    return [layer if layers.count(layer) == 1 else other for layer, other in pairs]
