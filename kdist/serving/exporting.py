"""A trained model becomes a directory that a server serves: TensorFlow Serving, for one.

    export(model, "models/fashion", classes=["shirt", …])
    # models/fashion/1/                         a SavedModel, with its signature serving_default
    # models/fashion/1/assets.extra/            what it is, and requests to warm up with
    # models/fashion/batching_parameters.txt    for tensorflow_model_server
    # models/fashion/models.config

A version is written elsewhere and then renamed: a server that looks for new ones never sees half
of one.
"""

import contextlib
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

from kdist.parallel.joining import joined
from kdist.parallel.placement import groups_of
from kdist.serving.model_directory import METADATA, versions
from kdist.serving.saved_model import endpoint_of, write_saved_model
from kdist.serving.serving_files import batch_sizes, write_serving_files
from kdist.serving.settings import BatchSettings
from kdist.serving.warmup_file import Examples, check_can_write, examples_as_given, write_warm_up
from kdist.training.together import outside_of_strategy

PLACEMENTS = ("joined", "kept")

_PACKAGES = ("kdist", "tensorflow", "keras")


def export(
    model: keras.Model,
    directory: str | os.PathLike,
    version: int | None = None,
    *,
    preprocessing: Any = None,
    classes: Sequence[str] | None = None,
    settings: BatchSettings | None = None,
    examples: Examples | None = None,
    placement: str = "joined",
) -> pathlib.Path:
    """Writes a version of a model for servers; gives its directory.

    Args:
        model: functional or Sequential, built.
        directory: of all versions; its last part is the model's name. Made if it is not there.
        version: a whole number from 1 on; by default one more than the highest that is there.
        preprocessing: what gives the model its input, as part of the graph from then on: a
            functional or Sequential model, or a `tf.function` with an `input_signature`, such as
            one that takes the bytes of image files, decodes and resizes them. It captures no
            variables or tables; layers that have some go into a model.
        classes: what the model's outputs stand for, in order.
        settings: of batches, for `batching_parameters.txt`. Defaults to 2 ms and 32 rows.
        examples: rows (n, …) of the input, or of each by its name, that a server warms up with:
            in turn, in a batch of each allowed size. By default zeros; `{}` is for no warm-up.
        placement: of a split model. `"joined"` writes the plain one (`kdist.parallel.joined`),
            which computes on any one device; `"kept"` has the weights and operations where they
            are, and a server needs devices of the same names (`kdist.serving.model_directory`).

    Raises:
        FileExistsError: that version is there.
        ModuleNotFoundError: `kdist[serve]` is not installed, and there is to be a warm-up.
        ValueError: a version that is no whole number from 1 on, a model of another kind or not
            built, as many classes as it has no outputs, examples that it cannot compute, or a
            placement that cannot be kept.
    """
    directory, settings = pathlib.Path(directory), settings or BatchSettings(0.002)
    devices = _kept_devices(model, placement)
    if getattr(model, "is_split", False) and not devices:
        model = joined(model, "CPU:0")  # it may be too large for one accelerator
    _check_built(model)
    _check_classes(model, classes)
    endpoint = endpoint_of(model, preprocessing)
    rows = examples_as_given(endpoint.inputs, examples)
    if rows:
        check_can_write()
    target = _target(directory, version)
    said = {"classes": None if classes is None else list(classes), "devices": devices}
    with _whole(target) as path:
        outside_of_strategy(lambda: write_saved_model(endpoint, path, rows, bool(devices)))
        _write_metadata(target, path, endpoint, said)
        if rows:
            name = directory.resolve().name
            write_warm_up(path, name, rows, batch_sizes(settings.max_batch))
    write_serving_files(directory, settings)
    return target


@contextlib.contextmanager
def _whole(target):
    """Gives a path to write to, which becomes `target` after the block, or nothing if it fails."""
    prefix = f".writing-{target.name}-"
    writing = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield writing / "model"
        os.rename(writing / "model", target)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _kept_devices(model, placement):
    """The devices that a server will need; none for a model that computes anywhere."""
    if placement not in PLACEMENTS:
        raise ValueError(f"placement={placement!r}: there are {' and '.join(PLACEMENTS)}")
    if placement == "joined":
        return []
    if not getattr(model, "is_split", False):
        raise ValueError(f'{model.name!r} is not split: leave placement="kept" out')
    devices = groups_of(model.distribute_strategy)[0]  # those of the first replica
    if any("/" in name for name in devices):
        raise ValueError(
            f"the devices {', '.join(devices)} belong to tasks of a job, which no server has: "
            'export with placement="joined", or load and split the model on one machine first'
        )
    return devices


def _check_built(model):
    if not model.built:
        raise ValueError(f"{model.name!r} is not built: call it on a batch first, or `build` it")
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"{model.name!r} does not say its inputs: wrap it, as in x = keras.Input((28, 28, 1)); "
            "keras.Model(x, model(x))"
        )


def _check_classes(model, classes):
    width = model.output_shape[-1] if isinstance(model.output_shape, tuple) else None
    if classes is not None and width != len(classes):
        raise ValueError(
            f"{len(classes)} classes, and {model.name!r} gives {model.output_shape}: name each"
        )


def _target(directory, version):
    """Where the version will be."""
    directory.mkdir(parents=True, exist_ok=True)
    version = max(versions(directory), default=0) + 1 if version is None else version
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"version={version!r}: a whole number from 1 on")
    target = directory / str(version)
    if target.exists():
        raise FileExistsError(
            f"{target} is there: servers keep what they have loaded; give another version, or none"
        )
    return target


def _write_metadata(target, path, endpoint, said):
    metadata = {
        "name": target.parent.resolve().name,
        "version": int(target.name),
        **said,
        "inputs": {name: _shape_and_type(spec) for name, spec in endpoint.inputs.items()},
        "outputs": {name: _shape_and_type(spec) for name, spec in endpoint.outputs.items()},
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    (path / METADATA).parent.mkdir(exist_ok=True)
    (path / METADATA).write_text(json.dumps(metadata, indent=1) + "\n")


def _shape_and_type(spec):
    return {"shape": list(spec.shape), "dtype": spec.dtype.name}
