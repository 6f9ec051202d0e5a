"""Signatures of a SavedModel, read from its files without loading it.

Graphs that could run code or access files of the server are rejected.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.framework import op_def_registry

from kdist.serving.core.requests import count_rows
from kdist.serving.core.settings import TRUST_MODELS

# Stateful operations whose state is memory of the process. TensorFlow marks all others that reach
# beyond their inputs (files, hosts, Python, other processes) as stateful too, but for `_UNSAFE`.
_OWN_STATE = re.compile(
    # Variables, and what optimizers do to them.
    "Variable(V2)?|VarHandleOp|VarIsInitializedOp|VariableShape|TemporaryVariable|ReadVariableOp|"
    r"Assign(Add|Sub)?VariableOp|DisableCopyOnRead|Resource(Gather|Scatter|StridedSlice)\w*|"
    r"Resource(CountUpTo|(Sparse)?Apply\w+|(Conditional)?Accumulator\w*)|"
    # Random numbers.
    r"Random(?!Dataset)\w+|(Parameterized)?TruncatedNormal|Multinomial|Rng(ReadAnd)?Skip|"
    r"StatefulRandom\w+|Stateful(Standard|Truncated)Normal(V2)?|StatefulUniform\w*|"
    r"NonDeterministicInts|StatelessRandomGetAlg|SampleDistortedBoundingBox(V2)?|"
    r"(All|Log|Learned|(Thread)?Un)\w*CandidateSampler|"
    r"(Anonymous|Delete|Dummy)?(Random)?SeedGenerator|"
    # Control flow and calls.
    "(Risc)?While|If|Case|StatefulPartitionedCall|Assert|XlaCallModule|Mutex(Lock|V2)|"
    "ConsumeMutexLock|"
    # Tables; those that read a file are checked by `_tables_of_outside_files`.
    r"(Anonymous)?(Mutable)?(Dense)?HashTable(OfTensors)?(V2)?|LookupTable\w+V2|"
    "InitializeTable(V2|FromTextFileV2|FromDataset)|DestroyResourceOp|"
    # Lists, queues, and stacks in memory.
    r"TensorArray\w*|Stack(Close|Pop|Push)?(V2)?|(Padding)?FIFOQueue(V2)?|PriorityQueue(V2)?|"
    r"Queue(Close|Dequeue|Enqueue|Is|Size)\w*V2|Barrier|(Ordered)?Map(Uns|S)tage\w*|"
    "(Uns|S)tage|Add(Many)?SparseToTensorsMap|TakeManySparseFromTensorsMap|"
    # Datasets in memory; their functions are checked as all functions are.
    r"(Tensor|TensorSlice|SparseTensorSlice|Range|Random|Reduce|List|Shuffle\w*|GlobalShuffle|"
    r"Generator|ThreadPool|GroupByReducer)Dataset(V\d)?|DatasetToSingleElement|"
    r"(Anonymous|Delete|Make|OneShot)?Iterator(GetNext\w*|V\d)?|DummyMemoryCache|"
    # Others: logs, checks, recurrent layers, time, and summaries without a writer of files.
    r"Print(V2)?|CheckNumerics(V2)?|GuaranteeConst|Empty|DeepCopy|DeviceIndex|Timestamp|"
    r"CudnnRNN\w*|SummaryWriter|Write\w+Summary|(Flush|Close)SummaryWriter"
)
# Matched against the start of operation names.
_UNSAFE = re.compile(
    ".*(PyFunc|ReadFile|WriteFile|MatchingFiles|TextLine|TFRecord|FixedLengthRecord|"
    r"(CSV|LMDB|Sql|Load|Save|Cache|DataService|Snapshot\w*)Dataset)|Snapshot|"
    "GenerateVocabRemapping|ImmutableConst|Debug(Identity|NanCount|NumericSummary)|"
    "RegisterDataset|MlirPassthroughOp|Abort|_(?!EagerConst)"
)
# Every SavedModel uses these to load and save its variables; a prediction does not need them.
_CHECKPOINT_OPS = re.compile("(Save|Restore)(V2|Slices?)?|MergeV2Checkpoints")
_TABLE_OPS = re.compile("InitializeTableFromTextFile")
# Collections, and the signature, with the operations that initialize a graph of TensorFlow 1.
_INITIALIZERS = ("saved_model_main_op", "legacy_init_op")
_INITIALIZER_SIGNATURE = "__saved_model_init_op"
# Functions of resources that TensorFlow calls while it loads or frees a model.
_LOADING_FUNCTIONS = {"_create_resource", "_initialize", "_destroy_resource"}

SERVING_DEFAULT = "serving_default"
_PREDICT = "tensorflow/serving/predict"


def check_safe(path: str | os.PathLike, graph, signatures: Mapping) -> None:
    """Raises ValueError if the MetaGraphDef of the SavedModel at `path` is not safe to load.

    It is safe if TensorFlow knows all of its operations, none of them can reach beyond the memory
    of the process, and all assets lie inside the model. Checkpoint operations are allowed unless
    `signatures` ({name: SignatureDef}), or what TensorFlow calls while it loads the model, need
    them; the restore operation of a graph of TensorFlow 1 may read the model's own variables. With
    `TRUST_MODELS` in the environment, all models are safe.
    """
    if os.environ.get(TRUST_MODELS) == "1":
        return
    functions = {each.signature.name: each for each in graph.graph_def.library.function}
    bodies = [graph.graph_def.node, *(each.node_def for each in functions.values())]
    nodes = [node for body in bodies for node in body]
    unsafe = {node.op for node in nodes if _reaches_out(node, functions) or _names_a_file(node)}
    outputs = [info.name for each in signatures.values() for info in each.outputs.values()]
    predicting = _reached(graph.graph_def, functions, outputs, ())
    if graph.HasField("object_graph_def"):
        called_by_loader = _called_while_loading(graph.object_graph_def)
        loading = _reached(graph.graph_def, functions, (), called_by_loader)
    else:  # TensorFlow 1 runs operations of the main graph
        loading = _reached(graph.graph_def, functions, _initializers(graph), ())
    unsafe |= {n.op for _, n in predicting if _CHECKPOINT_OPS.match(n.op) or _TABLE_OPS.match(n.op)}
    unsafe |= {node.op for _, node in loading if _CHECKPOINT_OPS.match(node.op)}
    unsafe |= {node.op for node in _unsafe_restores(graph, functions)}
    unsafe |= {node.op for node in _tables_of_outside_files(graph, functions, loading)}
    if unsafe:
        raise ValueError(
            f"{path} is not loaded: its operations {sorted(unsafe)} could run code or touch files "
            "of the server; export the model without them (tf.py_function, tf.io.read_file …), or "
            f"allow all models everything with --trust_models ({TRUST_MODELS}=1) if you trust "
            "their authors"
        )
    for asset in graph.asset_file_def:
        name = pathlib.PurePosixPath(asset.filename)
        if name.is_absolute() or ".." in name.parts:
            raise ValueError(f"{path} is not loaded: its asset {asset.filename!r} leads out of it")


def _node_name(tensor):
    """Returns the name of the node of a tensor, or of a control input."""
    return tensor.removeprefix("^").partition(":")[0]


def _names_a_file(node):
    if node.op == "PrintV2":
        return node.attr["output_stream"].s.startswith(b"file:")
    if "descriptor_source" not in node.attr:
        return False
    # The source of a protobuf descriptor is a path unless it has one of these prefixes.
    described = node.attr["descriptor_source"].s
    return bool(described) and not described.startswith((b"local://", b"bytes://"))


def _reaches_out(node, functions):
    if node.op in functions or _CHECKPOINT_OPS.fullmatch(node.op):
        return False
    known = op_def_registry.get(node.op)
    if known is None or _UNSAFE.match(node.op):
        return True
    return known.is_stateful and not _OWN_STATE.fullmatch(node.op)


def _tables_of_outside_files(graph, functions, loading):
    """Yields what would read a file that is no asset into a table while the model is loaded."""
    assets = {_node_name(asset.tensor_info.name) for asset in graph.asset_file_def}
    called = set().union(*(_functions_of(node) for _, node in loading))
    for function, node in loading:
        if not _TABLE_OPS.match(node.op):
            continue
        if function is None:
            is_asset = _node_name(node.input[1]) in assets
        else:
            # A function that others call too gets files from them, not only from the loader.
            is_asset = function not in called and node.input[1] in _arguments_with_assets(
                graph.object_graph_def, functions[function].signature
            )
        if not is_asset:
            yield node


def _arguments_with_assets(objects, signature):
    """Returns the arguments of a function to which the loader binds assets of the model."""
    bound = objects.concrete_functions[signature.name].bound_inputs
    # Bound objects follow all other arguments.
    names = [argument.name for argument in signature.input_arg][-len(bound) :] if bound else []
    return {
        name
        for name, number in zip(names, bound, strict=False)
        if 0 <= number < len(objects.nodes) and objects.nodes[number].HasField("asset")
    }


def _called_while_loading(objects):
    """Yields the names of the resource functions that the loader itself calls."""
    for node in objects.nodes:
        called = [
            child.node_id for child in node.children if child.local_name in _LOADING_FUNCTIONS
        ]
        called += [saveable.restore_function for saveable in node.saveable_objects.values()]
        for number in called:
            if 0 <= number < len(objects.nodes):
                function = objects.nodes[number]
                yield from function.function.concrete_functions
                yield function.bare_concrete_function.concrete_function_name


def _initializers(graph):
    """Returns the names of nodes that are run after the variables are restored."""
    names = []
    if signature := graph.signature_def.get(_INITIALIZER_SIGNATURE):
        names += [info.name for info in signature.outputs.values()]
    for name in _INITIALIZERS:
        if collection := graph.collection_def.get(name):
            names += collection.node_list.value
    return names


def _unsafe_restores(graph, functions):
    """Yields what the restore operation would do besides reading the model's own variables."""
    saver = graph.saver_def
    file = _node_name(saver.filename_tensor_name)
    for function, node in _reached(graph.graph_def, functions, [saver.restore_op_name], ()):
        if node.op == "RestoreV2":
            # In a function, the name is an argument, which the caller has from `file`.
            if function is None and _node_name(node.input[0]) != file:
                yield node
        elif _CHECKPOINT_OPS.match(node.op):
            yield node


def _reached(graph_def, functions, names: Iterable[str], entered: Iterable[str]):
    """Returns what nodes and functions need, across calls, as [(function or None, node)]."""
    by_name = {node.name: node for node in graph_def.node}
    names, seen = [*names], set()
    reached: list[tuple[str | None, Any]] = []
    while names:
        name = _node_name(names.pop())
        if name not in seen and name in by_name:
            seen.add(name)
            reached.append((None, by_name[name]))
            names += by_name[name].input
    found = functions.keys() & set(entered)
    reached += [(name, node) for name in found for node in functions[name].node_def]
    ready = 0
    while ready < len(reached):
        for name in _functions_of(reached[ready][1]) & functions.keys() - found:
            found.add(name)
            reached += [(name, node) for node in functions[name].node_def]
        ready += 1
    return reached


def _functions_of(node):
    """Returns the functions that a node may call, by its attributes or its operation name."""
    values = node.attr.values()
    found = {value.func.name for value in values} | {node.op}
    return found | {function.name for value in values for function in value.list.func}


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
    path = pathlib.Path(version_directory, "saved_model.pb")
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
