"""Loads mutated SavedModels beside a good one, as the server does, and computes with them.

python -m tests.adversary.mutated_models DIRECTORY FIRST CASES

Prints a line as JSON for each case before and after it is loaded, so that the last line names a
case that ends the process. Mutations reach for the files in DIRECTORY/victim; none may be touched.
"""

import json
import os
import pathlib
import random
import shutil
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.client import pywrap_tf_session

from kdist.serving.engine.in_process import LoadedVersion, warm_up

# Operations that touch files by a name in their first input, with further inputs by their types.
REACHING = {
    "ReadFile": (),
    "WriteFile": (tf.string,),
    "MatchingFiles": (),
    "TextLineDataset": (tf.string, tf.int64),
    "TFRecordDataset": (tf.string, tf.int64),
    "MergeV2Checkpoints": (tf.string,),
    "CacheDatasetV2": (tf.string,),
    "SaveV2": (tf.string, tf.string),
    "RestoreV2": (tf.string, tf.string),
    "InitializeTableFromTextFileV2": (tf.string,),
    "FileSystemSetConfiguration": (tf.string, tf.string),
    "CreateSummaryFileWriter": (tf.string, tf.int32),
}


def all_operations():
    operations = op_def_pb2.OpList()
    operations.ParseFromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return sorted(operation.name for operation in operations.op)


def save_models(directory):
    """Writes a model with two signatures, one with a file of words, and one of TensorFlow 1."""
    module = tf.Module()
    module.w = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    numbers = tf.function(
        lambda a: {"y": tf.cond(tf.reduce_sum(a) > 0, lambda: a @ module.w, lambda: a)},
        input_signature=[tf.TensorSpec((None, 2), name="a")],
    )
    texts = tf.function(
        lambda s: {"n": tf.strings.length(s)}, input_signature=[tf.TensorSpec((None,), tf.string)]
    )
    signatures = {"serving_default": numbers, "texts": texts}
    tf.saved_model.save(module, str(directory / "numbers"), signatures=signatures)
    (directory / "words.txt").write_text("one\ntwo\n")
    words = keras.layers.StringLookup(vocabulary=str(directory / "words.txt"))
    model = keras.Sequential([keras.Input((), dtype="string"), words])
    model.export(str(directory / "words"), format="tf_saved_model", verbose=False)
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        x = v1.placeholder(tf.float32, (None,))
        weight = v1.get_variable("w", (), use_resource=True)
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(directory / "old"), {"x": x}, {"y": x * weight})


