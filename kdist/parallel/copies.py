"""Copies of layers: with the trainability of the original, and refused where one would differ."""

import keras

from kdist.layout import Layout

# What a model may do in its own way, which a copy of its layers would not.
_OWN_WAYS = (
    *("call", "train_step", "test_step", "predict_step"),
    *("compute_loss", "compute_metrics", "compute_own_loss"),
)

_TABLES = (keras.layers.IntegerLookup, keras.layers.StringLookup, keras.layers.TextVectorization)


def check_model(model: keras.Model):
    """Refuses a model that does more than its layers do.

    Raises:
        TypeError: its class has a method of its own, such as `train_step`.
    """
    for name in _OWN_WAYS:
        method = getattr(type(model), name, None)
        if method is not None and method.__module__.partition(".")[0] not in ("keras", "kdist"):
            raise TypeError(
                f"{model.name!r} has a {name} of its own, and a split model is made of its layers "
                "alone: put what it does into layers, losses or metrics"
            )


def copied_inputs(model: keras.Model):
    """Inputs like a functional model's, in its structure, under their names; else None.

    Keras's own copies of inputs have other names, and are neither sparse nor optional.
    """
    if isinstance(model, keras.Sequential):
        return None
    return keras.tree.map_structure(_copied_input, model.input)


def _copied_input(tensor):
    layer = tensor._keras_history.operation
    return type(layer).from_config(layer.get_config()).output


def copied(operation, name: str, place: int):
    """A copy of an operation, or of a layer, which is built.

    Args:
        operation: the original.
        name: in the plan.
        place: the number of its device; this is called where that is the one for new variables.

    Raises:
        ValueError: the copy has another name, or weights that are made later or elsewhere.
    """
    copy = type(operation).from_config(operation.get_config())
    check_name(copy, operation)
    if isinstance(operation, _TABLES):
        raise ValueError(
            f"{name!r} looks things up in a table, which is not copied: do it in the data pipeline"
        )
    if isinstance(operation, keras.layers.Layer) and operation.weights:
        copy.build_from_config(operation.get_build_config())
        if place and len(copy.weights) != len(operation.weights):
            raise ValueError(
                f"{name!r} makes its weights when it is called: give it a build(input_shape) that "
                "makes them, so that they are made on its device"
            )
    return copy


def check_name(copy, operation):
    """Raises a ValueError if the copy's name is another one."""
    if copy.name != operation.name:
        raise ValueError(
            f"the copy of {operation.name!r} has the name {copy.name!r}: "
            f"{type(operation).__name__}.get_config lacks the name; begin it with "
            "super().get_config()"
        )


def give_trainability(copy: keras.layers.Layer, layer: keras.layers.Layer):
    """Has those weights trained that are trained in the original, also within the layer."""
    copy.trainable = layer.trainable
    for ours, theirs in zip(copy.weights, layer.weights, strict=True):
        ours.trainable = theirs.trainable


def leave_uncompiled(model: keras.Model):
    """As a model that `compile` has not been called on: Keras's copies are compiled by Keras."""
    model.compiled, model.optimizer = False, None
    model._compile_loss = model._compile_metrics = None


def check_micro_batches(model: keras.Model, layout: Layout):
    """Raises where a model's layers do not go with a layout's micro-batches.

    Raises:
        ValueError: a layer is synchronised over replicas.
    """
    if layout.data == 1 or layout.micro_batches == 1:
        return
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"{layer.name!r} is synchronised over replicas, whose micro-batches may differ in "
                "size: leave synchronized out, or micro_batches"
            )
