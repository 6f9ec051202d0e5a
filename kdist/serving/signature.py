"""What a SavedModel's signature takes and gives, read from its files without loading it."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from kdist.serving.rows import rows_of
from kdist.serving.safe_graphs import check_safe

SERVING_DEFAULT = "serving_default"
_PREDICT = "tensorflow/serving/predict"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor's shape and type.

    Attributes:
        shape: None for a size that may vary; None as a whole if the rank may.
        dtype: of NumPy; `object` for strings, as bytes.
        name: in the graph.
    """

    shape: tuple[int | None, ...] | None
    dtype: np.dtype
    name: str

    @property
    def is_text(self) -> bool:
        """Whether it holds strings."""
        return self.dtype == object

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises ValueError where an array of this shape is not what it takes."""
        if self.shape is None:
            return
        if len(shape) != len(self.shape) or any(
            want is not None and want != have for want, have in zip(self.shape, shape, strict=True)
        ):
            raise ValueError(
                f"input {name!r} has the shape {_said(shape)}, and the model takes "
                f"{_said(self.shape)}; the first counts the rows"
            )


@dataclasses.dataclass(frozen=True)
class Signature:
    """Named tensors in and out; the first size of each counts rows."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raises ValueError where a request is not what the signature takes."""
        self.check_names(arrays)
        for name, spec in self.inputs.items():
            spec.check(name, arrays[name].shape)
        rows_of(arrays)

    def check_names(self, names) -> None:
        """Raises ValueError where inputs are missing or unknown."""
        wanted = set(self.inputs)
        if missing := sorted(wanted - set(names)):
            raise ValueError(f"inputs {missing} are missing; the model takes {sorted(wanted)}")
        if unknown := sorted(set(map(str, names)) - wanted):
            raise ValueError(f"unknown inputs {unknown}; the model takes {sorted(wanted)}")


def read_signatures(version_directory: str | os.PathLike):
    """The signatures for predictions of a SavedModel.

    Args:
        version_directory: holds `saved_model.pb`.

    Returns:
        ({name: Signature}, {name: its SignatureDef}).

    Raises:
        ValueError: no SavedModel, one without such signatures, or one that would run Python or
            read and write files here.
    """
    path = pathlib.Path(version_directory, "saved_model.pb")
    proto = saved_model_pb2.SavedModel()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # of protobuf, or of the file system
        raise ValueError(f"{path} is no SavedModel: {error}") from error
    graphs = [graph for graph in proto.meta_graphs if "serve" in graph.meta_info_def.tags]
    if not graphs:
        raise ValueError(f"{path} has no graph for serving; write it with kdist.serving.export")
    protos = {
        name: signature
        for name, signature in graphs[0].signature_def.items()
        if signature.method_name == _PREDICT and signature.inputs and signature.outputs
    }
    if not protos:
        raise ValueError(f"{path} has no signature for predictions; write it with one")
    check_safe(path, graphs[0], protos)
    return {name: _signature_of(proto) for name, proto in protos.items()}, protos


def _signature_of(proto):
    return Signature(
        {name: _spec_of(proto.inputs[name]) for name in sorted(proto.inputs)},
        {name: _spec_of(proto.outputs[name]) for name in sorted(proto.outputs)},
    )


def _spec_of(info):
    shape = tuple(None if size.size < 0 else size.size for size in info.tensor_shape.dim)
    return TensorSpec(
        None if info.tensor_shape.unknown_rank else shape,
        np.dtype(tf.as_dtype(info.dtype).as_numpy_dtype),
        info.name,
    )


def _said(shape):
    return "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"
