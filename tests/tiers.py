"""Which cases of a matrix run in `make test` and `make test-slow`, and which before a release only.

@pytest.mark.parametrize(("k", "data"), covering([1, 7, 40], ["arrays", "endless"]))
@pytest.mark.parametrize("pair", [*PAIRS, *seldom(MORE_PAIRS)])
"""

import itertools

import pytest


def seldom(cases, other_than=()):
    """Returns the cases, marked for `make test-exhaustive`.

    Args:
        cases: values of one parameter, or tuples of the values of several.
        other_than: cases to leave out.
    """
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
        for case in cases
        if case not in other_than
    ]


def covering(*factors):
    """Returns all combinations; those beyond one with each value are marked as by `seldom`.

    Args:
        factors: a sequence of values for each parameter.
    """
    length = max(map(len, factors))
    often, rest = [], []
    for i in range(length):
        _add_once(tuple(values[i % len(values)] for values in factors), often)
    for case in itertools.product(*factors):
        if case not in often:
            _add_once(case, rest)
    return [*often, *seldom(rest)]


def _add_once(case, cases):
    if case not in cases:
        cases.append(case)
