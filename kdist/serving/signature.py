"""What a SavedModel's signature takes and gives, read from its files without loading it."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from kdist.serving.rows import rows_of

SERVING_DEFAULT = "serving_default"
_PREDICT = "tensorflow/serving/predict"
# Operations by which a model would run Python of this process, or read and write its files.
# By how their names begin; RestoreV2 is what variables are loaded by.
_UNSAFE = re.compile(
    "PyFunc|EagerPyFunc|ReadFile|WriteFile|MatchingFiles|WholeFileReader|TextLine|TFRecord|"
    "FixedLengthRecord|SqlDataset|LoadDataset|SaveDataset|CacheDataset|SnapshotDataset|"
    "DataServiceDataset|ImmutableConst|CreateSummary|DebugIdentityV|Rpc(Call|Client|Server)"
)


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

    def check(self, name: str, array: np.ndarray) -> None:
        """Raises ValueError where an array has another shape."""
        if self.shape is None:
            return
        if array.ndim != len(self.shape) or any(
            want is not None and want != have
            for want, have in zip(self.shape, array.shape, strict=True)
        ):
            raise ValueError(
                f"input {name!r} has the shape {_said(array.shape)}, and the model takes "
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
            spec.check(name, arrays[name])
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
    _check_safe(path, graphs[0].graph_def)
    protos = {
        name: signature
        for name, signature in graphs[0].signature_def.items()
        if signature.method_name == _PREDICT and signature.inputs and signature.outputs
    }
    if not protos:
        raise ValueError(f"{path} has no signature for predictions; write it with one")
    return {name: _signature_of(proto) for name, proto in protos.items()}, protos


def _check_safe(path, graph):
    nodes = [*graph.node]
    nodes += [node for function in graph.library.function for node in function.node_def]
    if found := sorted(
        {node.op for node in nodes if _UNSAFE.match(node.op) or _prints_to_file(node)}
    ):
        raise ValueError(
            f"{path} is not loaded: its operations {found} would run Python code or touch files of "
            "the server; export the model without them (tf.py_function, tf.io.read_file …)"
        )


def _prints_to_file(node):
    return node.op == "PrintV2" and node.attr["output_stream"].s.startswith(b"file:")


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
