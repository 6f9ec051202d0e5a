"""The fast parser of numbers returns the same as the general parser, or leaves the body to it."""

import itertools
import json
import random

import numpy as np
import pytest

from kdist.serving.core.signature import Signature, TensorSpec
from kdist.serving.protocol import json_bodies

SHAPES = [(None,), (None, 2), (None, 1), (None, 2, 3), (1, 2, 1, 2)]
DTYPES = ["float32", "float64", "float16", "int32", "uint8", "int64", "uint64"]


def spec(shape=(None, 2), dtype="float32"):
    return TensorSpec(shape, np.dtype(dtype), "")


def in_a_row(body, of=None):
    body = body if isinstance(body, bytes) else body.encode()
    found = json_bodies.read_numbers(body)
    return None if found is None else found.array(of or spec())


def both_ways(body, of):
    """Returns the results of both parsers: (dtype, shape, numbers), or the error message."""
    named = Signature({"x": of}, {})

    def tried(way):
        try:
            request = way(body, lambda name: named)
        except ValueError as error:
            return str(error)
        if request is None:
            return None
        array = request.arrays["x"]
        return request.key, request.signature_name, array.dtype, array.shape, array.tobytes()

    return tried(json_bodies._parse_numeric), tried(json_bodies._parse_any)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("key", json_bodies.KEYS)
def test_both_ways_give_the_same(key, shape, dtype):
    rows = np.arange(12).reshape(-1, *shape[1:])[: shape[0]]
    values = (rows - 3.25) * 1.5e-3 if dtype.startswith("float") else rows
    for document in (
        {key: values.tolist()},
        {key: values.tolist(), "signature_name": "other"},
        {"signature_name": "", key: values.tolist()},
    ):
        for separators, indent in (((",", ":"), None), ((" , ", " : "), 3)):
            body = json.dumps(document, separators=separators, indent=indent).encode()
            numbers, objects = both_ways(body, spec(shape, dtype))
            assert numbers is not None
            assert numbers == objects


@pytest.mark.parametrize(
    "text",
    [
        "[[1,2],[3]]",
        "[[1,2],[3,4],[]]",
        "[[1,[2]],[3,4]]",
        "[[1,2],3,4]",
        "[1,2,3,4]",
        "[[[1,2],[3,4]]]",
        "[[1,2,3,4]]",
        "[]",
        "[[]]",
        "[[1,2],[true,4]]",
        "[[1,2],[null,4]]",
        '[[1,2],["3",4]]',
        '[[1,2],[{"b64":"AA=="},4]]',
        "[[1,2],[NaN,4]]",
        "[[1,2],[1e400,4]]",
        "[[1,2],[18446744073709551616,4]]",
        "[[1,2],[01,4]]",
        "[[1,2],[3,4],]",
        "[[1,2],[3,4]",
        "[[1,2],[3,4]]]",
        "[[1,2],[3 4]]",
        "[[1,2],[,4]]",
        "[[1,2] [3,4]]",
        "3",
        '"[[1,2]]"',
        "{}",
        "[" * 5000 + "]" * 5000,
    ],
    ids=lambda text: text[:30],
)
@pytest.mark.parametrize("key", json_bodies.KEYS)
def test_all_else_is_left_to_the_other_way(key, text):
    assert in_a_row(f'{{"{key}":[[1,2],[3,4]]}}') is not None
    assert in_a_row(f'{{"{key}":{text}}}') is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[[1,2]]",
        b"\xff",
        b'{"instances":[[1,2]]',
        b'{"instances":[[1,2]]}}',
        b'\xef\xbb\xbf{"instances":[[1,2]]}',
        '{"instances":[[1,2]]}'.encode("utf-16"),
        b'{"instance":[[1,2]]}',
        b'{"inst1ances":[[1,2]]}',
        b'{"instances":[[1,2]],"inputs":[[1,2]]}',
        b'{"instances":[[1,2]],"instances":[[3,4]]}',
        b'{"instances":[[1,2]],"other":[[3,4]]}',
        b'{"instances":[[1,2]],"signature_name":3}',
        b'{"instances":[[1,2]],"signature_name":null}',
        b'{"instances":[[1,2]],"signature_name":["a"]}',
        b'{"instances":[[1,2]],"signature_name":"a]"}',
        b'{"signature_name":"[[","instances":[[1,2]]}',
        b'{"instances":[{"x":[1,2]}]}',
        b'{"inputs":{"x":[[1,2]]}}',
    ],
    ids=range(19),
)
def test_bodies_that_are_left_to_the_other_way(body):
    assert in_a_row(body) is None


