"""Verdict on a trial relative to its reference: works, wrong, error, or not there."""

import dataclasses
import math
import re
from typing import Literal

# Text of Keras and TensorFlow around a message: headlines, stack traces, names of nodes.
_AROUND = re.compile(
    r"^Exception encountered when calling|:$|^File \"|^Detected at node|root error\(s\) found"
    r"|^\[\[|^<stack traces unavailable>"
)
_BEFORE = re.compile(r"\x1b\[[0-9;]*m|\{\{function_node \S+\}\} |^\(0\) [A-Z_]+:\s+")

Kind = Literal["works", "wrong", "error", "not there"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Content of one cell of the table.

    Attributes:
        kind: `works`, `wrong` (training ended with other values), `error` (it raised), or `not
            there` (Keras has no such feature).
        difference: the largest difference; None if nothing was compared.
        says: what differs, or the first line of the error.
    """

    kind: Kind
    difference: float | None = None
    says: str = ""

    def __str__(self):
        if self.kind == "wrong":
            by = "" if self.difference is None else f" by {self.difference:.2g}"
            return f"wrong{by}{f' ({self.says})' if self.says else ''}"
        return f"error: {self.says}" if self.kind == "error" else self.kind

    @property
    def is_bad(self) -> bool:
        return self.kind in ("wrong", "error")


def error(exception: BaseException) -> Verdict:
    """An exception as a verdict: its type and the first line that says something."""
    lines = [_BEFORE.sub("", line.strip()) for line in str(exception).splitlines()]
    telling = [line for line in lines if line and not _AROUND.search(line)] or lines
    return Verdict("error", says=f"{type(exception).__name__}: {(telling or [''])[0]}")


def from_differences(differences: dict[str, tuple[float, float]]) -> Verdict:
    """The verdict on several quantities at once; the weights' difference is named first.

    Args:
        differences: name -> (difference found, difference allowed). NaN is never allowed.
    """
    wrong = {name: found for name, (found, allowed) in differences.items() if not found <= allowed}
    if not wrong:
        return Verdict("works", max((found for found, _ in differences.values()), default=0.0))
    if "weights" in wrong:
        return Verdict("wrong", wrong["weights"], "")
    name = max(wrong, key=lambda name: math.inf if math.isnan(wrong[name]) else wrong[name])
    return Verdict("wrong", wrong[name], name)
