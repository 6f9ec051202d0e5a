"""Liveness of another task, with sockets on loopback."""

import socket
import time

from kdist.cluster import heartbeat


def test_a_task_that_stops_listening_is_gone(monkeypatch):
    monkeypatch.setattr(heartbeat, "_PROBE_INTERVAL_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = heartbeat.LivenessProbe(f"127.0.0.1:{listener.getsockname()[1]}")
        assert not any(other.is_gone() for _ in range(10))
    assert [other.is_gone() for _ in range(4)] == [False, False, False, True]
    other.wait_until_gone()


def test_a_task_that_has_never_answered_is_not_gone(monkeypatch):
    monkeypatch.setattr(heartbeat, "_PROBE_INTERVAL_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    other = heartbeat.LivenessProbe(address)
    assert not any(other.is_gone() for _ in range(10))


def test_probes_are_rate_limited():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = heartbeat.LivenessProbe(f"127.0.0.1:{listener.getsockname()[1]}")
        began = time.monotonic()
        while time.monotonic() - began < 0.3:
            other.is_gone()
        listener.settimeout(0.1)
        listener.accept()
        try:
            listener.accept()
        except TimeoutError:
            return
    raise AssertionError("two probes within half a second")
