"""Models whose operations are on several devices.

    strategy = kdist.create_strategy(kdist.Layout(data=2, branch=2))
    with strategy.scope():
        model = kdist.parallel.split(model, {"branch_b.*": kdist.parallel.device(1)})
        model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(train)

Variables, slots, forward and backward operations and updates of a layer are on its device. On disk
the model is the plain one.
"""

import functools
import warnings

import keras
import tensorflow as tf

from kdist.model import Model
from kdist.parallel import copies, pipeline
from kdist.parallel import tensor as tensor_parallel
from kdist.parallel.groups import GroupStrategy
from kdist.parallel.joining import joined
from kdist.parallel.split_plan import (
    SplitPlan,
    divisions_by_name,
    functional_graph,
    is_nested,
    nodes_of,
    operations_by_name,
    places_by_name,
)
from kdist.parallel.variable_patterns import on_layers
from kdist.training import step as steps
from kdist.training.accumulation import optimizers_of
from kdist.training.keras_internals import recompute_constants, save_as, saved_name
from kdist.training.replicated import logs_are_metrics
from kdist.training.together import outside_of_strategy


def split(model: keras.Model, plan: SplitPlan) -> "SplitModel":
    """A copy of `model`, with its weights, whose layers are on the devices that `plan` says.

    It is not compiled, also where `model` is.

    To be called in the scope of a strategy that `create_strategy` made of a `Layout`.

    Args:
        model: functional or Sequential, built; nested ones are split as well.
        plan: a name's pattern -> `stage(n)`, `device(n)`, or `column()`, `row()`, `heads()` for
            layers whose weights are divided, or a variable's pattern -> its axes, such as
            `(None, "model")`; see `kdist.parallel.split_plan`.

    Raises:
        ValueError: another strategy, or a plan that does not fit the model or the layout.
        TypeError: a model of another kind or with a `train_step` or `call` of its own, or a layer
            that cannot be divided so.
    """
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, GroupStrategy):
        raise ValueError(
            "a model is split in the scope of a strategy of groups of devices: "
            "`with kdist.create_strategy(kdist.Layout(pipeline=2)).scope():`"
        )
    plan = on_layers(model, plan)
    places = places_by_name(model, plan, strategy.layout)
    divisions = divisions_by_name(model, plan, strategy.layout)
    for name, operation in operations_by_name(model).items():
        if name in divisions:
            how = divisions[name]
            tensor_parallel.check_division(name, operation, how, strategy.layout.tensor)
    copies.check_micro_batches(model, strategy.layout)
    copy = Model.of(_copy(model, "", places, divisions, strategy))
    copy.__class__ = _split_class(type(copy))  # type: ignore[arg-type]
    copy.places, copy.divisions = places, divisions
    copy.set_weights(model.get_weights())
    recompute_constants(copy)
    return copy