@pytest.mark.parametrize(
    "of",
    [
        spec(None),
        spec(()),
        spec((None, None)),
        spec((None, 0)),
        spec(dtype=object),
        spec(dtype=bool),
    ],
    ids=["any rank", "a scalar", "any size", "nothing", "texts", "truth values"],
)
def test_specifications_that_are_left_to_the_other_way(of):
    for text in ("[[1,2]]", "[1,0]", "[[]]"):
        assert in_a_row(f'{{"instances":{text}}}', of) is None


@pytest.mark.parametrize("text", ["1.0", "1e0", "1E0", "9007199254740993", "-9007199254740992"])
def test_whole_numbers_are_exact_or_left_to_the_other_way(text):
    body = f'{{"instances":[{text}]}}'
    assert in_a_row(body, spec((None,), "float64")) is not None
    assert in_a_row(body, spec((None,), "int64")) is None
    assert in_a_row('{"instances":[9007199254740991]}', spec((None,), "int64")) == 2**53 - 1


@pytest.mark.parametrize(
    ("dtype", "value"), [("uint8", 256), ("uint8", -1), ("float16", 1e6), ("float32", -1e39)]
)
def test_what_does_not_fit_is_refused_in_the_same_words(dtype, value):
    body = json.dumps({"instances": [[1, value]]}).encode()
    numbers, objects = both_ways(body, spec(dtype=dtype))
    assert isinstance(numbers, str)
    assert numbers == objects


def test_broken_bodies_give_the_same_or_nothing():
    """Deletes, doubles, changes, and swaps random characters of a valid body."""
    chance = random.Random(0)
    pieces = [character.encode() for character in '[],1- "0{}\\'] + [b"", b".5", b"e3", b"null"]
    taken = 0
    for round_, shape in itertools.product(range(1500), SHAPES):
        rows = np.arange(6 if 3 in shape else 4).reshape(-1, *shape[1:])[: shape[0]]
        body = json.dumps({"instances": rows.tolist(), "signature_name": "a"}).encode()
        for _ in range(1 + round_ % 3):
            at = chance.randrange(len(body))
            length = chance.choice([0, 0, 1, 1, 2])
            body = body[:at] + chance.choice(pieces) + body[at + length :]
        for dtype in ("float32", "uint8"):
            numbers, objects = both_ways(body, spec(shape, dtype))
            if numbers is not None:
                taken += 1
                assert numbers == objects, body
    assert taken > 300  # of 15,000


def test_a_body_that_was_refused_keeps_the_parser_from_nothing():
    right, wrong = b'{"instances":[[1,2]]}', b'{"instances":[[1,true]]}'
    before = in_a_row(right)
    assert in_a_row(wrong) is None
    after = in_a_row(b'{"instances":[[3,4]]}')
    assert (before.tolist(), after.tolist()) == ([[1, 2]], [[3, 4]])


def test_large_bodies_leave_no_buffers(monkeypatch):
    monkeypatch.setattr(json_bodies, "_parser", None)
    rows = np.arange(400_000).reshape(-1, 2)
    large = json.dumps({"instances": rows.tolist()})
    assert len(large) > 2e6
    assert (in_a_row(large) == rows).all()
    with pytest.raises(AttributeError):
        in_a_row('{"instances":[[1,2]]}')
