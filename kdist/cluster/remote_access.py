"""Remote access to the servers of a job: restricted to loopback unless the user allows more.

    check_remote_access(cluster, allow_remote=False)    # raises if other machines reach an address
    with restrict_to_loopback(cluster):
        ...                                             # TensorFlow starts its server

TensorFlow's servers have no authentication: whoever connects can run programs. They also listen on
all addresses of a machine, regardless of the address in the cluster. For a job on one machine, a
second socket, the guard, listens on the same port before TensorFlow does. A kernel program passes
it all packets that are not addressed to loopback. Its queue is full, so the kernel drops them.

It needs Linux 4.6, and no rights. A filter (`SO_ATTACH_FILTER`) can only be attached once
TensorFlow listens, and some kernels allow it only to root for TCP.
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
from collections.abc import Iterator

from kdist.cluster import Cluster
from kdist.cluster.handshake import parse_address

_logger = logging.getLogger(__name__)

# TensorFlow shares its port with other sockets of this user if this variable is set.
_REUSE_PORT_VARIABLE = "TF_GRPC_REUSE_PORT"
# A connection to this process is immediate, unless the queue is full already.
_SECONDS_TO_FILL = 1.0

# Linux, asm-generic/socket.h
_SO_ATTACH_REUSEPORT_CBPF = 51
# Offset of the network layer's header, for a filter that starts at the transport layer.
_NETWORK_HEADER = 0xFFF00000

# A classic BPF program (linux/filter.h): operation, jump if true, jump if false, operand. It
# returns the index of one of the sockets that share a port, in the order in which they listen: 1,
# TensorFlow's, for packets to 127.0.0.0/8 and to ::1, and otherwise 0, the guard.
_LOAD_WORD, _LOAD_BYTE, _AND, _EQUALS, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_GUARD_PROGRAM = [
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
    (_RETURN, 0, 0, 1),
    (_RETURN, 0, 0, 0),
]

_guards: list[socket.socket] = []  # open until the process ends


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


@contextlib.contextmanager
def restrict_to_loopback(cluster: Cluster) -> Iterator[None]:
    """Returns a context in which TensorFlow starts this task's server, restricted to loopback.

    It does nothing unless all tasks of the job are on this machine. On other systems than Linux, or
    if the kernel refuses, it logs a warning.
    """
    if cluster.is_alone or not is_loopback_only(cluster):
        yield
        return
    port = parse_address(cluster.address)[1]
    try:
        guard = _guard(port)
    except OSError as error:
        _warn(port, error)
        yield
        return
    with _shared_port():
        yield
    if any(family != guard.family for family in _listening_families(port)):
        _warn(port, "it uses another version of IP than expected")


def _warn(port, reason):
    _logger.warning(
        "TensorFlow listens on port %d of all addresses of this machine (%s); block the port "
        "with a firewall",
        port,
        reason,
    )


def _is_loopback(host):
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


def _listening_families(port):
    """Returns the address families of this process's sockets that listen on a port."""
    families = set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6) and (
                    duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    and duplicate.getsockname()[1] == port
                ):
                    families.add(duplicate.family)
    return families


def _guard(port):
    """Opens a socket that receives all packets to the port that are not addressed to loopback.

    Loopback packets are dropped until TensorFlow listens, so that their sender repeats them.
    """
    if sys.platform != "linux":
        raise OSError(f"no socket filter for {sys.platform}")
    family = socket.AF_INET6 if _has_ipv6() else socket.AF_INET
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(socket.socket(family))
        if family == socket.AF_INET6:
            guard.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _attach(guard)
        guard.bind(("", port))
        guard.listen(0)
        # One connection fills the queue, whoever it is from. Nobody accepts it.
        filler = stack.enter_context(socket.socket())
        filler.settimeout(_SECONDS_TO_FILL)
        with contextlib.suppress(TimeoutError):
            filler.connect(("127.0.0.1", port))
        _guards.extend([guard, filler])
        stack.pop_all()
    return guard


def _has_ipv6():
    """Returns whether TensorFlow's server has an IPv6 socket, by the same test as gRPC's."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _shared_port():
    """Context in which TensorFlow's servers share their ports with other sockets."""
    before = os.environ.get(_REUSE_PORT_VARIABLE)
    os.environ[_REUSE_PORT_VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_REUSE_PORT_VARIABLE)
        if before is not None:
            os.environ[_REUSE_PORT_VARIABLE] = before


def _attach(guard):
    """Attaches the program to the guard, for all sockets that will share its port."""
    program = b"".join(struct.pack("HBBI", *operation) for operation in _GUARD_PROGRAM)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(_GUARD_PROGRAM), ctypes.addressof(buffer))
    guard.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, header)
