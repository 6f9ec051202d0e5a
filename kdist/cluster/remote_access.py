"""Remote access to the servers of a job: restricted to loopback unless the user allows more.

    check_remote_access(cluster, allow_remote=False)    # raises if other machines reach an address
    ...                                                 # TensorFlow starts its server
    restrict_to_loopback(cluster)

TensorFlow's servers have no authentication: whoever connects can run programs. They also listen on
all addresses of a machine, regardless of the address in the cluster. For a job on one machine, a
kernel filter drops all packets to the server's port that are not addressed to loopback.
"""

import contextlib
import ctypes
import ipaddress
import logging
import os
import pathlib
import socket
import struct
import sys

from kdist.cluster import Cluster
from kdist.cluster.handshake import parse_address

_logger = logging.getLogger(__name__)

# Linux, asm-generic/socket.h
_SO_ATTACH_FILTER = 26
# Offset of the network layer's header, for a filter that starts at the transport layer.
_NETWORK_HEADER = 0xFFF00000

# A classic BPF program (linux/filter.h): operation, jump if true, jump if false, operand. It
# accepts packets to 127.0.0.0/8 and to ::1.
_LOAD_WORD, _LOAD_BYTE, _AND, _EQUALS, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_LOOPBACK_FILTER = [
    (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
    (_AND, 0, 0, 0xF0),
    (_EQUALS, 0, 3, 0x40),  # version 4: the destination is at 16
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 16),
    (_AND, 0, 0, 0xFF000000),
    (_EQUALS, 8, 9, 0x7F000000),
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 24),  # version 6: at 24
    (_EQUALS, 0, 7, 0),
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 28),
    (_EQUALS, 0, 5, 0),
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 32),
    (_EQUALS, 0, 3, 0),
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 36),
    (_EQUALS, 0, 1, 1),
    (_RETURN, 0, 0, 0xFFFFFFFF),
    (_RETURN, 0, 0, 0),
]


def check_remote_access(cluster: Cluster, allow_remote: bool):
    """Raises ValueError if other machines can reach an address, unless the user allows it."""
    if allow_remote or cluster.is_alone or is_loopback_only(cluster):
        return
    raise ValueError(
        f"{cluster.name}'s address {cluster.address} can be reached from other machines, and "
        "TensorFlow's servers have no authentication: whoever connects can run programs here. If "
        "only the job's machines can connect (a firewall, a private network), allow it with "
        "--allow_remote, create_strategy(…, allow_remote=True)"
    )


def is_loopback_only(cluster: Cluster) -> bool:
    """Returns whether the addresses of all tasks are loopback addresses."""
    addresses = [address for role in cluster.tasks.values() for address in role]
    return all(_is_loopback(parse_address(address)[0]) for address in addresses)


def restrict_to_loopback(cluster: Cluster):
    """Restricts this task's server to loopback if all tasks of the job are on this machine.

    It needs Linux. On other systems, or if the kernel refuses, it logs a warning.
    """
    if cluster.is_alone or not is_loopback_only(cluster):
        return
    port = parse_address(cluster.address)[1]
    try:
        if sys.platform != "linux":
            raise OSError(f"no socket filter for {sys.platform}")
        for listener in _listeners(port):
            with listener:
                _attach(listener)
    except OSError as error:
        _logger.warning(
            "TensorFlow listens on port %d of all addresses of this machine (%s); block the port "
            "with a firewall",
            port,
            error,
        )


def _is_loopback(host):
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


def _listeners(port):
    """Yields duplicates of this process's sockets that listen on a port; the caller closes them."""
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(entry).startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(entry.name)))
            matches = duplicate.family in (socket.AF_INET, socket.AF_INET6) and (
                duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and duplicate.getsockname()[1] == port
            )
            if matches:
                yield duplicate
            else:
                duplicate.close()


def _attach(listener):
    """Attaches the loopback filter to a socket; connections that it accepts inherit it."""
    program = b"".join(struct.pack("HBBI", *operation) for operation in _LOOPBACK_FILTER)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(_LOOPBACK_FILTER), ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)
