"""Creation of a model's variables before its first step.

Replicas and micro-steps cannot create variables. Keras builds a model by a symbolic `call`. A GAN
has none, and it does not reach the optimizers and layers that only `train_step` uses. Therefore
`build` can also trace the step itself in a graph that is never run. Variables that the step creates
are created outside this graph, in the scope of the model's strategy.
"""

import contextlib
import functools
import logging
import pathlib
import traceback
import warnings

import keras
import tensorflow as tf

from kdist.compat.keras import is_default
from kdist.compat.tensorflow import first_replica
from kdist.training.groups import inputs
from kdist.training.replica import step as steps
from kdist.training.replica.accumulation import optimizers_of
from kdist.training.replica.row_shares import BatchDivision
from kdist.training.scopes import is_multi_worker

_logger = logging.getLogger(__name__)

# Folders of code that is not the user's program.
_LIBRARIES = tuple(
    str(folder)
    for folder in (
        pathlib.Path(keras.__file__).parent,
        pathlib.Path(tf.__file__).parent,
        pathlib.Path(__file__).parents[1],
    )
)


def build(model, step_name, element_spec, worker_slice=None, must_succeed=True):
    """Creates the variables that a step needs: of layers, losses, metrics, and optimizers.

    Keras's own step is built by Keras's symbolic `call`, or by a dry run if Keras cannot trace
    `call`. A custom step is built by a dry run, or by a symbolic `call` if the dry run fails.

    Args:
        model: a `kdist.Model`.
        step_name: "train_step", "test_step", or "predict_step".
        element_spec: type specifications of a batch.
        worker_slice: the `WorkerSlice` that a batch is; None if it is whole. Defaults to None.
        must_succeed: whether the variables must exist before the step also if there is only one
            replica, which can create them. Defaults to True.

    Raises:
        Exception: the error of the step itself, with a note that names the line of the program.
    """
    strategy = model._distribute_strategy
    is_keras_step = getattr(getattr(type(model), step_name), "logs_are_metrics", False)
    predicts = step_name == "predict_step"
    done = step_name, *([] if predicts else map(id, optimizers_of(model)))
    if done in model.training_state.dry_runs or (predicts and _has_all_layers(model)):
        return
    ways = [
        lambda: _symbolic_build(model, step_name, element_spec),
        lambda: _dry_run(model, step_name, element_spec, worker_slice),
    ]
    if predicts:
        del ways[0]  # it would also build what `compile` adds
    elif not is_keras_step:
        ways.reverse()
    replicas = model.distribute_strategy.num_replicas_in_sync
    micro_steps = model.training_state.accumulate
    if not is_keras_step and replicas > 1 and micro_steps == 1 and worker_slice is None:
        ways.insert(1, lambda: _dry_run(model, step_name, element_spec, is_repeated=True))
    with strategy.scope() if strategy else contextlib.nullcontext():
        errors = _try_in_order(ways)
    if len(errors) == len(ways):
        error = next(e for e in errors if hasattr(e, "__notes__"))
        if must_succeed or replicas > 1:
            raise error
        return
    if errors:
        _logger.debug("%s of %r: %s", step_name, model.name, errors[0])
    if errors or not is_keras_step:
        model.training_state.dry_runs.add(done)


def _try_in_order(ways):
    """Returns the errors of the functions before the first one that succeeds."""
    errors = []
    for way in ways:
        try:
            way()
            break
        except Exception as error:
            errors.append(error)
    return errors


def _has_all_layers(model):
    return all(layer.built for layer in model._flatten_layers())


def _symbolic_build(model, step_name, element_spec):
    """Builds by Keras's symbolic `call`; the optimizer only if the step needs it."""
    optimizer = model.optimizer
    if step_name != "train_step":
        model.__dict__["optimizer"] = None
    try:
        with warnings.catch_warnings():
            # of layers that Keras cannot trace, and the dry run builds
            warnings.filterwarnings("ignore", ".*unbuilt state")
            model._symbolic_build(data_batch=inputs.with_unknown_batch_size(element_spec))
    finally:
        model.__dict__["optimizer"] = optimizer


