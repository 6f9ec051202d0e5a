"""Connections by the number of file descriptors."""

import resource

import pytest

from kdist.serving.core import resources
from kdist.serving.core.resources import limit_connections
from kdist.serving.core.settings import ServerLimits


@pytest.fixture
def machine(monkeypatch):
    """Returns [soft limit, hard limit] of a process that has opened 36 files."""
    limit = [256, 1 << 20]

    def change(_, pair):
        limit[:] = pair

    monkeypatch.setattr(resources.resource, "getrlimit", lambda _: tuple(limit))
    monkeypatch.setattr(resources.resource, "setrlimit", change)
    monkeypatch.setattr(resources, "_count_open", lambda: 36)
    return limit


def test_the_soft_limit_is_raised(machine):
    assert limit_connections(ServerLimits()).connections == 2048
    assert machine == [1 << 20] * 2


def test_connections_fit_into_the_descriptors(machine, caplog):
    machine[1] = 256
    limited = limit_connections(ServerLimits(body_seconds=3.0), workers=2)
    assert limited == ServerLimits(body_seconds=3.0, connections=(256 - 36 - 64 - 16) // 2)
    assert "raise `ulimit -n`" in caplog.text
    assert limit_connections(ServerLimits(connections=5)).connections == 5


def test_too_few_descriptors(machine):
    machine[1] = 110
    with pytest.raises(OSError, match="110 file descriptors are too few"):
        limit_connections(ServerLimits())


def test_no_limit(machine):
    machine[:] = [resource.RLIM_INFINITY] * 2
    assert limit_connections(ServerLimits()).connections == 2048
