"""Models whose operations are placed on several devices.

    strategy = kdist.create_strategy(kdist.Layout(data=2, branch=2))
    with strategy.scope():
        model = kdist.parallel.split(model, {"branch_b.*": kdist.parallel.device(1)})
        model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(train)

The variables, slots, forward and backward operations and updates of a layer are on its device. In
files the model is the plain one. `SplitModel.export` exports the merged model, so that serving does
not depend on the devices that the model was trained on.
"""

import functools
import warnings

import keras
import tensorflow as tf

from kdist.compat.keras import (
    copy_flags,
    recompute_constants,
    save_as,
    sharing_functions,
)
from kdist.model import Model
from kdist.parallel.device_groups import GroupStrategy
from kdist.parallel.pipeline import step
from kdist.parallel.pipeline.micro_batches import check_micro_batches
from kdist.parallel.placement import (
    Placement,
    divisions_by_name,
    functional_graph,
    is_nested,
    layer_placement,
    nodes_of,
    operations_by_name,
    places_by_name,
)
from kdist.parallel.tensor.activations import call_divided, divided_outputs
from kdist.parallel.tensor.divisibility import check_division, check_optimizer
from kdist.parallel.tensor.layers import shard_layer
from kdist.parallel.tensor.shards import (
    ShardedLayer,
    keep_plain_slots_in_files,
    plain_variables,
    plain_weights,
    set_plain_weights,
)
from kdist.public_names import renamed_argument
from kdist.training.replica import step as steps
from kdist.training.replica.accumulation import optimizers_of
from kdist.training.scopes import outside_any_scope
from kdist.training.trainer import logs_are_metrics

# Methods that a model may override and that a copy of its layers would not have.
_OVERRIDES = (
    *("call", "train_step", "test_step", "predict_step"),
    *("compute_loss", "compute_metrics", "compute_own_loss"),
)

_TABLES = (keras.layers.IntegerLookup, keras.layers.StringLookup, keras.layers.TextVectorization)


@renamed_argument("plan", "placement")
def split(model: keras.Model, placement: Placement) -> "SplitModel":
    """Returns a copy of `model`, with its weights, whose layers are placed on several devices.

    Call it in the scope of a strategy that `kdist.create_strategy` created for a `kdist.Layout`.
    The copy is not compiled, even if `model` is.

    Args:
        model: built functional or Sequential model. Nested models are split as well.
        placement: pattern on names of layers -> `stage(n)` or `device(n)`, or `column()`, `row()`
            or `heads()` for layers whose weights are divided. A pattern may also match variables
            and name the axis to divide, such as `(None, "model")`. See
            `kdist.parallel.placement`.

    Returns:
        A `SplitModel`.

    Raises:
        ValueError: if the strategy has no device groups, or the placement does not fit the model
            or the layout.
        TypeError: if the model is neither functional nor Sequential, is already split, or overrides
            a method such as `train_step` or `call`, or a layer cannot be divided in this way.

    Example:
        layout = kdist.Layout(pipeline=2, micro_batches=4)
        with kdist.create_strategy(layout).scope():
            model = kdist.parallel.split(plain, {"block[34].*|head": kdist.parallel.stage(1)})
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y)
    """
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, GroupStrategy):
        raise ValueError(
            "split needs the scope of a strategy with groups of devices: "
            "`with kdist.create_strategy(kdist.Layout(pipeline=2)).scope():`"
        )
    for each in (model, *filter(is_nested, operations_by_name(model).values())):
        _check_model(each)
    _check_no_common_weights(model)
    placement = layer_placement(model, placement)
    places = places_by_name(model, placement, strategy.layout)
    divisions = divisions_by_name(model, placement, strategy.layout)
    for name, operation in operations_by_name(model).items():
        if name in divisions:
            check_division(name, operation, divisions[name], strategy.layout.tensor)
    check_micro_batches(model, strategy.layout)
    copy = Model.of(_copy(model, "", places, divisions, strategy))
    copy.__class__ = _split_class(type(copy))  # type: ignore[arg-type]
    copy.places, copy.divisions = places, divisions
    _copy_state(copy, model)
    return copy


