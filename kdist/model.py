"""`kdist.Model`: a `keras.Model` whose `fit`, `evaluate`, and `predict` work under every strategy.

    with strategy.scope():
        inputs = keras.Input((28, 28, 1))
        outputs = keras.layers.Dense(10)(keras.layers.Flatten()(inputs))
        model = kdist.Model(inputs, outputs)      # functional
        model = MyModel()                         # or: class MyModel(kdist.Model)
        model = kdist.Model.of(keras_model)       # or an existing model
        model.compile(...)
    model.fit(train, validation_data=test)

An existing script needs one line: after `kdist.patch_keras()`, every Keras model trains this way.

Only training changes. A saved functional or sequential model is a plain Keras file.
"""

import functools
import warnings

import keras
import tensorflow as tf

from kdist.compat.keras import Functional as KerasFunctional
from kdist.compat.keras import (
    TensorFlowTrainer,
    check_is_tensorflow,
    cloning_module,
    copy_flags,
    recompute_constants,
    save_as,
    sharing_functions,
)
from kdist.training.trainer import Trainer, readable_without_kdist

# Former attributes of models, now in `TrainingState`. `__getattr__` keeps them out of `dir(model)`,
# whose attributes Keras reads when it saves a model.
_MOVED = frozenset(
    (
        *("accumulate", "average_replicas", "clock", "data_facts", "epoch_results"),
        *("first_nonfinite_step", "global_batch_size", "is_paused", "is_tuning", "local_slots"),
        *("local_steps", "local_steps_done", "max_staleness", "position", "staleness"),
        "steps_in_epoch",
    )
)


class Model(Trainer, keras.Model):
    """A `keras.Model` that trains under `tf.distribute`.

    There are three ways to create one. `kdist.Model(inputs, outputs)` is a functional model. A
    subclass defines `__init__` and `call`. `kdist.Model.of(keras_model)` converts an existing
    model.

    Args:
        *args: as in `keras.Model`: inputs and outputs, for a functional model.
        **kwargs: as in `keras.Model`.

    Attributes:
        training_state: a `TrainingState`: progress, timing, and settings of `compile`.

    Raises:
        RuntimeError: Keras's backend is not TensorFlow.

    Example:

        strategy = kdist.create_strategy("mirrored")
        with strategy.scope():
            inputs = keras.Input((784,))
            model = kdist.Model(inputs, keras.layers.Dense(10, activation="softmax")(inputs))
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y)
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

    def __getattr__(self, name):
        if name not in _MOVED:
            return object.__getattribute__(self, name)  # raises the original error
        warnings.warn(
            f"model.{name} is deprecated; use model.training_state.{name}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self.training_state, name)

    def __reduce__(self):
        # The file in a pickle names Keras's own class.
        return Model._unpickle_model, super().__reduce__()[1]

    @classmethod
    def _unpickle_model(cls, file):
        return Model.of(super()._unpickle_model(file))

    @classmethod
    def of(cls, model: keras.Model) -> "Model":
        """Converts a Keras model to a kdist model with the same layers and weights.

        Under the strategy in which `model` was created, the result is `model` itself, with its
        weights, compilation, and optimizer state. In the scope of another strategy, the result is a
        copy whose variables belong to that strategy, and which is not compiled.

        Args:
            model: any Keras model: functional, Sequential, or a subclass.

        Returns:
            A `kdist.Model`.

        Raises:
            TypeError: `model` is not a `keras.Model`.
            ValueError: `model` must be copied and cannot be: it is not built, or it is a subclass
                without `get_config`.

        Example:

            with strategy.scope():
                model = kdist.Model.of(keras.applications.MobileNetV2(weights=None))
        """
        check_is_tensorflow("kdist.Model")
        if not isinstance(model, keras.Model):
            raise TypeError(f"Model.of expects a keras.Model, got {type(model).__name__}")
        if model._distribute_strategy is not _current_strategy():
            model = _copy_into_scope(model)
        if not isinstance(model, Model):
            model.__class__ = _trained_by_kdist(type(model))  # type: ignore[arg-type]
        return model


@functools.cache
def patch_keras():
    """Makes all Keras models of this process train as `kdist.Model` does.

    For scripts and libraries whose models derive from `keras.Model`, `keras.Sequential`, or the
    functional API. It also applies to existing models, changes only training, and cannot be undone.

    Raises:
        RuntimeError: Keras's backend is not TensorFlow.

    Example:

        kdist.patch_keras()
        with kdist.create_strategy("mirrored").scope():
            model = keras.Sequential([keras.layers.Dense(10)])
            model.compile("sgd", "mse")
        model.fit(x, y)
    """
    check_is_tensorflow("kdist.patch_keras()")
    Model.__bases__ = (keras.Model,)
    keras.Model.__bases__ = tuple(
        Trainer if base is TensorFlowTrainer else base for base in keras.Model.__bases__
    )


@save_as(KerasFunctional)
class Functional(Model, KerasFunctional):
    """Functional model that `kdist.Model(inputs, outputs)` creates."""


@save_as(keras.Sequential)
class Sequential(Model, keras.Sequential):
    """Sequential model that `kdist.Model.of` creates from a `keras.Sequential`."""


@save_as(KerasFunctional)
class JaxFunctional(KerasFunctional):
    """Functional model that builders create on the JAX backend, with Keras's own trainer."""

    def get_compile_config(self):
        """Returns the compile configuration for a file, as `Model.get_compile_config` does."""
        return readable_without_kdist(super().get_compile_config())


