"""Which graphs a server may load: none that run Python of its process or touch its files."""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping

# What the names of operations contain, or how they begin.
_UNSAFE = re.compile(
    ".*(PyFunc|ReadFile|WriteFile|MatchingFiles|TextLine|TFRecord|FixedLengthRecord|"
    r"(CSV|LMDB|Sql|Load|Save|Cache|DataService|Snapshot\w*)Dataset)|"
    "WholeFileReader|LMDBReader|GenerateVocabRemapping|LoadAndRemapMatrix|ImmutableConst|"
    "CreateSummary|Debug(Identity|NanCount|NumericSummary$)|Rpc(Call|Client|Server)"
)
# Each SavedModel loads and saves its variables by these; what predicts has no use for them.
_OF_CHECKPOINTS = re.compile("Save|Restore|MergeV2Checkpoints")
_OF_TABLES = re.compile("InitializeTableFromTextFile")
# Functions of resources that are called while a model is loaded, or freed.
_OF_LOADING = {"_create_resource", "_initialize", "_destroy_resource"}


def check_safe(path: str | os.PathLike, graph, signatures: Mapping) -> None:
    """Refuses a graph that is not safe to load.

    Args:
        path: of the SavedModel, for the message.
        graph: its MetaGraphDef.
        signatures: {name: SignatureDef} that will be called.

    Raises:
        ValueError: an operation would run Python, or touch files, or an asset lies elsewhere.
    """
    bodies = [graph.graph_def.node, *(each.node_def for each in graph.graph_def.library.function)]
    nodes = [node for body in bodies for node in body]
    found = {node.op for node in nodes if _UNSAFE.match(node.op) or _names_a_file(node)}
    assets = {asset.tensor_info.name.partition(":")[0] for asset in graph.asset_file_def}
    found |= {node.op for body in bodies for node in _tables_of_other_files(body, assets)}
    called = _called(graph.graph_def, signatures, _called_while_loading(graph.object_graph_def))
    found |= {node.op for node in called if _OF_CHECKPOINTS.match(node.op)}
    if found:
        raise ValueError(
            f"{path} is not loaded: its operations {sorted(found)} would run Python code or touch "
            "files of the server; export the model without them (tf.py_function, tf.io.read_file …)"
        )
    for asset in graph.asset_file_def:
        name = pathlib.PurePosixPath(asset.filename)
        if name.is_absolute() or ".." in name.parts:
            raise ValueError(f"{path} is not loaded: its asset {asset.filename!r} leads out of it")


def _names_a_file(node):
    if node.op == "PrintV2":
        return node.attr["output_stream"].s.startswith(b"file:")
    if "descriptor_source" not in node.attr:
        return False
    # Of protobuf messages: a path, if it is none of these.
    described = node.attr["descriptor_source"].s
    return bool(described) and not described.startswith((b"local://", b"bytes://"))


def _tables_of_other_files(nodes, assets):
    """Those whose words are in a file that the graph names, and that is no asset of the model."""
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        if _OF_TABLES.match(node.op):
            name = node.input[1].partition(":")[0]
            of_file = by_name.get(name)  # else an argument
            if of_file is not None and name not in assets:
                yield node


def _called_while_loading(objects):
    """Names of the functions of resources that the loader itself calls."""
    for node in objects.nodes:
        for child in node.children:
            if child.local_name in _OF_LOADING:
                function = objects.nodes[child.node_id]
                yield from function.function.concrete_functions
                yield function.bare_concrete_function.concrete_function_name


def _called(graph_def, signatures, more: Iterable[str]):
    """The nodes that signatures depend on, and those of all functions that these call, and more."""
    by_name = {node.name: node for node in graph_def.node}
    functions = {function.signature.name: function for function in graph_def.library.function}
    outputs = [info.name for each in signatures.values() for info in each.outputs.values()]
    names, seen, called = [*outputs], set(), []
    while names:
        name = names.pop().removeprefix("^").partition(":")[0]
        if name not in seen and name in by_name:
            seen.add(name)
            called.append(by_name[name])
            names += by_name[name].input
    entered = functions.keys() & set(more)
    called += [node for name in entered for node in functions[name].node_def]
    ready = 0
    while ready < len(called):
        for name in _functions_of(called[ready]) & functions.keys() - entered:
            entered.add(name)
            called += functions[name].node_def
        ready += 1
    return called


def _functions_of(node):
    """The functions that a node may call: of attributes, or by its operation's name."""
    values = node.attr.values()
    found = {value.func.name for value in values} | {node.op}
    return found | {function.name for value in values for function in value.list.func}
