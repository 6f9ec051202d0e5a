"""Start weights and frozen layers: --weights, --freeze, and --unfreeze_after_epochs."""

import math
import pathlib
import re
import warnings
import zipfile

from absl import flags

from kdist.commands.training_run.applications import (
    IMAGENET,
    NEW,
    PREFIX,
    application,
    check_download,
)

FLAGS = flags.FLAGS

_IN_ARCHIVE = "model.weights.h5"
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Most names of layers in a message.
_MAX_NAMES = 30


def check_weights():
    """Checks --weights without TensorFlow.

    Raises:
        ValueError: the file has no weights of Keras, or the model has none on ImageNet.
        FileNotFoundError: there is no such file.
        ConnectionError: weights on ImageNet cannot be downloaded.
    """
    text = FLAGS.weights
    if text == NEW:
        return
    if text == IMAGENET:
        name = application(FLAGS.model)
        if name is None:
            raise ValueError(
                f"--weights=imagenet is for models of keras.applications, not for {FLAGS.model}; "
                f"use one, such as --model={PREFIX}ResNet50, or give a file of weights"
            )
        check_download(name)
        return
    path = pathlib.Path(text)
    if not path.name.endswith((".keras", ".weights.h5")):
        raise ValueError(
            f"--weights={text}: give a .keras or .weights.h5 file, such as "
            "RUN_DIR/checkpoints/epoch-0001.keras, or imagenet, or none"
        )
    if not path.is_file():
        raise FileNotFoundError(f"--weights={text}: no such file; give that of a saved model")
    if not _has_weights(path):
        raise ValueError(
            f"--weights={text} is damaged, or no file of Keras 3; save the model again by "
            "model.save or model.save_weights"
        )


def _has_weights(path):
    if path.suffix == ".keras":
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            return _IN_ARCHIVE in archive.namelist()
    with open(path, "rb") as file:
        return file.read(len(_HDF5_SIGNATURE)) == _HDF5_SIGNATURE


def freeze_patterns():
    """Returns the regular expressions of --freeze.

    Raises:
        ValueError: one is no regular expression.
    """
    texts = [part for text in FLAGS.freeze for part in text.split(",") if part]
    patterns = []
    for text in texts:
        try:
            patterns.append(re.compile(text))
        except re.error as error:
            raise ValueError(
                f"--freeze={text} is no regular expression ({error}); commas separate several, so "
                "write it without one, such as --freeze='block[12]_.*'"
            ) from error
    return patterns


def named_layers(model):
    """Returns {path: layer} of all layers of a model, such as "base/conv1" for one in "base"."""
    found = {}
    for layer in model._flatten_layers(include_self=False, recursive=False):
        found[layer.name] = layer
        found.update({f"{layer.name}/{path}": part for path, part in named_layers(layer).items()})
    return found


def frozen_layers(model):
    """Returns the layers that the patterns of --freeze match, by name or path.

    Raises:
        ValueError: a pattern matches none.
    """
    named = named_layers(model)
    found = {}
    for pattern in freeze_patterns():
        matches = {
            path: layer
            for path, layer in named.items()
            if pattern.fullmatch(path) or pattern.fullmatch(layer.name)
        }
        if not matches:
            names = [path for path, layer in named.items() if layer.weights]
            raise ValueError(
                f"--freeze={pattern.pattern} matches no layer; the layers with weights are "
                f"{_listed(names)}. A pattern matches a whole name or path: block1_.*"
            )
        found.update(matches)
    return list(found.values())


def freeze(model):
    """Freezes the layers of --freeze.

    Raises:
        ValueError: a pattern matches no layer, or nothing is left to train.
    """
    layers = frozen_layers(model)
    for layer in layers:
        layer.trainable = False
    if layers and not model.trainable_weights:
        raise ValueError(
            "--freeze matches all layers with weights, and leaves nothing to train; leave out the "
            "layers to train, such as the last one"
        )


def build_optimizer(model):
    """Creates the optimizer's variables for all weights, also for those that are frozen now."""
    layers = frozen_layers(model)
    for layer in layers:
        layer.trainable = True
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    freeze(model)


def load_weights(model, path):
    """Loads weights from a file into the layers that they fit.

    Args:
        model: a model that is built.
        path: a `.keras` or `.weights.h5` file.

    Returns:
        A sentence about what is loaded and what is not.

    Raises:
        ValueError: the weights fit no layer, or the model is not built.
    """
    if not model.built:
        raise ValueError(
            f"--weights={path}: the model of {FLAGS.model} is not built, so nothing can be loaded "
            "into it; build it in the function, or load the weights there"
        )
    layers = {place: own for place, own in _own_weights(model).items() if own[1]}
    loaded, errors = set(), []
    for layer, _ in layers.values():
        layer.load_own_variables = _noting(layer, loaded, errors)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the result says what is not loaded
            model.load_weights(path, skip_mismatch=True)
    finally:
        for layer, _ in layers.values():
            del layer.load_own_variables
    new = [place for place, (layer, _) in layers.items() if id(layer) not in loaded]
    if len(new) == len(layers):
        raise ValueError(
            f"--weights={path} fits no layer of {FLAGS.model} ({next(iter(errors), 'no weights')})"
            "; give the weights of a model that is built like it, or change --model and "
            "--model_args"
        )
    counts = {
        place: sum(math.prod(weight.shape) for weight in weights)
        for place, (_, weights) in layers.items()
    }
    total = sum(counts.values())
    return (
        f"{len(layers) - len(new)} of {len(layers)} layers start from {path} "
        f"({total - sum(counts[place] for place in new):,} of {total:,} weights)"
        + (f"; new: {_listed(new)}" if new else "")
    )


def _own_weights(model):
    """Returns {path: (layer, its weights that are not those of a layer inside it)}."""
    found = {}
    for path, layer in {model.name: model, **named_layers(model)}.items():
        inner = layer._flatten_layers(include_self=False)
        others = {id(weight) for part in inner for weight in part.weights}
        found[path] = layer, [weight for weight in layer.weights if id(weight) not in others]
    return found


def _noting(layer, loaded, errors):
    """Returns the layer's function that loads its variables, and notes if it succeeds."""
    load = layer.load_own_variables

    def load_own_variables(store):
        try:
            load(store)
        except Exception as error:
            errors.append(str(error).splitlines()[0])
            raise
        loaded.add(id(layer))

    return load_own_variables


def _listed(names):
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f", and {more} more" if more > 0 else "")
