"""Relays packets between two network namespaces; delays them after SIGUSR1.

python relay.py NAMESPACE NAMESPACE MILLISECONDS

Each namespace gets an interface "wire" (TUN), and then "ready" is printed. It replaces the kernel's
netem where that is missing.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
# linux/if_tun.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MAX_PACKET_BYTES = 1 << 16


def main(one, other, milliseconds):
    """Relays packets until it is killed."""
    ends = [_interface(namespace) for namespace in (one, other)]
    others = {ends[0]: ends[1], ends[1]: ends[0]}
    delay = 0.0

    def begin(*_):
        nonlocal delay
        delay = int(milliseconds) / 1000

    signal.signal(signal.SIGUSR1, begin)
    print("ready", flush=True)
    waiting = collections.deque()  # (time to send, receiver, packet)
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(ends, [], [], left)
        for end in readable:
            packet = os.read(end, _MAX_PACKET_BYTES)
            waiting.append((time.monotonic() + delay, others[end], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # the interface is down, and the packet is lost
                os.write(end, packet)


def _interface(namespace):
    """Returns a descriptor of a new interface in the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as own, open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        tun = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", b"wire", _IFF_TUN | _IFF_NO_PI))
        libc.setns(own.fileno(), _CLONE_NEWNET)
    return tun


if __name__ == "__main__":
    main(*sys.argv[1:])
