"""A trained model becomes a directory that a server serves: TensorFlow Serving, for one.

    export(model, "models/fashion", classes=["shirt", …])
    # models/fashion/1/                         a SavedModel, with its signature serving_default
    # models/fashion/1/assets.extra/kdist.json  what it is
    # models/fashion/batching_parameters.txt    for tensorflow_model_server
    # models/fashion/models.config

A version is written elsewhere and then renamed: a server that looks for new ones never sees half
of one.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.parallel.joining import joined
from kdist.serving.settings import BatchSettings
from kdist.training.together import outside_of_strategy

_METADATA = pathlib.PurePath("assets.extra", "kdist.json")
_WRITING = ".writing-"


def export(
    model: keras.Model,
    directory: str | os.PathLike,
    version: int | None = None,
    *,
    preprocessing: keras.Model | None = None,
    classes: Sequence[str] | None = None,
    settings: BatchSettings | None = None,
) -> pathlib.Path:
    """Writes a version of a model for servers; gives its directory.

    Args:
        model: built; of a split model the plain one is written (`kdist.parallel.joined`).
        directory: of all versions; its last part is the model's name. Made if it is not there.
        version: a whole number from 1 on; by default one more than the highest that is there.
        preprocessing: a functional or Sequential model whose output the model takes; part of the
            graph from then on.
        classes: what the model's outputs stand for, in order.
        settings: of batches, for `batching_parameters.txt`. Defaults to 2 ms and 32 rows.

    Raises:
        FileExistsError: that version is there.
        ValueError: a version that is no whole number from 1 on, a model that is not built, or as
            many classes as it has no outputs.
    """
    directory = pathlib.Path(directory)
    plain = joined(model, "CPU:0") if getattr(model, "is_split", False) else model
    if not plain.built or not plain.inputs:
        raise ValueError(f"{model.name!r} is not built: call it on a batch first, or `build` it")
    _check_classes(plain, classes)
    directory.mkdir(parents=True, exist_ok=True)
    version = _next_version(directory) if version is None else version
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"version={version!r}: a whole number from 1 on")
    target = directory / str(version)
    if target.exists():
        raise FileExistsError(
            f"{target} is there: servers keep what they have loaded; give another version, or none"
        )
    writing = pathlib.Path(tempfile.mkdtemp(prefix=f"{_WRITING}{version}-", dir=directory))
    try:
        specs = _write_saved_model(plain, preprocessing, writing / "model")
        metadata = {"name": directory.resolve().name, "version": version, **_described(specs)}
        metadata["classes"] = None if classes is None else list(classes)
        (writing / "model" / _METADATA).parent.mkdir(exist_ok=True)
        (writing / "model" / _METADATA).write_text(json.dumps(metadata, indent=1) + "\n")
        os.rename(writing / "model", target)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    _write_configuration(directory, settings or BatchSettings(0.002))
    return target


def read_metadata(version_directory: str | os.PathLike) -> dict[str, Any]:
    """What `export` has written of a version: name, classes, inputs, outputs, versions.

    Raises:
        OSError: nothing was.
    """
    return json.loads((pathlib.Path(version_directory) / _METADATA).read_text())


def versions(directory: str | os.PathLike) -> list[int]:
    """The versions of a model that are there, ascending; other files are none."""
    return sorted(
        int(path.name)
        for path in pathlib.Path(directory).iterdir()
        if path.name.isdecimal() and (path / "saved_model.pb").exists()
    )


def _next_version(directory):
    return max(versions(directory), default=0) + 1


def _check_classes(model, classes):
    width = model.output_shape[-1] if isinstance(model.output_shape, tuple) else None
    if classes is not None and width != len(classes):
        raise ValueError(
            f"{len(classes)} classes, and {model.name!r} gives {model.output_shape}: name each"
        )


def _write_saved_model(model, preprocessing, path):
    """Writes it, with named inputs; gives ({input: spec}, {output: spec})."""
    first = preprocessing or model
    inputs = {_named(t, n, first.inputs, "inputs"): t for n, t in enumerate(first.inputs)}
    specs = {
        name: tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype, name)
        for name, tensor in inputs.items()
    }

    def predict(*arrays):
        # As the model was called when it was built.
        given = keras.tree.pack_sequence_as(first._inputs_struct, list(arrays))
        x = given if preprocessing is None else preprocessing(given, training=False)
        outputs = keras.tree.flatten(model(x, training=False))
        return {
            _named(tensor, number, model.outputs, "outputs"): outputs[number]
            for number, tensor in enumerate(model.outputs)
        }

    def write():
        archive = keras.export.ExportArchive()
        archive.track(model)
        if preprocessing is not None:
            archive.track(preprocessing)
        archive.add_endpoint("serve", predict, input_signature=list(specs.values()))
        archive.write_out(os.fspath(path), verbose=False)

    outside_of_strategy(write)
    outputs = {
        _named(tensor, number, model.outputs, "outputs"): tensor
        for number, tensor in enumerate(model.outputs)
    }
    return specs, outputs


def _named(tensor, number, tensors, alone):
    """One is called `alone`; several are called after the layers that give them."""
    if len(tensors) == 1:
        return alone
    name = tensor._keras_history.operation.name
    names = [each._keras_history.operation.name for each in tensors]
    return name if names.count(name) == 1 else f"{name}_{number}"


def _described(specs):
    inputs, outputs = specs
    packages = ("kdist", "tensorflow", "keras")
    return {
        "inputs": {name: _shape_and_type(tensor) for name, tensor in inputs.items()},
        "outputs": {name: _shape_and_type(tensor) for name, tensor in outputs.items()},
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _shape_and_type(tensor):
    return {"shape": [None, *tensor.shape[1:]], "dtype": tf.as_dtype(tensor.dtype).name}


def _write_configuration(directory, settings):
    """What tensorflow_model_server takes by --batching_parameters_file, --model_config_file."""
    sizes = [1 << n for n in range(settings.max_batch.bit_length()) if 1 << n < settings.max_batch]
    _write(
        directory / "batching_parameters.txt",
        [
            f"max_batch_size {{ value: {settings.max_batch} }}",
            f"batch_timeout_micros {{ value: {round(settings.timeout_seconds * 1e6)} }}",
            "max_enqueued_batches { value: 1000 }",
            "num_batch_threads { value: 1 }",
            *(f"allowed_batch_sizes : {size}" for size in [*sizes, settings.max_batch]),
        ],
    )
    name = directory.resolve().name
    _write(
        directory / "models.config",
        [
            "model_config_list {",
            "  config {",
            f"    name: {json.dumps(name)}",
            f"    base_path: {json.dumps(f'/models/{name}')}",
            '    model_platform: "tensorflow"',
            "  }",
            "}",
        ],
    )


def _write(path, lines):
    """A file that is old or new, never half of either."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text("\n".join(lines) + "\n")
    os.replace(draft, path)
