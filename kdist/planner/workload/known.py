"""Stored workloads of models known by name, so that planning by name needs no TensorFlow.

    known_workload("ResNet-50").training_flops
    known_workload("DenseNet-201 256px").input_shape    # (256, 256, 3)

They cover keras.applications, kdist's own builders, and the models of published benchmarks.
`tools/known_workloads.py` builds them.
"""

import difflib
import functools
import gzip
import re
from importlib import resources

from kdist.planner.workload.layers import Workload

DIRECTORY = resources.files(__package__).joinpath("models")
_SUFFIX = ".json.gz"
# Other names of the same network, as keys.
_ALIASES = {
    "bertlarge": "bertlargeseq512",
    "efficientdet": "efficientdetd0",
    "electrabase": "electrabaseseq512",
    "maskrcnn": "maskrcnnr50",
    "mobilenetv1": "mobilenet",
    "resnet50v1": "resnet50",
    "resnext101": "resnext10132x4d",
    "unet": "unetmedical",
}
# Words about a training rather than a model. Workloads with such a word in their names are found
# first.
_REMARKS = re.compile(r"\b(pre-?train(ing|ed)?|fine-?tun(e|ed|ing)|squad|training)\b")
_PIXELS = re.compile(r"\b(\d+) ?px\b")


def known_workloads() -> tuple[str, ...]:
    """Returns the names of kdist's stored workloads, sorted.

    Example:

        >>> "resnet50" in known_workloads()
        True

    Returns:
        Names for `known_workload` and `kdist.plan`.
    """
    return tuple(_files())


@functools.lru_cache(maxsize=256)
def known_workload(name: str) -> Workload:
    """Returns the workload of a model known by name, in float32.

    Case, spaces, and punctuation do not count, nor words about the training (`"fine-tune"`,
    `"pretrain"`, `"SQuAD"`). `"256px"` means images of 256 × 256 pixels. Without it, images have
    the builder's default size.

    Example:

        >>> known_workload("DenseNet-201 256px").input_shape
        (256, 256, 3)

    Args:
        name: Such as `"resnet50"`, `"ResNet-50 v1.5"`, `"mobilenet_v2"`, or `"BERT-large seq128"`.

    Returns:
        The `Workload`.

    Raises:
        ValueError: If no model has this name, or its images cannot have this size.
    """
    lowered = str(name).lower()
    pixels = _PIXELS.search(lowered)
    plain = _PIXELS.sub(" ", lowered)
    keys = {_key(stem): stem for stem in _files()}
    tried = [_key(plain), _key(_REMARKS.sub(" ", plain))]
    stem = next((keys[key] for key in (_ALIASES.get(k, k) for k in tried) if key in keys), None)
    if stem is None:
        close = difflib.get_close_matches(tried[-1], keys, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(keys[key] for key in close)}?" if close else "."
        raise ValueError(
            f"no model is known by the name {name!r}{hint} There are {', '.join(_files())}; read "
            "any other with kdist.planner.read_workload(model)"
        )
    work = _load(stem)
    if pixels is None:
        return work
    size = int(pixels[1])
    return work.at_input_shape((size, size, *work.input_shape[2:]))


@functools.cache
def _files():
    """Returns the files of stored workloads by name, sorted."""
    files = {path.name.removesuffix(_SUFFIX): path for path in DIRECTORY.iterdir()}
    return dict(sorted(files.items()))


@functools.cache
def _load(stem):
    path = _files()[stem]
    return Workload.from_json(gzip.decompress(path.read_bytes()).decode(), path.name)


def _key(name):
    return re.sub(r"[^a-z0-9]", "", name)
