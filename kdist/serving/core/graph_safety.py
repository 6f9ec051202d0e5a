"""Rejects graphs that would run Python code or access files of the server."""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping

# Matched against the start of operation names.
_UNSAFE = re.compile(
    ".*(PyFunc|ReadFile|WriteFile|MatchingFiles|TextLine|TFRecord|FixedLengthRecord|"
    r"(CSV|LMDB|Sql|Load|Save|Cache|DataService|Snapshot\w*)Dataset)|"
    "WholeFileReader|LMDBReader|GenerateVocabRemapping|LoadAndRemapMatrix|ImmutableConst|"
    "CreateSummary|Debug(Identity|NanCount|NumericSummary$)|Rpc(Call|Client|Server)|RegisterDataset"
)
# Every SavedModel uses these to load and save its variables; a prediction does not need them.
_CHECKPOINT_OPS = re.compile("Save|Restore|MergeV2Checkpoints")
_TABLE_OPS = re.compile("InitializeTableFromTextFile")
# Collections, and the signature, with the operations that initialize a graph of TensorFlow 1.
_INITIALIZERS = ("saved_model_main_op", "legacy_init_op")
_INITIALIZER_SIGNATURE = "__saved_model_init_op"
# Functions of resources that TensorFlow calls while it loads or frees a model.
_LOADING_FUNCTIONS = {"_create_resource", "_initialize", "_destroy_resource"}


def check_safe(path: str | os.PathLike, graph, signatures: Mapping) -> None:
    """Raises ValueError if the MetaGraphDef of the SavedModel at `path` is not safe to load.

    It is safe if none of its operations runs Python code or accesses files, and all assets lie
    inside the model. Checkpoint operations are allowed unless `signatures` ({name: SignatureDef}),
    or what TensorFlow calls while it loads the model, need them; the restore operation of a graph
    of TensorFlow 1 may read the model's own variables.
    """
    bodies = [graph.graph_def.node, *(each.node_def for each in graph.graph_def.library.function)]
    nodes = [node for body in bodies for node in body]
    unsafe = {node.op for node in nodes if _UNSAFE.match(node.op) or _names_a_file(node)}
    assets = {_node_name(asset.tensor_info.name) for asset in graph.asset_file_def}
    unsafe |= {node.op for body in bodies for node in _tables_of_outside_files(body, assets)}
    outputs = [info.name for each in signatures.values() for info in each.outputs.values()]
    loading = _called_while_loading(graph.object_graph_def)
    called = _called(graph.graph_def, outputs + _initializers(graph), loading)
    unsafe |= {node.op for node in called if _CHECKPOINT_OPS.match(node.op)}
    unsafe |= {node.op for node in _unsafe_restores(graph)}
    if unsafe:
        raise ValueError(
            f"{path} is not loaded: its operations {sorted(unsafe)} would run Python code or touch "
            "files of the server; export the model without them (tf.py_function, tf.io.read_file …)"
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


def _tables_of_outside_files(nodes, assets):
    """Yields lookup tables that read a file which is not an asset of the model."""
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        if _TABLE_OPS.match(node.op):
            name = _node_name(node.input[1])
            file_node = by_name.get(name)  # None for an argument
            if file_node is not None and name not in assets:
                yield node


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


def _unsafe_restores(graph):
    """Yields what the restore operation would do besides reading the model's own variables."""
    saver = graph.saver_def
    file = _node_name(saver.filename_tensor_name)
    in_main_graph = {node.name for node in graph.graph_def.node}
    for node in _called(graph.graph_def, [saver.restore_op_name], ()):
        if node.op == "RestoreV2":
            # In a function, the name is an argument, which the caller has from `file`.
            if node.name in in_main_graph and _node_name(node.input[0]) != file:
                yield node
        elif _CHECKPOINT_OPS.match(node.op):
            yield node


def _called(graph_def, names: Iterable[str], extra_functions: Iterable[str]):
    """Returns all nodes that nodes or extra functions depend on, across function calls."""
    by_name = {node.name: node for node in graph_def.node}
    functions = {function.signature.name: function for function in graph_def.library.function}
    names, seen, called = [*names], set(), []
    while names:
        name = _node_name(names.pop())
        if name not in seen and name in by_name:
            seen.add(name)
            called.append(by_name[name])
            names += by_name[name].input
    entered = functions.keys() & set(extra_functions)
    called += [node for name in entered for node in functions[name].node_def]
    ready = 0
    while ready < len(called):
        for name in _functions_of(called[ready]) & functions.keys() - entered:
            entered.add(name)
            called += functions[name].node_def
        ready += 1
    return called


def _functions_of(node):
    """Returns the functions that a node may call, by its attributes or its operation name."""
    values = node.attr.values()
    found = {value.func.name for value in values} | {node.op}
    return found | {function.name for value in values for function in value.list.func}