def _clones_train_alike(name):
    """Lets `keras.models.clone_model` return a kdist model if it copies one."""
    keras_function = getattr(cloning_module, name)

    @functools.wraps(keras_function)
    def clone(model, *args, **kwargs):
        if getattr(model, "is_split", False):
            raise TypeError(
                f"{model.name!r} is split, and its layers cannot be cloned. Clone the plain model: "
                "kdist.parallel.merged(model)"
            )
        copy = keras_function(model, *args, **kwargs)
        return Model.of(copy) if isinstance(model, Model) else copy

    setattr(cloning_module, name, clone)


for _name in ("_clone_sequential_model", "_clone_functional_model"):
    _clones_train_alike(_name)


def _current_strategy():
    """Returns the strategy of the current scope, or None, as Keras stores it in a model."""
    return tf.distribute.get_strategy() if tf.distribute.has_strategy() else None


def _are_functional(args, kwargs):
    """Returns True if a model's arguments are (inputs, outputs)."""
    return (
        len(args) == 2
        or (len(args) == 1 and "outputs" in kwargs)
        or ("inputs" in kwargs and "outputs" in kwargs)
    )


def _derive_from_functional(cls):
    """Replaces the base `Model` of `cls` by the functional model, as Keras does for its own."""
    if cls is Model:
        return Functional
    if issubclass(cls, Model):
        cls.__bases__ = tuple(map(_derive_from_functional, cls.__bases__))
    return cls


@functools.cache
def _trained_by_kdist(keras_class):
    """Returns a class like `keras_class` that trains as `kdist.Model` does."""
    known = {KerasFunctional: Functional, keras.Sequential: Sequential}
    if keras_class in known:
        return known[keras_class]
    # The class comes first, so that its own `train_step`, `fit`, and other methods are kept.
    derived = type(keras_class.__name__, (keras_class, Model), {"__doc__": keras_class.__doc__})
    derived.__module__ = keras_class.__module__
    return save_as(keras_class)(derived)


@sharing_functions()
def _copy_into_scope(model):
    if not model.built:
        raise ValueError(
            f"{model.name!r} was created outside the strategy's scope and has no variables yet; "
            "call it on a batch or `build` it first, or create it in `with strategy.scope():`"
        )
    try:
        copy = type(model).from_config(model.get_config())
        if not copy.built:
            copy.build_from_config(model.get_build_config())
        copy_flags(copy._flatten_layers(), model._flatten_layers())
        for variable, original in zip(copy.variables, model.variables, strict=True):
            variable.assign(original.numpy())
            variable.trainable = original.trainable
        recompute_constants(copy)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"{model.name!r} was created outside the strategy's scope and cannot be copied into it "
            f"({error}). Create it in `with strategy.scope():`, or define `get_config` in its class"
        ) from error
    return copy
