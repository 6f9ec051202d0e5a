"""Failures that are not mended yet, by mode and program. An entry that has become wrong fails.

Modes without an entry of their own share those of `two`.
"""

STATEFUL = "refused: a stateful layer keeps one state per row of the global batch"
EAGER = "refused: the workers' weights would differ"

_FAILS: dict[str, dict[str, str]] = {
    "two": {},
    "accumulate": {"stateful_lstm": STATEFUL},
    "workers": {"eager_tape_loop": EAGER},
}


def known_failure(name, mode):
    """Returns why a program is not right in a mode of kdist, or an empty text."""
    return _FAILS.get(mode, _FAILS["two"]).get(name, "")
