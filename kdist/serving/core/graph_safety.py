"""Rejects graphs that could run code or access files of the server."""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tensorflow.python.framework import op_def_registry

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
