"""The files that an ordinary TensorFlow Serving takes beside a model. Imports no TensorFlow.

tensorflow_model_server --model_config_file=/models/fashion/models.config \\
    --enable_batching --batching_parameters_file=/models/fashion/batching_parameters.txt
"""

import json
import os
import pathlib

from kdist.serving.settings import BatchSettings

BATCHING_PARAMETERS = "batching_parameters.txt"
MODEL_CONFIG = "models.config"


def mount_path(name: str) -> str:
    """Where TensorFlow Serving finds the directory of the model of that name."""
    return f"/models/{name}"


def batch_sizes(max_batch: int) -> list[int]:
    """Rows that batches are filled up to: powers of two, and `max_batch`, which is the last."""
    return [*(1 << n for n in range((max_batch - 1).bit_length())), max_batch]


def write_serving_files(directory: str | os.PathLike, settings: BatchSettings) -> None:
    """Writes them for the model that `directory` is called after.

    They hold the protos `tensorflow.serving.BatchingParameters` and `ModelServerConfig` as text.
    Of the former, TensorFlow Serving asks that the allowed sizes ascend up to the largest batch.
    """
    directory = pathlib.Path(directory).resolve()
    parameters = [
        f"max_batch_size {{ value: {settings.max_batch} }}",
        f"batch_timeout_micros {{ value: {round(settings.timeout_seconds * 1e6)} }}",
        "max_enqueued_batches { value: 1000 }",
        "num_batch_threads { value: 1 }",
        *(f"allowed_batch_sizes: {size}" for size in batch_sizes(settings.max_batch)),
    ]
    config = [
        "model_config_list {",
        "  config {",
        f"    name: {json.dumps(directory.name)}",
        f"    base_path: {json.dumps(mount_path(directory.name))}",
        '    model_platform: "tensorflow"',
        "  }",
        "}",
    ]
    _write(directory / BATCHING_PARAMETERS, parameters)
    _write(directory / MODEL_CONFIG, config)


def _write(path, lines):
    """A file that is old or new, never half of either."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text("\n".join(lines) + "\n")
    os.replace(draft, path)
