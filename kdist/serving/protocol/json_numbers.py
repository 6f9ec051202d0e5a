"""Fast parser for requests with one array of numbers. Creates no Python object per number.

    request = read_numbers(b'{"instances": [[1, 2], [3, 4.5]]}')
    request.array(TensorSpec((None, 2), np.dtype("float32"), "x"))     # (2, 2), float64

simdjson validates the JSON and returns its numbers as a flat array. The text between the numbers
determines their shape: without digits, the text of an array consists of brackets and commas.
"""

import dataclasses
import functools
import math

import numpy as np
import simdjson

from kdist.serving.core.signature import TensorSpec

KEYS = ("instances", "inputs")
SIGNATURE_NAME = "signature_name"
_SPACES = b" \t\r\n"
_INTEGER_CHARACTERS = b"-0123456789"
_FLOAT_CHARACTERS = _INTEGER_CHARACTERS + b"+.eE"
# float64 represents all smaller integers exactly.
_MAX_EXACT = 2**53
# One parser is shared by most bodies, as allocating its buffers takes longer than parsing a small
# body. The buffers grow to several times the largest body and are never freed, so larger bodies get
# their own parser. A document holds its parser until it is deleted.
_parser = simdjson.Parser()
_MAX_SHARED_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class NumericRequest:
    """Numbers of a request whose shape is not validated yet."""

    key: str  # one of `KEYS`
    signature_name: str  # empty for the default
    flat: np.ndarray  # all numbers, of shape `(N,)` and type float64
    text: bytes  # the array with its brackets

    def array(self, spec: TensorSpec) -> np.ndarray | None:
        """Returns the rows as exact float64 numbers; None unless they certainly match the spec."""
        if not spec.shape or spec.dtype.kind not in "iuf":
            return None
        row = tuple(size for size in spec.shape[1:] if size)
        if len(row) != len(spec.shape) - 1:
            return None
        rows, remainder = divmod(self.flat.size, math.prod(row))
        if remainder or not rows:
            return None
        is_integer = spec.dtype.kind != "f"
        if is_integer and np.abs(self.flat).max() >= _MAX_EXACT:
            return None
        # The array has as many places as numbers, so each place holds exactly one.
        characters = _INTEGER_CHARACTERS if is_integer else _FLOAT_CHARACTERS
        between = self.text.translate(None, characters + _SPACES)
        if between != b"[" + b",".join([_brackets(row)] * rows) + b"]":
            return None
        return self.flat.reshape(rows, *row)


def read_numbers(body: bytes) -> NumericRequest | None:
    """Returns the numbers of a body; None for any other body, valid or not."""
    if not body.startswith(b"{"):
        return None
    try:
        parser = _parser if len(body) <= _MAX_SHARED_BYTES else simdjson.Parser()
        document = parser.parse(body)
        if not isinstance(document, simdjson.Object):
            return None
        keys = sorted(document.keys())  # includes duplicates
        key = next((key for key in KEYS if key in keys), "")
        name, array = document.get(SIGNATURE_NAME, ""), document.get(key)
        if keys not in ([key], sorted([key, SIGNATURE_NAME])):
            return None
        if not isinstance(name, str) or not isinstance(array, simdjson.Array):
            return None
        flat = np.frombuffer(array.as_buffer(of_type="d"))
    except (RuntimeError, TypeError, ValueError):
        return None
    # If the signature name contained a bracket, this text would contain a quote and not match.
    text = body[body.index(b"[") : body.rindex(b"]") + 1]
    return NumericRequest(key, name, flat, text)


@functools.lru_cache(maxsize=16)
def _brackets(shape):
    """Returns the text of an array of this shape without its numbers."""
    if not shape:
        return b""
    return b"[" + b",".join([_brackets(shape[1:])] * shape[0]) + b"]"
