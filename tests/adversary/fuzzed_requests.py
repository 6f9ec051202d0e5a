"""Random REST and gRPC requests of all degrees of damage, each a function of its number."""

import json
import random

import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow_serving.apis import predict_pb2

NAMES = ["first", "second", "mixed", "none", "", "first:predict", "..", "%2e%2e", "a" * 300]
SIGNATURES = ["serving_default", "text", "pixels", "any", "halves", "", "x", "\0", "é" * 99]
ROOT = "/v1/models"


def json_value(choice: random.Random, depth=0):
    """Returns a random JSON value, mostly of numbers."""
    kind = choice.random()
    if depth < 4 and kind < 0.3:
        return [json_value(choice, depth + 1) for _ in range(choice.randrange(5))]
    if depth < 4 and kind < 0.4:
        keys = choice.sample(["a", "n", "s", "x", "b64", "inputs", "instances", ""], 2)
        return {key: json_value(choice, depth + 1) for key in keys}
    return choice.choice(
        [0, 1, -1, 0.5, 1e300, -1e-300, 2**31, 2**63, 10**40, True, None, "", "x", "AAAA", "\ud7ff"]
    )


def mutated(choice: random.Random, value):
    """Returns a JSON value with a random part replaced."""
    if isinstance(value, list) and value and choice.random() < 0.8:
        i = choice.randrange(len(value))
        return [*value[:i], mutated(choice, value[i]), *value[i + choice.choice([0, 1, 1, 1]) :]]
    if isinstance(value, dict) and value and choice.random() < 0.8:
        key = choice.choice(sorted(value))
        new_key = choice.choice([key, key, key, "x", "inputs"])
        return {**value, new_key: mutated(choice, value[key])}
    return json_value(choice)


GOOD_BODIES = [
    {"instances": [[0.5, 1, 2, 3]]},
    {"instances": [[0.5, 1, 2, 3]] * 9},
    {"inputs": {"inputs": [[1, 2, 3, 4]]}},
    {"inputs": {"a": [[1.0, 2.0]], "n": [3]}},
    {"instances": [{"a": [1, 2], "n": 3}, {"a": [1, 2], "n": 4}]},
    {"signature_name": "text", "instances": ["one", {"b64": "AAEC"}]},
    {"signature_name": "pixels", "instances": [[[1, 2], [3, 255]]]},
    {"signature_name": "any", "inputs": [[1.5]]},
]


def _body(choice):
    document = choice.choice(GOOD_BODIES)
    for _ in range(choice.choice([0, 1, 1, 2, 3])):
        document = mutated(choice, document)
    body = json.dumps(document).encode("utf-8", "surrogatepass")
    if choice.random() < 0.3:
        body = damaged(choice, body)
    return body


def damaged(choice: random.Random, data: bytes) -> bytes:
    """Returns bytes with some replaced, added, or left out."""
    data = bytearray(data)
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(data) + 1)
        data[at : at + choice.choice([0, 1, 1, 5])] = choice.randbytes(choice.choice([0, 1, 1, 7]))
    return bytes(data)


def rest_request(number: int) -> bytes:
    """Returns the bytes of an HTTP request that ends its connection, or of a damaged one."""
    choice = random.Random(number)
    method = choice.choice(
        ["POST"] * 9 + ["GET", "HEAD", "PUT", "DELETE", "CONNECT", "get", "P\0T"]
    )
    name = choice.choice(NAMES[:3] * 5 + NAMES)
    path = choice.choice(
        [f"{ROOT}/{name}:predict"] * 9
        + [f"{ROOT}/{name}", f"{ROOT}/{name}/metadata", f"{ROOT}/{name}/versions/1:predict", ROOT]
        + [f"{ROOT}/{name}/versions/{n}" for n in ("0", "-1", "9" * 40, "x", "1_0", "٣")]
        + [
            "/",
            "*",
            "/metrics",
            "/healthz",
            "//",
            "/..",
            "http://x/v1/models",
            "/%",
            "/?" + "q" * 99,
        ]
    )
    body = _body(choice)
    length = choice.choice(
        [len(body)] * 20 + [0, len(body) + 1, -1, 10**30, "1,1", "0x5", "+3", ""]
    )
    headers = [f"Content-Length: {length}"]
    if choice.random() < 0.2:
        headers += choice.sample(
            [
                "Transfer-Encoding: chunked",
                "Transfer-Encoding: gzip, chunked",
                "Content-Length: 5",
                "Expect: 100-continue",
                "Upgrade: h2c",
                "Connection: upgrade",
                "Content-Encoding: gzip",
                "X: " + "y" * 5000,
                "Bad Name: 1",
                ": 1",
                " folded",
                "Host: other\r",
            ],
            choice.randint(1, 3),
        )
        choice.shuffle(headers)
    if "Transfer-Encoding: chunked" in headers and choice.random() < 0.7:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        headers = [each for each in headers if not each.startswith("Content-Length")]
    version = choice.choice(["HTTP/1.1"] * 15 + ["HTTP/1.0", "HTTP/2.0", "HTTP/9", ""])
    lines = [f"{method} {path} {version}", "Host: localhost", "Connection: close", *headers, "", ""]
    data = "\r\n".join(lines).encode() + body
    return damaged(choice, data) if choice.random() < 0.1 else data


