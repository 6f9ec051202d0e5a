"""Failures that are not mended yet, by mode and program. An entry that has become wrong fails.

Modes without an entry of their own share those of `two`.
"""

STATEFUL = "refused: a stateful layer keeps one state per row of the global batch"
EAGER = "refused: the workers' weights would differ"
FEW_ROWS = "refused: replicas cannot divide an embedding of so few rows evenly"
OUTSIDE = "refused: a gradient with respect to divided weights, outside of a step"
OF_ROWS = "refused: a step assigns a divided weight what depends on its rows"

_FAILS: dict[str, dict[str, str]] = {
    "two": {},
    "accumulate": {"stateful_lstm": STATEFUL},
    "workers": {"eager_tape_loop": EAGER},
    "weights": {
        "behavior_sequence_transformer": FEW_ROWS,
        "collaborative_filtering": FEW_ROWS,
        "eager_tape_loop": OUTSIDE,
        "image_captions": FEW_ROWS,
        "recommender_by_tensordot": FEW_ROWS,
        "sharpness_aware_minimization": OF_ROWS,
        "skip_grams": FEW_ROWS,
        "speech_transformer": FEW_ROWS,
        "text_vectorization": FEW_ROWS,
        "two_tower_ranking": FEW_ROWS,
        "two_tower_retrieval": FEW_ROWS,
    },
}


def known_failure(name, mode):
    """Returns why a program is not right in a mode of kdist, or an empty text."""
    return _FAILS.get(mode, _FAILS["two"]).get(name, "")
