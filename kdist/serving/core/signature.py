"""Signatures of a SavedModel, read from its files without loading it."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from kdist.serving.core.graph_safety import check_safe
from kdist.serving.core.model_directory import SAVED_MODEL
from kdist.serving.core.requests import count_rows

SERVING_DEFAULT = "serving_default"
_PREDICT = "tensorflow/serving/predict"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor."""

    # None for each size that may vary; None as a whole if the rank may vary
    shape: tuple[int | None, ...] | None
    dtype: np.dtype  # `object` for strings, which are bytes
    name: str  # in the graph

    @property
    def is_text(self) -> bool:
        """True if the tensor holds strings."""
        return self.dtype == object

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises ValueError if an array of this shape does not match."""
        if self.shape is None:
            return
        if len(shape) != len(self.shape) or any(
            want is not None and want != have for want, have in zip(self.shape, shape, strict=True)
        ):
            raise ValueError(
                f"input {name!r} has the shape {_shape_text(shape)}, and the model takes "
                f"{_shape_text(self.shape)}; the first counts the rows"
            )


@dataclasses.dataclass(frozen=True)
class Signature:
    """Named inputs and outputs of a model; the first dimension of each counts rows."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raises ValueError if a request does not match the signature."""
        self.check_names(arrays)
        for name, spec in self.inputs.items():
            spec.check(name, arrays[name].shape)
        count_rows(arrays)

    def select_outputs(self, names: Iterable[str]) -> list[str]:
        """Returns the outputs that a request asks for; all if it names none.

        Raises ValueError if the model lacks one of them.
        """
        if unknown := sorted(set(names) - set(self.outputs)):
            raise ValueError(f"unknown outputs {unknown}; the model has {list(self.outputs)}")
        return list(dict.fromkeys(names)) or list(self.outputs)

    def check_names(self, names) -> None:
        """Raises ValueError if inputs are missing or unknown."""
        wanted = set(self.inputs)
        if missing := sorted(wanted - set(names)):
            raise ValueError(f"inputs {missing} are missing; the model takes {sorted(wanted)}")
        if unknown := sorted(set(map(str, names)) - wanted):
            raise ValueError(f"unknown inputs {unknown}; the model takes {sorted(wanted)}")


def read_signatures(version_directory: str | os.PathLike):
    """Returns the signatures for predictions as ({name: Signature}, {name: SignatureDef}).

    Raises ValueError if `saved_model.pb` in the directory is not a SavedModel, has no such
    signatures, or could run code or touch files of the server (unless `TRUST_MODELS` allows it).
    """
    path = pathlib.Path(version_directory, SAVED_MODEL)
    proto = saved_model_pb2.SavedModel()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # raised by protobuf or the file system
        raise ValueError(f"{path} is not a SavedModel: {error}") from error
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
    return {name: _signature(proto) for name, proto in protos.items()}, protos


def _signature(proto):
    return Signature(
        {name: _spec(proto.inputs[name]) for name in sorted(proto.inputs)},
        {name: _spec(proto.outputs[name]) for name in sorted(proto.outputs)},
    )


def _spec(info):
    shape = tuple(None if size.size < 0 else size.size for size in info.tensor_shape.dim)
    return TensorSpec(
        None if info.tensor_shape.unknown_rank else shape,
        np.dtype(tf.as_dtype(info.dtype).as_numpy_dtype),
        info.name,
    )


def _shape_text(shape):
    return "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"