class Mutator:
    """Mutates files and graphs of a SavedModel at random places."""

    def __init__(self, seed, victim, operations):
        self.random = random.Random(seed)
        self.victim = victim
        self.operations = operations

    def mutate(self, path):
        """Mutates the SavedModel in a directory; returns what was done."""
        done = []
        for _ in range(self.random.choice([1, 1, 1, 2, 4])):
            change = self.random.choice(
                [
                    self.bytes_of_a_file,
                    self.end_of_a_file,
                    *[self.operation, self.input, self.function, self.attribute] * 3,
                    *[self.reaching_operation] * 6,
                    *[self.loaders_function, self.bound_object, self.asset, self.child] * 2,
                ]
            )
            file = path / "saved_model.pb"
            proto = saved_model_pb2.SavedModel()
            try:
                proto.ParseFromString(file.read_bytes())
                graph = proto.meta_graphs[0]
            except Exception:  # damaged by a mutation before
                break
            if change in (self.bytes_of_a_file, self.end_of_a_file):
                change(path)
            else:
                change(graph)
                file.write_bytes(proto.SerializeToString())
            done.append(change.__name__)
        return done

    def a_file(self, path):
        return self.random.choice(sorted(each for each in path.rglob("*") if each.is_file()))

    def bytes_of_a_file(self, path):
        file = self.a_file(path)
        content = bytearray(file.read_bytes() or b"x")
        for _ in range(self.random.randint(1, 8)):
            content[self.random.randrange(len(content))] = self.random.randrange(256)
        file.write_bytes(content)

    def end_of_a_file(self, path):
        file = self.a_file(path)
        content = file.read_bytes()
        file.write_bytes(content[: self.random.randrange(len(content) + 1)])

    def bodies(self, graph):
        library = graph.graph_def.library.function
        return [graph.graph_def.node, *(each.node_def for each in library)]

    def a_node(self, graph):
        body = self.random.choice([each for each in self.bodies(graph) if each])
        return body, self.random.choice(list(body))

    def operation(self, graph):
        _, node = self.a_node(graph)
        node.op = self.random.choice(self.operations)

    def input(self, graph):
        body, node = self.a_node(graph)
        other = self.random.choice(list(body)).name
        name = self.random.choice([other, f"{other}:0", f"^{other}", f"{other}:output:0", "", ":"])
        if node.input and self.random.random() < 0.7:
            node.input[self.random.randrange(len(node.input))] = name
        else:
            node.input.append(name)

    def function(self, graph):
        names = [each.signature.name for each in graph.graph_def.library.function] or ["none"]
        calls = [
            value
            for body in self.bodies(graph)
            for node in body
            for value in node.attr.values()
            if value.func.name
        ]
        if calls:
            self.random.choice(calls).func.name = self.random.choice(names)

    def attribute(self, graph):
        _, node = self.a_node(graph)
        for name in sorted(node.attr):
            if self.random.random() < 0.5:
                value = node.attr[name]
                if value.HasField("type"):
                    value.type = self.random.choice([1, 3, 7, 9, 20, 21, 99])
                elif value.HasField("i"):
                    value.i = self.random.choice([-1, 0, 1, 2**31, 2**62])
                elif value.HasField("s"):
                    value.s = self.random.choice([b"", b"\xff", str(self.victim / "a").encode()])
                elif value.HasField("shape"):
                    value.shape.dim.add(size=self.random.choice([-1, 0, 3]))

    def reaching_operation(self, graph):
        """Adds an operation that touches the victim, and has another node wait for it."""
        body, node = self.a_node(graph)
        name, rest = self.random.choice(sorted(REACHING.items(), key=lambda each: each[0]))
        constants = [(tf.string, str(self.victim / self.random.choice(["a", "new"])))]
        constants += [(dtype, "x" if dtype == tf.string else 0) for dtype in rest]
        added = body.add(op=name, name=f"reach{len(body)}")
        in_main = body is graph.graph_def.node
        for dtype, value in constants:
            constant = body.add(op="Const", name=f"reach{len(body)}")
            constant.attr["dtype"].type = dtype.as_datatype_enum
            constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
            added.input.append(constant.name if in_main else f"{constant.name}:output:0")
        node.input.append(f"^{added.name}")

    def loaders_function(self, graph):
        names = [each.signature.name for each in graph.graph_def.library.function] or ["none"]
        for node in graph.object_graph_def.nodes:
            if node.HasField("function") and self.random.random() < 0.5:
                for i in range(len(node.function.concrete_functions)):
                    node.function.concrete_functions[i] = self.random.choice(names)

    def bound_object(self, graph):
        count = len(graph.object_graph_def.nodes)
        for each in graph.object_graph_def.concrete_functions.values():
            for i in range(len(each.bound_inputs)):
                if self.random.random() < 0.5:
                    each.bound_inputs[i] = self.random.choice([-1, count, *range(count)])

    def asset(self, graph):
        name = self.random.choice([str(self.victim / "a"), "../../victim/a", "", "."])
        if graph.asset_file_def:
            graph.asset_file_def[0].filename = name
        else:
            graph.asset_file_def.add(filename=name).tensor_info.name = self.a_node(graph)[1].name

    def child(self, graph):
        nodes = graph.object_graph_def.nodes
        if nodes:
            node = self.random.choice(list(nodes))
            names = ["_initialize", "_create_resource", "_destroy_resource", "signatures", "x"]
            node.children.add(
                node_id=self.random.choice([-1, len(nodes), *range(len(nodes))]),
                local_name=self.random.choice(names),
            )


def outcome(path):
    """Returns how the server would end with this model."""
    try:
        version = LoadedVersion(path)
        warm_up(version, version.signatures, [1])
    except Exception as error:  # the server names it in the state of the version
        refused = isinstance(error, ValueError) and "is not loaded" in str(error)
        return "refused" if refused else f"failed: {type(error).__name__}"
    return "loaded"


def main(directory, first, cases):
    directory = pathlib.Path(directory)
    save_models(directory)
    victim = directory / "victim"
    victim.mkdir()
    (victim / "a").write_text("precious")
    (victim / "new.index").write_text("precious too")
    neighbour = LoadedVersion(directory / "numbers")
    rows = {"a": np.ones((3, 2), "float32")}
    before = neighbour("serving_default", rows)["y"].tolist()
    operations = all_operations()
    for seed in range(int(first), int(first) + int(cases)):
        base = ("numbers", "words", "old")[seed % 3]
        mutated = directory / "mutated"
        shutil.copytree(directory / base, mutated)
        done = Mutator(seed, victim, operations).mutate(mutated)
        content = {each: each.read_bytes() for each in mutated.rglob("*") if each.is_file()}
        print(json.dumps({"case": seed, "base": base, "done": done}), flush=True)
        result = outcome(mutated)
        harm = [
            *(each.name for each in victim.iterdir() if each.name not in ("a", "new.index")),
            *(each.name for each in victim.iterdir() if not each.read_text().startswith("prec")),
            *(each.name for each in mutated.rglob("*") if each.is_file() and each not in content),
            *(each.name for each, was in content.items() if each.read_bytes() != was),
        ]
        if neighbour("serving_default", rows)["y"].tolist() != before:
            harm.append("the numbers of another model")
        print(json.dumps({"case": seed, "outcome": result, "harm": harm}), flush=True)
        shutil.rmtree(mutated)


if __name__ == "__main__":
    main(*sys.argv[1:])
