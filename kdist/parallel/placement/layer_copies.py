"""Copies of models' layers, and checks that a copy behaves like the original."""

import keras

from kdist.layout import Layout

# Methods that a model may override and that a copy of its layers would not have.
_OVERRIDES = (
    *("call", "train_step", "test_step", "predict_step"),
    *("compute_loss", "compute_metrics", "compute_own_loss"),
)

_TABLES = (keras.layers.IntegerLookup, keras.layers.StringLookup, keras.layers.TextVectorization)


def check_model(model: keras.Model):
    """Raises TypeError if the class of a model overrides a method such as `train_step`."""
    for name in _OVERRIDES:
        method = getattr(type(model), name, None)
        if method is not None and method.__module__.partition(".")[0] not in ("keras", "kdist"):
            raise TypeError(
                f"{model.name!r} has a {name} of its own, which a split model cannot keep. Move "
                "what it does into layers, losses or metrics"
            )


def copy_inputs(model: keras.Model):
    """Returns inputs with the names and structure of a functional model's; else None.

    Keras's own copies of inputs have other names, and are neither sparse nor optional.
    """
    if isinstance(model, keras.Sequential):
        return None
    return keras.tree.map_structure(_copy_input, model.input)


def _copy_input(tensor):
    layer = tensor._keras_history.operation
    return type(layer).from_config(layer.get_config()).output


def copy_operation(operation, name: str, place: int):
    """Returns a copy of an operation; if it is a layer, the copy is built.

    `name` is its name in the placement, and `place` the number of its device, which is also the
    current device for new variables. Raises ValueError if the copy has another name, or its weights
    would be created later or elsewhere.
    """
    copy = type(operation).from_config(operation.get_config())
    if copy.name != operation.name:
        raise ValueError(
            f"the copy of {operation.name!r} has the name {copy.name!r}, because "
            f"{type(operation).__name__}.get_config omits the name. Begin it with "
            "super().get_config()"
        )
    if isinstance(operation, _TABLES):
        raise ValueError(
            f"{name!r} uses a lookup table, which cannot be copied. Do this in the data pipeline"
        )
    if isinstance(operation, keras.layers.Layer) and operation.weights:
        copy.build_from_config(operation.get_build_config())
        if place and len(copy.weights) != len(operation.weights):
            raise ValueError(
                f"{name!r} creates its weights when it is called. Create them in "
                "build(input_shape), so that they are on its device"
            )
    return copy


def copy_trainable(copy: keras.layers.Layer, layer: keras.layers.Layer):
    """Sets the trainability of a layer's copy and of its weights to that of the original."""
    copy.trainable = layer.trainable
    for new, original in zip(copy.weights, layer.weights, strict=True):
        new.trainable = original.trainable


def uncompile(model: keras.Model):
    """Resets a model to the state before `compile`, since Keras compiles its copies."""
    model.compiled, model.optimizer = False, None
    model._compile_loss = model._compile_metrics = None


def check_micro_batches(model: keras.Model, layout: Layout):
    """Raises ValueError if a layer is synchronized over replicas whose micro-batches may differ."""
    if layout.data == 1 or layout.micro_batches == 1:
        return
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"{layer.name!r} is synchronized over replicas, whose micro-batches may differ in "
                "size. Remove synchronized, or micro_batches"
            )
