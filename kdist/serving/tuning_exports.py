"""An exported model tried out before it serves: `scripts/serve.py --tune`."""

import functools
import os
import pathlib
from collections.abc import Callable

from kdist.devices import find_devices
from kdist.serving import tuning_page
from kdist.serving.loading import LoadedVersion
from kdist.serving.model_directory import needed_devices, versions
from kdist.serving.serving_files import batch_sizes
from kdist.serving.settings import Objective
from kdist.serving.signature import SERVING_DEFAULT
from kdist.serving.tuning_run import Tuned, tune
from kdist.serving.warming import example_row


def tune_export(
    directory: str | os.PathLike,
    page: str | os.PathLike,
    objective: Objective,
    max_batch: int = 32,
    seconds: float = 60.0,
    tell: Callable[[str], None] = print,
) -> Tuned:
    """Tunes the highest version of a model, in this process, and writes the page.

    Args:
        directory: of the model's versions.
        page: the file to write.
        objective: what settings are chosen for.
        max_batch: rows of a batch at most.
        seconds: of measuring, about.
        tell: is given a line about each step.

    Raises:
        ValueError: no version is there, or none with the signature `serving_default`.
        BadInput: the model refuses rows of zeros, and has no requests to warm up with.
    """
    found = versions(directory)
    if not found:
        raise ValueError(f"{directory} holds no version: write one with kdist.serving.export")
    path = pathlib.Path(directory, str(found[-1]))
    find_devices(needed_devices(path) or None)
    loaded = LoadedVersion(path)
    if SERVING_DEFAULT not in loaded.signatures:
        raise ValueError(f"{path} has no signature {SERVING_DEFAULT}; it has {loaded.signatures}")
    row = example_row(loaded.signatures[SERVING_DEFAULT], loaded.examples)
    compute = functools.partial(loaded, SERVING_DEFAULT)
    tuned = tune(compute, row, objective, batch_sizes(max_batch), seconds=seconds, tell=tell)
    tell(str(tuning_page.write(tuned, page, pathlib.Path(directory).resolve().name)))
    return tuned
