"""Which graphs a server may load: none that run Python of its process or touch its files."""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping

# By how the names of operations begin.
_UNSAFE = re.compile(
    "PyFunc|EagerPyFunc|ReadFile|WriteFile|MatchingFiles|WholeFileReader|TextLine|TFRecord|"
    "FixedLengthRecord|SqlDataset|LoadDataset|SaveDataset|CacheDataset|SnapshotDataset|"
    "DataServiceDataset|ImmutableConst|CreateSummary|DebugIdentityV|Rpc(Call|Client|Server)"
)
# Each SavedModel loads and saves its variables by these; what predicts has no use for them.
_OF_CHECKPOINTS = re.compile("Save|Restore|MergeV2Checkpoints")


def check_safe(path: str | os.PathLike, graph, signatures: Mapping) -> None:
    """Refuses a graph that is not safe to load.

    Args:
        path: of the SavedModel, for the message.
        graph: its MetaGraphDef.
        signatures: {name: SignatureDef} that will be called.

    Raises:
        ValueError: an operation would run Python, or touch files, or an asset lies elsewhere.
    """
    nodes = [*graph.graph_def.node, *_nodes(graph.graph_def.library.function)]
    found = {node.op for node in nodes if _UNSAFE.match(node.op) or _prints_to_file(node)}
    called = _called(graph.graph_def, signatures)
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


def _nodes(functions: Iterable) -> list:
    return [node for function in functions for node in function.node_def]


def _prints_to_file(node):
    return node.op == "PrintV2" and node.attr["output_stream"].s.startswith(b"file:")


def _called(graph_def, signatures):
    """The nodes that signatures depend on, and those of all functions that these call."""
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
    ready, entered = 0, set()
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