def _copy(model, prefix, places, divisions, strategy):
    """Returns a copy of a model that creates and calls its layers on their devices."""
    graph, width = functional_graph(model), strategy.layout.tensor
    here = {each.name: places.get(prefix + each.name) for each in graph.operations}
    how = {name: divisions[prefix + name] for name in here if prefix + name in divisions}
    stages = {name: place // width for name, place in here.items() if place is not None}
    divided = divided_outputs(list(nodes_of(graph)), graph.outputs, how, stages)

    def copy_operation(operation):
        name = prefix + operation.name
        if is_nested(operation):
            return _copy(operation, f"{name}/", places, divisions, strategy)
        with strategy.on(places[name]):
            if name in divisions:
                return shard_layer(operation, divisions[name], strategy, places[name])
            return _copy_built(operation, name, places[name])

    inputs = _copy_inputs(model)
    copy = keras.models.clone_model(model, inputs, clone_function=copy_operation)
    _uncompile(copy)
    graph = functional_graph(copy)
    graph.__class__ = _placed_class(type(graph))
    graph.calls_on = functools.partial(_call_on, strategy, here, divided)
    return copy


def _call_on(strategy, here, divided, name, operation, *args, **kwargs):
    """Calls an operation on its device, by `here`; `divided` names those with divided outputs."""
    if here.get(name) is None:
        return operation(*args, **kwargs)
    first = here[name]
    with strategy.on(first):
        return call_divided(
            operation, lambda number: strategy.on(first + number), name in divided, args, kwargs
        )


@functools.cache
def _placed_class(functional_class):
    """Returns a subclass of `functional_class` that calls its operations on their devices."""

    class Placed(functional_class):
        is_placed = True

        def _run_through_graph(self, inputs, operation_fn=lambda op: op, call_fn=None):
            if call_fn is not None:  # symbolic call, which computes nothing
                return super()._run_through_graph(inputs, operation_fn, call_fn)
            return super()._run_through_graph(
                inputs,
                lambda op: functools.partial(self.calls_on, op.name, operation_fn(op)),
            )

    return _named_as(functional_class, Placed)


class SplitModel(Model):
    """A model split over devices. Created by `kdist.parallel.split`; trains like any Keras model.

    Attributes:
        places: operation -> number of its (first) device within a replica's group.
        divisions: layer whose weights are divided -> "column", "row" or "heads".

    Example:
        model = kdist.parallel.split(plain, {"head": kdist.parallel.device(1)})
        model.places["head"]      # 1
    """

    is_split = True

    places: dict[str, int]
    divisions: dict[str, str]

    def get_weights(self):
        """Returns the weights of the plain model: parts of divided weights are concatenated."""
        return [division.whole() for division in plain_weights(self)]

    def set_weights(self, weights):
        """Sets the weights to those of a plain model."""
        set_plain_weights(self, weights)

    def compile(self, *args, jit_compile="auto", run_eagerly=False, **kwargs):
        """Configures the model for training, like `kdist.Model.compile`.

        Raises:
            ValueError: for `jit_compile=True`, because XLA compiles for one device; for
                `run_eagerly=True`; or if weights are divided and the optimizer needs whole ones.
        """
        if jit_compile is True:
            raise ValueError(
                "XLA compiles for one device. Do not pass jit_compile to a split model"
            )
        if run_eagerly:
            raise ValueError(
                "run_eagerly=True would put the whole backward pass of a split model on one "
                "device. Remove it, or debug the model before it is split"
            )
        super().compile(*args, jit_compile=False, **kwargs)
        if self.divisions and self.optimizer is not None:
            check_optimizer(optimizers_of(self), self.divisions)
            keep_plain_slots_in_files(self, optimizers_of(self))

    def export(self, *args, **kwargs):
        """Exports the plain model (see `kdist.parallel.merged`) by `keras.Model.export`.

        The result names no device and runs on any single machine.
        """
        plain = merged(self, "CPU:0")  # it may be too large for one accelerator
        return outside_any_scope(lambda: plain.export(*args, **kwargs))

    @logs_are_metrics
    def train_step(self, data):
        """Trains on one batch like Keras, except for the gradients.

        A tape would compute all gradients on the device of the step. `tf.gradients` colocates each
        with its forward operation. Micro-batches go through a pipeline.
        """
        x, y, sample_weight = data = keras.utils.unpack_x_y_sample_weight(data)
        is_pipelined = self.distribute_strategy.layout.micro_batches > 1
        run = functools.partial(step.forward_and_backward, self) if is_pipelined else self._passes
        loss, y_pred, gradients = run(data)
        # Counted on the device of the inputs. Counting elsewhere would copy all inputs there.
        rows = tf.shape(keras.tree.flatten(x)[0])[0]
        with self.distribute_strategy.on(self.output_place):
            self._loss_tracker.update_state(loss, sample_weight=rows)
        if gradients:
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        with self.distribute_strategy.on(self.output_place):
            return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def _passes(self, data):
        """Returns loss, outputs and gradients like `forward_and_backward`, for all rows at once."""
        x, y, sample_weight = data
        y_pred = self(x, training=True)
        with self.distribute_strategy.on(self.output_place):
            loss = self._compute_loss(x, y, y_pred, sample_weight, training=True)
            scaled = self.optimizer.scale_loss(loss)
        local = self.distribute_strategy.local
        copies = [local(variable.value) for variable in self.trainable_weights]
        return loss, y_pred, tf.gradients(scaled, copies)

    @property
    def losses(self):
        """Losses that layers have added; in a pipeline, those of the current micro-batch."""
        added = getattr(steps.current(), "added_losses", None)
        return super().losses if added is None else added

    @property
    def output_place(self) -> int:
        """Number of the device of the (last) output."""
        return list(self.places.values())[-1]


def merged(model: keras.Model, device: str | None = None) -> keras.Model:
    """Returns a plain Keras model with the trained weights of a split model.

    The model is not compiled. Names, configuration, dtype policies, trainability, weights and seed
    generator states are those of the split model. Later training of one model does not change the
    other. The model belongs to no strategy, even if this is called in the scope of one.

    Args:
        model: a model that `kdist.parallel.split` returned. Custom layers keep their classes.
        device: device of the weights, such as "CPU:0" for a model that fits on no accelerator.
            Defaults to TensorFlow's device for new variables.

    Returns:
        A functional or Sequential `keras.Model`.

    Raises:
        TypeError: if the model is not split.

    Example:
        plain = kdist.parallel.merged(model)
        plain.predict(x)
    """
    if not getattr(model, "is_split", False):
        raise TypeError(
            f"{model.name!r} is not split. merged accepts only models that kdist.parallel.split "
            "returned"
        )
    return outside_any_scope(lambda: _merged(model, device))


@sharing_functions()
def _merged(model, device):
    kinds = {type(each) for each in operations_by_name(model).values() if not is_nested(each)}
    custom = {kind.__name__: kind for kind in kinds if not _is_keras(kind)}
    with tf.device(device):
        plain = _plain_class(type(model)).from_config(model.get_config(), custom_objects=custom)
        _copy_state(plain, model)
    return plain


def _plain_class(split_class):
    """Returns the class that was split, without the classes that kdist added to it."""
    kinds = (kind for kind in split_class.__mro__ if issubclass(kind, keras.Model))
    return next(k for k in kinds if not issubclass(k, Model) and not vars(k).get("is_placed"))


@functools.cache
def _split_class(model_class):
    class Split(SplitModel, model_class):
        pass

    return _named_as(model_class, Split)


def _named_as(keras_class, derived):
    """Returns `derived` under the name of the class that it extends, for summaries and files."""
    derived.__name__, derived.__qualname__ = keras_class.__name__, keras_class.__qualname__
    derived.__module__, derived.__doc__ = keras_class.__module__, keras_class.__doc__
    return save_as(keras_class)(derived)


def _check_model(model: keras.Model):
    """Raises TypeError if a model is split, or its class overrides a method like `train_step`."""
    if getattr(functional_graph(model), "is_placed", False):
        raise TypeError(
            f"{model.name!r} is already split. Split the plain model: kdist.parallel.merged(model)"
        )
    for name in _OVERRIDES:
        method = getattr(type(model), name, None)
        if method is not None and method.__module__.partition(".")[0] not in ("keras", "kdist"):
            raise TypeError(
                f"{model.name!r} has a {name} of its own, which a split model cannot keep. Move "
                "what it does into layers, losses or metrics"
            )


def _check_no_common_weights(model: keras.Model):
    """Raises ValueError if two layers, or one layer in two nested models, have the same weight."""
    owners: dict[int, str] = {}
    for name, operation in operations_by_name(model).items():
        if is_nested(operation):
            continue
        for weight in getattr(operation, "weights", ()):
            if (owner := owners.setdefault(id(weight), name)) != name:
                raise ValueError(
                    f"{owner!r} and {name!r} have the same weight {weight.path}, and their copies "
                    "would have one each. Use one layer of one model for both: "
                    "keras.layers.ReversibleEmbedding is an embedding and its output layer"
                )


def _copy_inputs(model: keras.Model):
    """Returns inputs with the names and structure of a functional model's; else None.

    Keras's own copies of inputs have other names, and are neither sparse nor optional.
    """
    if isinstance(model, keras.Sequential):
        return None
    return keras.tree.map_structure(_copy_input, model.input)


def _copy_input(tensor):
    layer = tensor._keras_history.operation
    return type(layer).from_config(layer.get_config()).output


@sharing_functions()
def _copy_built(operation, name: str, place: int):
    """Returns a copy of an operation; if it is a layer, the copy is built.

    `name` is its name in the placement, and `place` the number of its device, which is also the
    current device for new variables. Raises ValueError if it cannot be copied by its configuration,
    or its weights would be created later or elsewhere.
    """
    try:
        copy = type(operation).from_config(operation.get_config())
    except NotImplementedError as error:
        raise _not_copied(name, operation, "it has arguments and no get_config") from error
    except (TypeError, ValueError) as error:
        if _is_keras(type(operation)):  # the reason is a layer inside
            raise
        raise _not_copied(name, operation, error.__context__ or error) from error
    if copy.name != operation.name:
        raise _not_copied(name, operation, f"its copy has the name {copy.name!r}")
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


def _not_copied(name: str, operation, reason) -> ValueError:
    """Returns the error for an operation that its configuration does not describe."""
    kind = type(operation).__name__
    return ValueError(
        f"{name!r} cannot be copied: {reason}. Accept **kwargs in {kind}.__init__, pass them to "
        f"super().__init__(**kwargs), and let {kind}.get_config return all other arguments in "
        "addition to super().get_config()"
    )


def _is_keras(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "keras"


def _copy_state(copy: keras.Model, model: keras.Model):
    """Sets what a model's configuration lacks in a copy: variables, trainability, dtype policies.

    One of the models may be split. Raises ValueError if a layer's copy has other variables.
    """
    originals = {"": model, **operations_by_name(model)}
    for name, operation in {"": copy, **operations_by_name(copy)}.items():
        if not isinstance(operation, keras.layers.Layer):
            continue
        pair = (operation, originals[name])
        copy_flags(*map(_with_inner_layers, pair))
        if not is_nested(operation):
            _copy_variables(name, *pair)
    recompute_constants(copy)


def _with_inner_layers(layer):
    """Returns a layer and the layers in it; only itself if it is divided, or a nested model."""
    is_alone = is_nested(layer) or isinstance(layer, ShardedLayer)
    return [layer] if is_alone else layer._flatten_layers()


def _copy_variables(name, copy, layer):
    """Sets values and trainability of the variables of a layer's copy, including seed states."""
    ours, originals = list(plain_variables(copy)), list(plain_variables(layer))
    if len(ours) != len(originals):
        reason = f"it has {len(originals)} variables, and its copy has {len(ours)}"
        raise _not_copied(name, layer, reason)
    for variable, original in zip(ours, originals, strict=True):
        variable.assign(original.whole())
        for piece in variable.pieces:
            piece.trainable = original.pieces[0].trainable


def _uncompile(model: keras.Model):
    """Resets a model to the state before `compile`, since Keras compiles its copies."""
    model.compiled, model.optimizer = False, None
    model._compile_loss = model._compile_metrics = None
