"""Whether a task is still there."""

import socket
import time

from kdist import presence


def test_who_was_there_and_no_longer_listens_has_gone(monkeypatch):
    monkeypatch.setattr(presence, "_SECONDS_BETWEEN_LOOKS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = presence.Presence(f"127.0.0.1:{listener.getsockname()[1]}")
        assert not any(other.has_gone() for _ in range(10))
    assert [other.has_gone() for _ in range(4)] == [False, False, False, True]
    other.wait_until_gone()


def test_who_has_not_come_yet_has_not_gone(monkeypatch):
    monkeypatch.setattr(presence, "_SECONDS_BETWEEN_LOOKS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    other = presence.Presence(address)
    assert not any(other.has_gone() for _ in range(10))


def test_looks_are_not_too_many():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = presence.Presence(f"127.0.0.1:{listener.getsockname()[1]}")
        began = time.monotonic()
        while time.monotonic() - began < 0.3:
            other.has_gone()
        listener.settimeout(0.1)
        listener.accept()
        try:
            listener.accept()
        except TimeoutError:
            return
    raise AssertionError("it looked twice within half a second")
