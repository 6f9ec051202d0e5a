"""Saving of models: outside of a multi-worker scope, and as whole files.

Workers may save to one path at the same time, and each must be able to do it alone. What TensorFlow
creates within the scope of MultiWorkerMirroredStrategy waits for all workers.
"""

import contextlib
import functools
import os
import tempfile

from kdist.compat.keras import export_module, legacy_h5_format, saving_lib
from kdist.mirror.store import is_url
from kdist.training.scopes import outside_any_scope, outside_multi_worker_scope
from kdist.training.sharding import weights
from kdist.training.sharding.optimizer_state import shards_of

_MODEL_FILES = (".keras", ".h5", ".hdf5", ".weights.json")

# Functions that save a model. Any other way to save it, such as pickle, calls one of them.
_SAVING = (
    (saving_lib, "save_model"),
    (saving_lib, "_save_model_to_fileobj"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
    (export_module, "export_saved_model"),
)


def install():
    """Replaces Keras's functions that save a model."""
    for owner, name in _SAVING:
        setattr(owner, name, _saving_alone(getattr(owner, name)))
    # Keras stores the result under another name than it looks for, and computes it in each save by
    # creating an optimizer, of which TensorFlow keeps 70 kB. Outside of scopes: workers that have
    # not saved would create it alone when they load, and wait for the others.
    attributes = saving_lib.get_attr_skipset
    saving_lib.get_attr_skipset = functools.cache(
        lambda kind: outside_any_scope(lambda: attributes(kind))
    )


def _saving_alone(keras_function):
    @functools.wraps(keras_function)
    def saving_alone(model, filepath, *args, **kwargs):
        if keras_function.__name__ == "save_model_to_hdf5":
            _check_slots_are_whole(model, *args, **kwargs)
        is_export = keras_function.__name__ == "export_saved_model"
        whole = weights.whole_weights(model) if is_export else contextlib.nullcontext()
        with _whole_files(filepath) as path, whole:
            return outside_multi_worker_scope(
                functools.partial(keras_function, model, path, *args, **kwargs)
            )

    return saving_alone


def _check_slots_are_whole(model, overwrite=True, include_optimizer=True):
    """Raises a ValueError if an HDF5 file would hold one replica's part of each slot."""
    optimizer = getattr(model, "optimizer", None)
    if include_optimizer and optimizer is not None and shards_of(optimizer) is not None:
        raise ValueError(
            "HDF5 files cannot hold the state of a sharded optimizer. Save a .keras file, or leave "
            "the optimizer out: model.save(path, include_optimizer=False)"
        )


@contextlib.contextmanager
def _whole_files(path):
    """Yields a path in a new folder; its files then replace those at `path`, the last one there.

    Workers may save to one path at the same time, or read what another one writes.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    folder, name = os.path.split(os.path.realpath(text))
    if not text.endswith(_MODEL_FILES) or is_url(text) or not os.access(folder, os.W_OK):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as unfinished:
        yield os.path.join(unfinished, name)
        for each in sorted(os.listdir(unfinished), key=lambda each: each == name):
            os.replace(os.path.join(unfinished, each), os.path.join(folder, each))
