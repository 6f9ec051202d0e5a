"""Requests that hold one array of numbers, which are most: read without an object for each number.

    found = read(b'{"instances": [[1, 2], [3, 4.5]]}')
    found.array(TensorSpec((None, 2), np.dtype("float32"), "x"))     # (2, 2), of float64

simdjson proves that a body is JSON, and gives its numbers in a row. What lies between the numbers
proves their shape: without digits, the text of an array is its brackets and commas.
"""

import dataclasses
import functools
import math

import numpy as np
import simdjson

from kdist.serving.signature import TensorSpec

KEYS = ("instances", "inputs")
SIGNATURE_NAME = "signature_name"
_SPACES = b" \t\r\n"
_OF_WHOLE = b"-0123456789"
_OF_NUMBERS = _OF_WHOLE + b"+.eE"
# float64 has all whole numbers below.
_EXACT = 2**53
# One parser for most bodies, as making its buffers takes longer than to read a small one; they grow
# to several times the largest body, and stay. A document holds its parser until it is dropped.
_parser = simdjson.Parser()
_MOST_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A request's numbers, of a shape that is not known yet.

    Attributes:
        key: of `KEYS`.
        signature_name: that is asked for; empty for none.
        flat: all numbers (N,) of float64.
        text: of the array, brackets and all.
    """

    key: str
    signature_name: str
    flat: np.ndarray
    text: bytes

    def array(self, spec: TensorSpec) -> np.ndarray | None:
        """The rows, of float64, every number exactly; None unless it is sure that they fit."""
        if not spec.shape or spec.dtype.kind not in "iuf":
            return None
        row = tuple(size for size in spec.shape[1:] if size)
        if len(row) != len(spec.shape) - 1:
            return None
        rows, rest = divmod(self.flat.size, math.prod(row))
        if rest or not rows:
            return None
        is_whole = spec.dtype.kind != "f"
        if is_whole and np.abs(self.flat).max() >= _EXACT:
            return None
        # As many places as numbers, none with more than one: each has its own.
        numbers = _OF_WHOLE if is_whole else _OF_NUMBERS
        between = self.text.translate(None, numbers + _SPACES)
        if between != b"[" + b",".join([_brackets(row)] * rows) + b"]":
            return None
        return self.flat.reshape(rows, *row)


def read(body: bytes) -> Numbers | None:
    """The numbers of a body; None if it is anything else, right or wrong."""
    if not body.startswith(b"{"):
        return None
    try:
        parser = _parser if len(body) <= _MOST_BYTES else simdjson.Parser()
        document = parser.parse(body)
        if not isinstance(document, simdjson.Object):
            return None
        keys = sorted(document.keys())  # with those that come twice
        key = next((key for key in KEYS if key in keys), "")
        name, array = document.get(SIGNATURE_NAME, ""), document.get(key)
        if keys not in ([key], sorted([key, SIGNATURE_NAME])):
            return None
        if not isinstance(name, str) or not isinstance(array, simdjson.Array):
            return None
        flat = np.frombuffer(array.as_buffer(of_type="d"))
    except (RuntimeError, TypeError, ValueError):
        return None
    # Were a bracket part of the name, there would be a quote between these two.
    text = body[body.index(b"[") : body.rindex(b"]") + 1]
    return Numbers(key, name, flat, text)


@functools.lru_cache(maxsize=16)
def _brackets(shape):
    """The text of an array of this shape, without its numbers."""
    if not shape:
        return b""
    return b"[" + b",".join([_brackets(shape[1:])] * shape[0]) + b"]"
