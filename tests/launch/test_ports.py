import socket

import pytest

from kdist.launch import ports
from kdist.launch.ports import reserved


def test_nobody_else_is_given_them(monkeypatch):
    monkeypatch.setattr(ports, "_FIRST", 12000)
    monkeypatch.setattr(ports, "_LAST", 12009)
    with reserved(3) as first, reserved(3) as second:
        assert len({*first, *second}) == 6
        with pytest.raises(OSError, match="20 free ports between 12000 and 12009: only [0-4]$"):
            reserved(20).__enter__()
    with reserved(6) as again:
        assert len(again) == 6


def test_a_port_in_use_is_not_given(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(ports, "_FIRST", port)
        monkeypatch.setattr(ports, "_LAST", port)
        with pytest.raises(OSError, match="only 0"):
            reserved(1).__enter__()
