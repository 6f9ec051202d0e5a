"""Ceiling for the memory of a server."""

import os

import psutil
import pytest

from kdist.serving.core import resources
from kdist.serving.core.errors import RequestError
from kdist.serving.core.requests import BodyMemory
from kdist.serving.core.resources import MemoryCeiling, default_memory_bytes, used_bytes


class Used:
    """Memory in use, and how often it was read."""

    def __init__(self, size):
        self.size, self.reads = size, 0

    def __call__(self):
        self.reads += 1
        return self.size


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(resources.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def trims(monkeypatch):
    """Returns a list that grows when freed memory is returned."""
    trims = []
    monkeypatch.setattr(resources, "return_free_memory", lambda: trims.append(1))
    return trims


def test_requests_are_rejected_above_the_ceiling_and_accepted_below_it(clock, trims, caplog):
    used, reasons = Used(99), []
    bodies = BodyMemory(1000, MemoryCeiling(100, used), reasons.append)
    with bodies.request():
        pass
    used.size, clock[0] = 101, 0.2
    with (
        pytest.raises(RequestError, match="101 bytes of memory .* is 100") as error,
        bodies.request(),
    ):
        pass
    assert (error.value.http_status, error.value.grpc_status) == (503, "RESOURCE_EXHAUSTED")
    assert error.value.retry_after == 1
    assert reasons == ["memory"]
    assert "--memory_mb" in caplog.text
    used.size, clock[0] = 100, 0.4
    with bodies.request():
        pass
    assert reasons == ["memory"]


def test_bodies_count_before_they_are_seen_in_the_memory(clock, trims):
    """Several requests begin before the memory is read again, and each needs more than its body."""
    used = Used(1000)
    bodies = BodyMemory(10_000, MemoryCeiling(2000, used))
    with bodies.request() as second:
        with bodies.request() as first:
            first(100)
            with pytest.raises(RequestError, match="bodies of 200 .* is 2,000"):
                second(100)
        second(100)


def test_memory_is_read_seldom(clock, trims):
    used = Used(5)
    ceiling = MemoryCeiling(100, used)
    for number in range(1000):
        clock[0] = number / 1000
        ceiling.check(0)
    assert 1 < used.reads <= 11
    MemoryCeiling(0, None).check(0)  # no limit: not read at all


def test_freed_memory_is_returned_while_requests_are_rejected(clock, trims):
    ceiling = MemoryCeiling(100, Used(101))
    for number in range(50):
        clock[0] = number / 20
        with pytest.raises(RequestError):
            ceiling.check(0)
    assert 2 <= len(trims) <= 3


def test_the_ceiling_follows_the_container(tmp_path):
    machine = psutil.virtual_memory().total
    assert default_memory_bytes(tmp_path) == int(machine * 0.9)
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert default_memory_bytes(tmp_path) == int(machine * 0.9)
    (group / "memory.max").write_text("1000000\n")
    assert default_memory_bytes(tmp_path) == 900_000
    (group / "memory.max").unlink()
    (group / "memory").mkdir()
    (group / "memory" / "memory.limit_in_bytes").write_text("2000000\n")
    assert default_memory_bytes(tmp_path) == 1_800_000


def test_used_memory_counts_processes_that_run():
    own = used_bytes([os.getpid()])
    block = b"x" * (64 << 20)
    assert used_bytes([os.getpid(), 2**22 + 1]) - own > len(block) // 2
