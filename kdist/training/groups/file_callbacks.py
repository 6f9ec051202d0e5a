"""Keras callbacks that write files, on several workers: one worker writes, and all restore."""

import functools

import keras
import tensorflow as tf

from kdist.cluster import heartbeat
from kdist.compat.keras import recompute_constants
from kdist.training.broadcast import read_on_chief
from kdist.training.replica.accumulation import optimizers_of
from kdist.training.scopes import is_multi_worker, outside_multi_worker_scope
from kdist.training.sharding import whole_state
from kdist.training.sharding.optimizer_state import slots_of
from kdist.training.sharding.parts import divides_over_workers
from kdist.training.sharding.weights import as_divided

# Callbacks that only write.
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
# The same of packages that kdist does not import.
_WRITERS_BY_NAME = {"WandbMetricsLogger"}


def without_writers(callbacks):
    """Returns the callbacks for a task that is not the chief: only one task writes files.

    Callbacks with an attribute `only_writes` are left out, as are the writers of Keras and W&B. A
    `WandbEvalCallback` predicts on all workers, and uploads no tables here.
    """
    others = []
    for callback in keras.tree.flatten(callbacks):
        names = {cls.__name__ for cls in type(callback).__mro__}
        if "WandbEvalCallback" in names:
            _keep_tables(callback)
        is_writer = isinstance(callback, _WRITERS) or not names.isdisjoint(_WRITERS_BY_NAME)
        if not (callback is None or is_writer or getattr(callback, "only_writes", False)):
            others.append(callback)
    return others


def with_whole_state(callbacks, strategy: tf.distribute.Strategy):
    """Returns callbacks, before which divided state is gathered where the chief alone reads it.

    Callbacks of all workers read it together.

    Raises:
        ValueError: a callback saves the model where the workers do not meet, or restores it.
    """
    callbacks = [each for each in keras.tree.flatten(callbacks) if each is not None]
    if not divides_over_workers(strategy):
        return callbacks
    found = []
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "BackupAndRestore sends the chief's slots to all workers, and each worker has a "
                f"part of them (shard={strategy.layout.shard}). Use kdist.callbacks.Checkpoint"
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            raise ValueError(
                f"ModelCheckpoint(save_freq={callback.save_freq!r}): workers that divide slots "
                f"(shard={strategy.layout.shard}) send them at the end of an epoch. Use "
                'save_freq="epoch", or kdist.callbacks.Checkpoint(every_steps=…)'
            )
        if _saves_models(callback) or _writes_weights(callback):
            found += [_ShareState(with_slots=_saves_models(callback)), callback, _ForgetState()]
        else:
            found.append(callback)
    return found


def _saves_models(callback):
    """Returns True if a callback of the chief saves models, also if these are weights alone.

    Keras's files of weights contain slots.
    """
    is_checkpoint = isinstance(callback, keras.callbacks.ModelCheckpoint)
    return is_checkpoint or getattr(callback, "saves_models", False)


def _writes_weights(callback):
    """Returns True for a `TensorBoard` that writes histograms or embeddings of weights."""
    names = ("histogram_freq", "embeddings_freq")
    return isinstance(callback, keras.callbacks.TensorBoard) and any(
        getattr(callback, name) for name in names
    )


class _ShareState(keras.callbacks.Callback):
    """Gathers state that workers divide, before the chief's next callback reads the model.

    Args:
        with_slots: whether the callback reads the slots of optimizers.
    """

    def __init__(self, with_slots: bool):
        super().__init__()
        self._with_slots = with_slots

    def on_train_begin(self, logs=None):
        self._share()

    def on_epoch_end(self, epoch, logs=None):
        self._share()

    def _share(self):
        is_chief = self.model.distribute_strategy.extended.should_checkpoint
        whole_state.share(self.model, is_chief, self._with_slots)


class _ForgetState(keras.callbacks.Callback):
    """Frees this state, as the chief and all others read it together from here on."""

    def on_train_begin(self, logs=None):
        whole_state.forget(self.model)

    def on_epoch_end(self, epoch, logs=None):
        whole_state.forget(self.model)


def _keep_tables(callback):
    """Replaces uploads of a `WandbEvalCallback`; its predictions refer to the local table."""

    def keep_data(*_, **__):
        callback.data_table_ref = callback.data_table

    callback.log_data_table, callback.log_pred_table = keep_data, lambda *_, **__: None


@functools.cache
def share_backups():
    """Makes `keras.callbacks.BackupAndRestore` restore all workers from the files of the chief.

    With one worker, and for models that kdist does not train, it stays Keras's own.
    """
    _hook("on_train_begin", _restore)
    for name in ("on_epoch_end", "on_train_batch_end", "on_train_end"):
        _hook(name, _on_chief)


def _hook(name, hook):
    keras_function = getattr(keras.callbacks.BackupAndRestore, name)

    @functools.wraps(keras_function)
    def hooked(callback, *args, **kwargs):
        call = functools.partial(keras_function, callback, *args, **kwargs)
        model = callback.model
        if hasattr(model, "training_state") and is_multi_worker(model.distribute_strategy):
            return hook(callback, call)
        return call()

    setattr(keras.callbacks.BackupAndRestore, name, hooked)


def _on_chief(callback, call):
    if callback.model.distribute_strategy.extended.should_checkpoint:
        call()


def _restore(callback, call):
    """Restores the chief's model from its files, and all others from the chief's model."""
    model = callback.model
    strategy = model.distribute_strategy
    metrics = {id(variable) for variable in model.metrics_variables}
    values = {}

    def read():
        if not tf.io.gfile.exists(callback.backup_dir):
            return {"arrays": None}
        try:
            outside_multi_worker_scope(call)
        except Exception as error:  # whatever it is, the other workers must not wait for the model
            raise RuntimeError(
                f"BackupAndRestore cannot restore {callback.backup_dir}: {error}; remove the "
                "directory to start from the beginning"
            ) from error
        arrays = {name: value.local_value() for name, value in values.items()}
        return {"arrays": arrays, "epoch": model._initial_epoch}

    if model.optimizer is not None and not model.optimizer.built:
        with strategy.scope():  # all workers create its variables together
            model.optimizer.build(model.trainable_variables)
    weights = [as_divided(each) for each in model.variables if id(each) not in metrics]
    slots = [slot for optimizer in optimizers_of(model) for slot in slots_of(optimizer)]
    values = {str(number): value for number, value in enumerate([*weights, *slots])}
    with heartbeat.collective("restoring a backup"):
        found = read_on_chief(strategy, read, RuntimeError)
    for name, array in (found["arrays"] or {}).items():
        values[name].assign_local(array)
    if found["arrays"]:
        model._initial_epoch = found["epoch"]
        recompute_constants(model)
