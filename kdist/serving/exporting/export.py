"""Exports a trained model to a directory that TensorFlow Serving or kdist can serve.

    export(model, "models/fashion", classes=["shirt", …])
    # models/fashion/1/                         a SavedModel with the signature serving_default
    # models/fashion/1/assets.extra/            metadata, and requests to warm up with
    # models/fashion/batching_parameters.txt    for tensorflow_model_server
    # models/fashion/models.config

A version is written to a temporary directory and then renamed, so a server that looks for new
versions never sees half of one. Of exports at the same time, each gets a version of its own.
"""

import contextlib
import dataclasses
import datetime
import errno
import importlib.metadata
import itertools
import json
import os
import pathlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.mirror.store import is_url
from kdist.parallel.inspect.operation_devices import groups_of
from kdist.parallel.placement import functional_graph
from kdist.parallel.split_model import merged
from kdist.serving.core.model_directory import METADATA, versions, write_serving_files
from kdist.serving.core.settings import BatchSettings, padded_sizes
from kdist.serving.core.signature import SERVING_DEFAULT, read_signatures
from kdist.serving.exporting.bucket import check_version, next_version, put_version
from kdist.serving.exporting.warmup_file import (
    Examples,
    check_protos_installed,
    example_rows,
    write_warmup_requests,
)
from kdist.training.scopes import outside_any_scope
from kdist.training.sharding.weights import whole_weights

PLACEMENTS = ("merged", "kept")

_PACKAGES = ("kdist", "tensorflow", "keras")

_KEEP_DEVICES = tf.saved_model.SaveOptions(
    experimental_variable_policy=tf.saved_model.experimental.VariablePolicy.SAVE_VARIABLE_DEVICES
)


def export(
    model: keras.Model,
    directory: str | os.PathLike,
    version: int | None = None,
    *,
    preprocessing: Any = None,
    classes: Sequence[str] | None = None,
    settings: BatchSettings | None = None,
    examples: Examples | None = None,
    placement: str = "merged",
) -> pathlib.Path | str:
    """Writes a version of a model for model servers.

    Args:
        model: a functional or Sequential model that is built.
        directory: directory of all versions, created if needed. Its last part is the model's name.
            Or a URL such as gs://bucket/models/fashion; the model is then written to a temporary
            directory first.
        version: positive integer. Defaults to one more than the highest existing version.
        preprocessing: computes the input of the model, and becomes part of the graph. Either a
            functional or Sequential model, or a `tf.function` with an `input_signature`, such as
            one that decodes and resizes the bytes of image files. A function must not capture
            variables or tables; put layers that have some into a model.
        classes: names of the model's outputs, in order. Defaults to none.
        settings: batch settings for `batching_parameters.txt`. Defaults to 2 ms and 32 rows.
        examples: rows `(n, …)` of the input, or of each input by its name. A server warms up with
            them, in turn, in one batch of each allowed size. Defaults to zeros; `{}` disables the
            warm-up.
        placement: for a split model only. `"merged"` (default) writes the unsplit model, which
            computes on any one device. `"kept"` keeps weights and operations where they are; the
            server then needs devices with the same names.

    Returns:
        The directory of the new version, or its URL.

    Raises:
        FileExistsError: the version exists.
        ModuleNotFoundError: the warm-up needs `kdist[serve]`, which is not installed.
        ValueError: the version is not a positive integer, the model is of another kind or not
            built, the number of classes does not match the outputs, the examples cannot be
            computed, or the placement cannot be kept.
        OSError: the directory cannot be written, or the URL cannot be read or written.

    Example:

        path = kdist.serving.export(model, "models/fashion", classes=["shirt", "shoe"])
        # then: kdist serve --model_dir=models/fashion
    """
    if is_url(directory):
        return _export_to_bucket(
            model,
            os.fspath(directory),
            version,
            preprocessing=preprocessing,
            classes=classes,
            settings=settings,
            examples=examples,
            placement=placement,
        )
    directory, settings = pathlib.Path(directory), settings or BatchSettings(0.002)
    devices = _kept_devices(model, placement)
    if getattr(model, "is_split", False) and not devices:
        model = merged(model, "CPU:0")  # on the CPU, as it may be too large for one accelerator
    _check_built(model)
    _check_classes(model, classes)
    endpoint = create_endpoint(model, preprocessing)
    rows = example_rows(endpoint.inputs, examples)
    if rows:
        check_protos_installed()
    first = _first_version(directory, version)
    details = {"classes": None if classes is None else list(classes), "devices": devices}
    with _temporary_directory(directory) as path, whole_weights(model):
        outside_any_scope(lambda: write_saved_model(endpoint, path, rows, bool(devices)))
        if rows:
            name = directory.resolve().name
            write_warmup_requests(path, name, rows, padded_sizes(settings.max_batch))
        for number in itertools.count(first):
            target = directory / str(number)
            _write_metadata(target, path, endpoint, details)
            if _is_renamed(path, target):
                break
            if version is not None:
                raise _exists(target)
    write_serving_files(directory, settings)
    return target