def _copy(model, prefix, places, divisions, strategy):
    """A copy of a model's layers, each on its device, in models that call them there."""
    copies.check_model(model)
    graph, width = functional_graph(model), strategy.layout.tensor
    here = {each.name: places.get(prefix + each.name) for each in graph.operations}
    how = {name: divisions[prefix + name] for name in here if prefix + name in divisions}
    stages = {name: place // width for name, place in here.items() if place is not None}
    stay = tensor_parallel.stay_divided(list(nodes_of(graph)), graph.outputs, how, stages)

    whole = []

    def copied(operation):
        name = prefix + operation.name
        if is_nested(operation):
            return _copy(operation, f"{name}/", places, divisions, strategy)
        with strategy.on(places[name]):
            if name in divisions:
                return tensor_parallel.sharded(
                    operation, divisions[name], strategy, places[name], operation.name in stay
                )
            copy = copies.copied(operation, name, places[name])
        if isinstance(operation, keras.layers.Layer):
            whole.append((copy, operation))
        return copy

    inputs = copies.copied_inputs(model)
    copy = keras.models.clone_model(model, inputs, clone_function=copied)
    copies.leave_uncompiled(copy)
    for layer, original in whole:
        copies.give_trainability(layer, original)
    graph = functional_graph(copy)
    graph.__class__ = _placed_class(type(graph))
    graph.calls_on = functools.partial(_call_on, strategy, here, stay)
    return copy


def _call_on(strategy, here, stay, name, operation, *args, **kwargs):
    """Calls the operation of a name on its device.

    Args:
        here: name -> number of the device.
        stay: the names of those whose output stays divided.
    """
    if here.get(name) is None:
        return operation(*args, **kwargs)
    first = here[name]
    with strategy.on(first):
        return tensor_parallel.call_divided(
            operation, lambda number: strategy.on(first + number), name in stay, args, kwargs
        )


@functools.cache
def _placed_class(functional_class):
    """The class that is `functional_class`, but calls its operations on their devices."""

    class Placed(functional_class):
        is_placed = True

        def _run_through_graph(self, inputs, operation_fn=lambda op: op, call_fn=None):
            if call_fn is not None:  # symbolic: nothing is computed
                return super()._run_through_graph(inputs, operation_fn, call_fn)
            return super()._run_through_graph(
                inputs,
                lambda op: functools.partial(self.calls_on, op.name, operation_fn(op)),
            )

    return _named_as(functional_class, Placed)


class SplitModel(Model):
    """A model that `split` made; trains as any other.

    Attributes:
        places: operation -> number of its (first) device within a replica's group.
        divisions: layer whose weights are divided -> "column", "row" or "heads".
    """

    is_split = True

    places: dict[str, int]
    divisions: dict[str, str]

    def get_weights(self):
        """Those of the plain model: what is divided is joined."""
        return tensor_parallel.get_plain_weights(self)

    def set_weights(self, weights):
        """Those of the plain model."""
        tensor_parallel.set_plain_weights(self, weights)

    def compile(self, *args, jit_compile="auto", run_eagerly=False, **kwargs):
        """As `kdist.Model.compile`.

        Raises:
            ValueError: `jit_compile=True`: XLA compiles for one device; or `run_eagerly=True`; or
                weights are divided, and the optimizer looks at whole ones.
        """
        if jit_compile is True:
            raise ValueError("XLA compiles for one device: leave jit_compile out of a split model")
        if run_eagerly:
            raise ValueError(
                "run_eagerly=True would put the whole backward pass of a split model on one "
                "device; leave it out, or debug the model before it is split"
            )
        super().compile(*args, jit_compile=False, **kwargs)
        if self.divisions and self.optimizer is not None:
            tensor_parallel.check_optimizer(optimizers_of(self), self.divisions)
            tensor_parallel.keep_plain_slots_in_files(self, optimizers_of(self))

    def export(self, *args, **kwargs):
        """Keras's, of the plain model (see `kdist.parallel.joined`).

        What it writes names no device, and runs on any one machine, wherever this model is.
        """
        plain = joined(self, "CPU:0")  # it may be too large for one accelerator
        return outside_of_strategy(lambda: plain.export(*args, **kwargs))

    @logs_are_metrics
    def train_step(self, data):
        """Keras's, but for the gradients.

        A tape would compute them all on the device on which the step runs; `tf.gradients` puts
        each beside its forward operation. Micro-batches go through a pipeline.
        """
        x, y, sample_weight = data = keras.utils.unpack_x_y_sample_weight(data)
        by_parts = self.distribute_strategy.layout.micro_batches > 1
        passes = functools.partial(pipeline.passes, self) if by_parts else self._passes
        loss, y_pred, gradients = passes(data)
        # Where the rows are: elsewhere, all of them would be sent there to be counted.
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
        """As `pipeline.passes`, of all rows at once."""
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
        """As Keras's; while a micro-batch's loss is computed, what was added to that."""
        added = getattr(steps.current(), "added_losses", None)
        return super().losses if added is None else added

    @property
    def output_place(self) -> int:
        """The number of the device that the (last) output is on."""
        return list(self.places.values())[-1]


@functools.cache
def _split_class(model_class):
    class Split(SplitModel, model_class):
        pass

    return _named_as(model_class, Split)


def _named_as(keras_class, derived):
    """`derived` under the name of the class that it extends, in programs and in files."""
    derived.__name__, derived.__qualname__ = keras_class.__name__, keras_class.__qualname__
    derived.__module__, derived.__doc__ = keras_class.__module__, keras_class.__doc__
    return save_as(keras_class, saved_name(keras_class))(derived)
