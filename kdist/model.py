"""`kdist.Model`: a `keras.Model` whose fit, evaluate and predict work under every strategy.

    with strategy.scope():
        inputs = keras.Input((28, 28, 1))
        outputs = keras.layers.Dense(10)(keras.layers.Flatten()(inputs))
        model = kdist.Model(inputs, outputs)      # functional
        model = MyModel()                         # or: class MyModel(kdist.Model)
        model = kdist.Model.of(keras_model)       # or a model that somebody else wrote
        model.compile(...)
    model.fit(train, validation_data=test)

A script that is there already needs one line: after `kdist.patch_keras()`, every Keras model
trains so.

Only training is added. A saved functional or sequential model is a plain Keras file.
"""

import functools

import keras
import tensorflow as tf

from kdist.backend import check_is_tensorflow
from kdist.training.keras_internals import Functional as KerasFunctional
from kdist.training.keras_internals import TensorFlowTrainer, recompute_constants, save_as
from kdist.training.replicated import ReplicatedTrainer
from kdist.training.together import outside_of_scope


class Model(ReplicatedTrainer, keras.Model):
    """A `keras.Model` that trains under `tf.distribute`; constructed in the same three ways.

    `kdist.Model(inputs, outputs)` is a functional model; a subclass writes `__init__` and `call`;
    `kdist.Model.of(keras_model)` takes over an existing one. Arguments, methods and errors are
    those of `keras.Model`.
    """

    def __new__(cls, *args, **kwargs):
        check_is_tensorflow("kdist.Model")
        if cls is Model and _are_functional(args, kwargs):
            cls = Functional
        return super().__new__(cls)

    def __init__(self, *args, **kwargs):
        if _are_functional(args, kwargs) and not isinstance(self, Functional):
            _derive_from_functional(type(self))
        super().__init__(*args, **kwargs)

    def save(self, *args, **kwargs):
        """Keras's. With several workers one of them can save alone, inside the scope as well."""
        return outside_of_scope(functools.partial(super().save, *args, **kwargs))

    def save_weights(self, *args, **kwargs):
        """Keras's; alone as `save`."""
        return outside_of_scope(functools.partial(super().save_weights, *args, **kwargs))

    def get_compile_config(self):
        """What a file says about the compilation; nothing, if plain Keras could not read it.

        A model that is compiled with a schedule of kdist is saved as not compiled, so that its
        file opens without kdist; after opening it, call `compile` with a schedule again.
        """
        return _readable_without_kdist(super().get_compile_config())

    @classmethod
    def of(cls, model: keras.Model) -> "Model":
        """A kdist model with the layers and weights of `model`.

        Under the strategy that `model` was made in, it is `model` itself, which from then on
        trains as kdist does; its weights, compilation and optimizer state stay. Called in the
        scope of another strategy, it is a copy whose variables live in that strategy,
        not yet compiled.

        Args:
            model: any Keras model: functional, Sequential, or a subclass.

        Raises:
            TypeError: `model` is not a `keras.Model`.
            ValueError: `model` has to be copied and cannot be: it is not built, or a subclass
                without `get_config`.
        """
        check_is_tensorflow("kdist.Model")
        if not isinstance(model, keras.Model):
            raise TypeError(f"Model.of takes a keras.Model, got {type(model).__name__}")
        if model._distribute_strategy is not _current_strategy():
            model = _copy_into_scope(model)
        if not isinstance(model, Model):
            model.__class__ = _trained_by_kdist(type(model))  # type: ignore[arg-type]
            model.train_function = model.test_function = model.predict_function = None
        return model


@functools.cache
def patch_keras():
    """Makes all Keras models of this process train as `kdist.Model` does.

    For scripts and libraries whose models derive from `keras.Model`, `keras.Sequential` or the
    functional API, and shall stay as they are. Models that exist already are included; nothing but
    training changes. There is no way back.
    """
    check_is_tensorflow("kdist.patch_keras()")
    Model.__bases__ = (keras.Model,)
    keras.Model.__bases__ = tuple(
        ReplicatedTrainer if base is TensorFlowTrainer else base for base in keras.Model.__bases__
    )


@save_as(KerasFunctional, f"{KerasFunctional.__module__}.{KerasFunctional.__name__}")
class Functional(Model, KerasFunctional):
    """What `kdist.Model(inputs, outputs)` makes, as `keras.Model(inputs, outputs)` does."""


@save_as(keras.Sequential, "keras.Sequential")
class Sequential(Model, keras.Sequential):
    """What `kdist.Model.of` makes of a `keras.Sequential`."""


@save_as(KerasFunctional, f"{KerasFunctional.__module__}.{KerasFunctional.__name__}")
class JaxFunctional(KerasFunctional):
    """What builders make where Keras computes with JAX: Keras's own model, and its trainer."""

    def get_compile_config(self):
        """As that of `Model`."""
        return _readable_without_kdist(super().get_compile_config())


def _readable_without_kdist(config):
    return {} if _names_kdist(config) else config


def _current_strategy():
    """The strategy whose scope this is, if any; as Keras notes it in a model."""
    return tf.distribute.get_strategy() if tf.distribute.has_strategy() else None


def _names_kdist(config):
    """Whether a serialised object holds one of kdist's own classes."""
    if isinstance(config, dict):
        return str(config.get("module")).startswith("kdist") or any(
            map(_names_kdist, config.values())
        )
    return isinstance(config, list | tuple) and any(map(_names_kdist, config))


def _are_functional(args, kwargs):
    """Whether a model's arguments are (inputs, outputs)."""
    return (
        len(args) == 2
        or (len(args) == 1 and "outputs" in kwargs)
        or ("inputs" in kwargs and "outputs" in kwargs)
    )


def _derive_from_functional(cls):
    """Puts the functional model where `cls` derives from `Model`, as Keras does for its own."""
    if cls is Model:
        return Functional
    if issubclass(cls, Model):
        cls.__bases__ = tuple(map(_derive_from_functional, cls.__bases__))
    return cls


@functools.cache
def _trained_by_kdist(keras_class):
    """The class that is `keras_class` in everything but training."""
    known = {KerasFunctional: Functional, keras.Sequential: Sequential}
    if keras_class in known:
        return known[keras_class]
    derived = type(keras_class.__name__, (Model, keras_class), {"__doc__": keras_class.__doc__})
    derived.__module__ = keras_class.__module__
    return save_as(keras_class, f"{keras_class.__module__}.{keras_class.__name__}")(derived)


def _copy_into_scope(model):
    if not model.built:
        raise ValueError(
            f"{model.name!r} was made outside the strategy's scope and has no variables yet; call "
            "it on a batch, or `build` it, first, or make it inside `with strategy.scope():`"
        )
    try:
        copy = type(model).from_config(model.get_config())
        if not copy.built:
            copy.build_from_config(model.get_build_config())
        copy.set_weights(model.get_weights())
        recompute_constants(copy)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"{model.name!r} was made outside the strategy's scope and cannot be copied into it "
            f"({error}). Make it inside `with strategy.scope():`, or give its class a `get_config`"
        ) from error
    return copy