def _export_to_bucket(model, url, version, **options):
    if version is None:
        next_version(url)  # fails early if the store cannot be read
    else:
        check_version(url, version)
    with tempfile.TemporaryDirectory(prefix="kdist-export-") as parent:
        local = pathlib.Path(parent) / url.rstrip("/").rpartition("/")[2]
        return put_version(export(model, local, version, **options), url, version)


@contextlib.contextmanager
def _temporary_directory(directory):
    """Yields a path to write to, of which nothing remains unless it is renamed."""
    writing = pathlib.Path(tempfile.mkdtemp(prefix=".writing-", dir=directory))
    try:
        yield writing / "model"
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _is_renamed(path, target):
    """Renames a directory; returns False if another export has just written to the target."""
    try:
        os.rename(path, target)
        return True
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False


def _kept_devices(model, placement):
    """Returns the devices that a server will need; none for a model that computes anywhere."""
    if placement == "joined":
        warnings.warn('placement="joined" is now "merged"', DeprecationWarning, stacklevel=3)
        placement = "merged"
    if placement not in PLACEMENTS:
        raise ValueError(f"placement={placement!r}: choose one of {', '.join(PLACEMENTS)}")
    if placement == "merged":
        return []
    if not getattr(model, "is_split", False):
        raise ValueError(f'{model.name!r} is not split: leave out placement="kept"')
    devices = groups_of(model.distribute_strategy)[0]  # of the first replica
    if any("/" in name for name in devices):
        raise ValueError(
            f"the devices {', '.join(devices)} belong to tasks of a job, and a server has "
            'none: export with placement="merged", or load and split the model on one machine first'
        )
    return devices


def _check_built(model):
    if not model.built:
        raise ValueError(f"{model.name!r} is not built: call it on a batch first, or `build` it")
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"{model.name!r} has no defined inputs: wrap it, as in x = keras.Input((28, 28, 1)); "
            "keras.Model(x, model(x))"
        )


def _check_classes(model, classes):
    width = model.output_shape[-1] if isinstance(model.output_shape, tuple) else None
    if classes is not None and width != len(classes):
        raise ValueError(
            f"{len(classes)} classes, and the output of {model.name!r} has the shape "
            f"{model.output_shape}: give one name for each output"
        )


def _first_version(directory, version):
    """Returns the version to write, or the first that may be free if none is given."""
    directory.mkdir(parents=True, exist_ok=True)
    is_given = version is not None
    version = version if is_given else max(versions(directory), default=0) + 1
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"version={version!r}: give a positive integer")
    target = directory / str(version)
    if is_given and target.exists():
        raise _exists(target)
    return version


def _exists(target):
    return FileExistsError(
        f"{target} exists, and servers do not reload a version: give another, or none"
    )


