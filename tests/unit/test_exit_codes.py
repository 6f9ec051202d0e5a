"""Restarts after exit codes."""

import doctest

import pytest

from kdist import exit_codes
from kdist.exit_codes import Restart, restart_after


def test_examples():
    assert doctest.testmod(exit_codes).failed == 0


@pytest.mark.parametrize(
    ("code", "restart"),
    [
        (0, Restart.NEVER),
        (143, Restart.FREE),
        (130, Restart.NEVER),
        (124, Restart.NEVER),
        (75, Restart.COUNTED),
        (1, Restart.COUNTED),
        (137, Restart.COUNTED),
        (-15, Restart.COUNTED),  # SIGTERM ended it before it could save
    ],
)
def test_restarts(code, restart):
    assert restart_after(code) == restart