VALID_INPUTS: list[tuple[str, str, dict]] = [  # model, signature, {input: (value, dtype)}
    ("first", "", {"inputs": ([[0.5, 1, 2, 3]], tf.float32)}),
    ("second", "serving_default", {"inputs": ([[0.5] * 4] * 9, tf.float32)}),
    ("mixed", "", {"a": ([[1.0, 2.0]], tf.float32), "n": ([3], tf.int32)}),
    ("mixed", "text", {"s": (["one", "two"], tf.string)}),
    ("mixed", "pixels", {"p": ([[[1, 2], [3, 255]]], tf.uint8)}),
    ("mixed", "any", {"x": ([[1.5]], tf.float32)}),
    ("mixed", "halves", {"x": ([1.5], tf.float32)}),
]


def grpc_request(number: int) -> bytes:
    """Returns a serialized PredictRequest, or a damaged one."""
    choice = random.Random(number)
    model, signature, inputs = choice.choice(VALID_INPUTS)
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    for name, (value, dtype) in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value, dtype))
    for _ in range(choice.choice([0, 1, 1, 2, 4])):
        kind = choice.random()
        if kind < 0.1:
            request.model_spec.name = choice.choice(NAMES)
        elif kind < 0.2:
            request.model_spec.signature_name = choice.choice(SIGNATURES)
        elif kind < 0.25:
            request.model_spec.version.value = choice.choice([0, 1, 2, -1, 2**62])
        elif kind < 0.3:
            request.model_spec.version_label = choice.choice(["stable", ""])
        elif kind < 0.35:
            request.output_filter.append(choice.choice(["y", "product", ""]))
        elif kind < 0.4:
            request.inputs[choice.choice(["a", "x", ""])].dtype = choice.randrange(30)
        elif kind < 0.45:
            request.inputs.pop(choice.choice(sorted(request.inputs) or ["x"]), None)
        elif request.inputs:
            _change_tensor(choice, request.inputs[choice.choice(sorted(request.inputs))])
    data = request.SerializeToString()
    return damaged(choice, data) if choice.random() < 0.15 else data


def _change_tensor(choice, tensor):
    kind = choice.random()
    if kind < 0.15:
        tensor.dtype = choice.choice(types_pb2.DataType.values())
    elif kind < 0.4 and tensor.tensor_shape.dim:
        tensor.tensor_shape.dim[0].size = choice.choice([-1, 0, 2, 10**4, 10**6, 2**31, 2**62])
    elif kind < 0.55:
        tensor.tensor_shape.dim.add(size=choice.choice([-1, 0, 1, 2, 4, 1000, 2**40]))
    elif kind < 0.6:
        tensor.tensor_shape.unknown_rank = True
    elif kind < 0.75:
        tensor.tensor_content = choice.randbytes(choice.choice([0, 3, 8, 16, 64, 1000]))
    else:
        name, value = choice.choice(
            [
                ("float_val", 1.5),
                ("int_val", 2**31 - 1),
                ("int64_val", 2**63 - 1),
                ("string_val", b"x" * choice.choice([0, 9, 10_000])),
                ("bool_val", True),
                ("half_val", 70_000),
                ("uint32_val", 1),
                ("double_val", float("nan")),
            ]
        )
        getattr(tensor, name).extend([value] * choice.choice([1, 1, 2, 8, 100]))