def _write_metadata(target, path, endpoint, details):
    metadata = {
        "name": target.parent.resolve().name,
        "version": int(target.name),
        **details,
        "inputs": {name: _shape_and_dtype(spec) for name, spec in endpoint.inputs.items()},
        "outputs": {name: _shape_and_dtype(spec) for name, spec in endpoint.outputs.items()},
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    (path / METADATA).parent.mkdir(exist_ok=True)
    (path / METADATA).write_text(json.dumps(metadata, indent=1) + "\n")


def _shape_and_dtype(spec):
    return {"shape": list(spec.shape), "dtype": spec.dtype.name}


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Inputs, outputs, and computation of a signature. Specs have the shape `(None, …)`."""

    inputs: Mapping[str, tf.TensorSpec]
    outputs: Mapping[str, tf.TensorSpec]
    predict: Callable[..., dict[str, tf.Tensor]]  # of tensors in the order of `inputs`
    parts: tuple[keras.Model, ...]  # models whose weights the function uses


def create_endpoint(model: keras.Model, preprocessing: Any = None) -> Endpoint:
    """Returns the signature of a built model, which includes preprocessing.

    A single input is named `inputs`, and a single output `outputs`. Several are named after the
    layers that compute them, or after the arguments of the preprocessing function.

    Raises ValueError if preprocessing is neither a model of the same kind nor a `tf.function` with
    an `input_signature`, or does not accept rows.
    """
    names = _names(model.outputs, "outputs")
    before: Callable[..., Any]
    parts: tuple[keras.Model, ...] = (model,)
    if preprocessing is None:
        inputs, before = _input_specs(model), _packer(model)
    elif isinstance(preprocessing, keras.Model):
        inputs, parts = _input_specs(preprocessing), (model, preprocessing)
        pack = _packer(preprocessing)

        def before(*tensors):
            return preprocessing(pack(*tensors), training=False)
    else:
        inputs, before = _argument_specs(preprocessing), preprocessing

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
    """Writes a SavedModel to a new directory after it has computed the examples.

    `keep_devices` loads variables on the devices where they are now; operations always stay on the
    devices that the model chose. Raises ValueError if the examples ({input: rows}) cannot be
    computed, or a server would not load the model because it calls Python code.
    """
    archive = keras.export.ExportArchive()
    # The archive finds the variables that are used. If it tracked the models directly, it would
    # write their variables a second time; through a module, it tracks their tables only.
    parts = tf.Module()
    parts.parts = endpoint.parts
    archive.track(parts)
    specs = list(endpoint.inputs.values())
    traced = archive.add_endpoint(SERVING_DEFAULT, endpoint.predict, input_signature=specs)
    if examples:
        rows = [tf.constant(examples[name]) for name in endpoint.inputs]
        _check_computes(traced.get_concrete_function(), rows)
    options = _KEEP_DEVICES if keep_devices else None
    archive.write_out(os.fspath(path), options=options, verbose=False)
    read_signatures(path)


def _check_computes(function, tensors):
    """Computes the examples: a server does not load a model whose warm-up fails."""
    try:
        function(*tensors)
    except tf.errors.OpError as error:
        reason = str(error.message).strip().splitlines()[0]
        raise ValueError(
            f"the model cannot compute the rows to warm up with: {reason}. Give other rows as "
            "examples=…, or examples={} for no warm-up"
        ) from error


def _input_specs(model):
    names = _names(model.inputs, "inputs")
    return {name: _spec(name, tensor) for name, tensor in zip(names, model.inputs, strict=True)}


def _packer(model):
    """Returns a function that packs tensors in the structure of the model's inputs."""
    structure = functional_graph(model)._inputs_struct
    return lambda *tensors: keras.tree.pack_sequence_as(structure, list(tensors))


def _argument_specs(function):
    try:
        arguments, _ = function.get_concrete_function().structured_input_signature
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"preprocessing={function!r}: give a functional or Sequential model, or a function "
            "with types, such as @tf.function(input_signature=[tf.TensorSpec((None,), tf.string)])"
        ) from error
    for spec in arguments:
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank or spec.shape[0] is not None:
            raise ValueError(f"preprocessing has {spec}: its first size must be None, for rows")
    names = ["inputs"] if len(arguments) == 1 else [spec.name for spec in arguments]
    return {name: _spec(name, spec) for name, spec in zip(names, arguments, strict=True)}


def _spec(name, tensor):
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype, name)


def _names(tensors, single_name):
    """Returns names for tensors: `single_name` for one, else the names of their layers."""
    if len(tensors) == 1:
        return [single_name]
    layers = [tensor._keras_history.operation.name for tensor in tensors]
    numbered = [f"{layer}_{number}" for number, layer in enumerate(layers)]
    pairs = zip(layers, numbered, strict=True)
    return [layer if layers.count(layer) == 1 else unique for layer, unique in pairs]