def _dry_run(model, step_name, element_spec, worker_slice=None, is_repeated=False):
    """Traces a step on the rows of this process's first replica, or on the whole batch."""
    micro_steps = model.training_state.accumulate if step_name == "train_step" else 1
    trace = functools.partial(_traced, model, step_name, micro_steps, worker_slice, is_repeated)
    try:
        step = trace(element_spec)
        if step.may_count_rows:
            with contextlib.suppress(Exception):  # a program that needs a known number of rows
                step = trace(inputs.with_unknown_batch_size(element_spec))
        if step.needs_whole_gradients:
            _reduce_early(model, micro_steps)
    except Exception as error:
        error.add_note(_note_on(error, step_name))
        raise
    finally:
        model._clear_losses()  # those of the trace are symbolic
    if is_default(model.build):
        model.built = True


def _traced(model, step_name, micro_steps, worker_slice, is_repeated, element_spec):
    """Returns the `_DryRun` of a step."""
    strategy = model.distribute_strategy
    replica = first_replica(strategy) if is_multi_worker(strategy) else 0
    with (
        tf.__internal__.FuncGraph(f"dry_run_of_{step_name}").as_default(),
        tf.variable_creator_scope(_created_outside),
    ):
        data = keras.tree.map_structure(_placeholders, element_spec)
        division = BatchDivision.of(data, strategy, micro_steps, worker_slice, is_repeated)
        with _LoneReplica(strategy, replica):
            rows, share = division.take(data, replica, 0)
            step = _DryRun(share, replica, 0, 1, False, None, is_last=True)
            with step.running():
                step.note_use(keras.tree.flatten(getattr(model, step_name)(rows)))
    return step


def _placeholders(spec):
    """Returns a tensor without value for a type specification; None for a missing input."""
    if not isinstance(spec, tf.TypeSpec) or isinstance(spec, tf.OptionalSpec):
        return None
    return tf.nest.map_structure(
        lambda part: tf.compat.v1.placeholder(part.dtype, part.shape), spec, expand_composites=True
    )


def _created_outside(next_creator, initial_value=None, **arguments):
    """Creates a variable outside of all graphs, in the scope of the strategy."""
    if tf.executing_eagerly():
        return next_creator(initial_value=initial_value, **arguments)
    if tf.is_tensor(initial_value):
        constant = tf.get_static_value(initial_value)
        if constant is None:
            raise ValueError(
                f"the variable {arguments.get('name')!r} is created in a step with a value that "
                "the step computes. Create it in __init__ or build, with a constant or an "
                "initializer"
            )
        initial_value = constant
    with tf.init_scope(), steps.activate(None):
        return tf.Variable(initial_value, **arguments)


class _LoneReplica(tf.distribute.ReplicaContext):
    """Context of a replica that meets no others."""

    def all_reduce(self, reduce_op, value, options=None):
        return value

    def all_gather(self, value, axis, options=None):
        return value


class _DryRun(steps.ReplicaStep):
    """Step whose graph is never run. Optimizers are built and do not update.

    Attributes:
        may_count_rows: a gradient may have been changed by a constant number of rows.
    """

    may_count_rows = False

    @property
    def is_dry_run(self):
        # Variables are created eagerly, and some initializers assign.
        return not tf.executing_eagerly()

    def build(self, optimizer, variables):
        with tf.init_scope(), steps.activate(None):
            optimizer.build(variables)

    def gradients(self, optimizer, gradients, variables):
        values = [getattr(g, "values", g) for g in gradients]
        self.note_use(values)
        self.may_count_rows |= any(map(self.dependence.may_count_rows, values))


def _reduce_early(model, micro_steps):
    model.training_state.reduces_early = True
    if micro_steps > 1:
        warnings.warn(
            "train_step clips gradients, or changes them in another way that is not linear. With "
            f"accumulate={micro_steps} it does so on each replica and in each micro-step, unlike "
            "on one device. Use accumulate=1, or clip in the optimizer, such as by clipnorm",
            stacklevel=2,
        )


def _note_on(error, step_name):
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    where = f" at {own[-1].filename}:{own[-1].lineno}: `{own[-1].line}`" if own else ""
    return (
        f"kdist traced {step_name} once to create the model's variables, because replicas cannot, "
        f"and it failed{where}. Change that line so that TensorFlow can trace it, or create all "
        "variables before: call each layer on a batch, and optimizer.build(variables)"
    )
