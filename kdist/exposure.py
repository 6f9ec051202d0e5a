"""Who can reach the servers of a job: this machine alone, unless somebody says otherwise.

    check_allowed(cluster, allow_remote=False)      # raises if others are to reach it
    ...                                             # TensorFlow starts its server
    shut_out_others(cluster)

TensorFlow's servers ask nobody who he is: whoever reaches one can run programs there. And they
listen on all of a machine's addresses, whatever address the cluster names. So of a job within one
machine the kernel is told to drop what comes to the server's port from elsewhere.
"""

import contextlib
import ctypes
import ipaddress
import os
import pathlib
import socket
import struct
import sys

from kdist.agreement import host_and_port
from kdist.cluster import Cluster

# Linux, asm-generic/socket.h
_SO_ATTACH_FILTER = 26
# Where the network layer's header begins, for a filter that is given the transport layer's.
_NETWORK_HEADER = 0xFFF00000

# A program of classic BPF (linux/filter.h): operation, jump if true, jump if false, operand. It
# takes packets to 127.0.0.0/8 and to ::1.
_LOAD_WORD, _LOAD_BYTE, _AND, _EQUALS, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_TO_THIS_MACHINE = [
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


def check_allowed(cluster: Cluster, allow_remote: bool):
    """Raises a ValueError if other machines are to reach this task and nobody has allowed it."""
    if allow_remote or cluster.is_alone or is_local(cluster):
        return
    raise ValueError(
        f"{cluster.name}'s address {cluster.address} can be reached from other machines, and "
        "TensorFlow's servers ask nobody for a password: whoever reaches it can run programs here. "
        "If only the job's machines can (a firewall, a private network), allow it by "
        "--allow_remote, create_strategy(…, allow_remote=True)"
    )


def is_local(cluster: Cluster) -> bool:
    """Whether all tasks are on this machine, by addresses that no other machine reaches."""
    addresses = [address for some in cluster.tasks.values() for address in some]
    return all(_is_loopback(host_and_port(address)[0]) for address in addresses)


def shut_out_others(cluster: Cluster):
    """Of a job on this machine, lets nobody else reach the server that this task has started.

    On Linux; elsewhere, and where the kernel refuses, a line says that nothing was done.
    """
    if cluster.is_alone or not is_local(cluster):
        return
    port = host_and_port(cluster.address)[1]
    try:
        if sys.platform != "linux":
            raise OSError(f"there is no filter for {sys.platform}")
        for listener in _listeners(port):
            with listener:
                _attach(listener)
    except OSError as error:
        print(
            f"kdist: TensorFlow listens on port {port} of all of this machine's addresses "
            f"({error}); let a firewall close it",
            file=sys.stderr,
        )


def _is_loopback(host):
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _listeners(port):
    """This process's sockets that listen on a port; each a copy, to be closed."""
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(entry).startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
            is_it = copy.family in (socket.AF_INET, socket.AF_INET6) and (
                copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and copy.getsockname()[1] == port
            )
            if is_it:
                yield copy
            else:
                copy.close()


def _attach(listener):
    """Has the kernel drop what comes to the socket, or to a connection of it, from elsewhere."""
    program = b"".join(struct.pack("HBBI", *operation) for operation in _TO_THIS_MACHINE)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(_TO_THIS_MACHINE), ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)
