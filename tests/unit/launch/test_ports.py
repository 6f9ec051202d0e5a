"""Reserved ports."""

import socket

import pytest

from kdist.launch import local_engine
from kdist.launch.local_engine import reserve_ports


def test_a_port_is_reserved_once(monkeypatch):
    monkeypatch.setattr(local_engine, "_FIRST_PORT", 12000)
    monkeypatch.setattr(local_engine, "_LAST_PORT", 12009)
    with reserve_ports(3) as first, reserve_ports(3) as second:
        assert len({*first, *second}) == 6
        with pytest.raises(OSError, match="20 free ports between 12000 and 12009: only [0-4]$"):
            reserve_ports(20).__enter__()
    with reserve_ports(6) as again:
        assert len(again) == 6


def test_a_port_in_use_is_not_reserved(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(local_engine, "_FIRST_PORT", port)
        monkeypatch.setattr(local_engine, "_LAST_PORT", port)
        with pytest.raises(OSError, match="only 0"):
            reserve_ports(1).__enter__()
