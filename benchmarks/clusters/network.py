"""Two hosts on this machine with a slow link: network namespaces, a veth pair, and tc's tbf.

with two_hosts(rate_mbit=100) as hosts:
    subprocess.run([*hosts[0].prefix, "ping", "-c1", hosts[1].address])
"""

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

_SECONDS = 20
_LINK = "wire"  # its name on both hosts
_NETWORK = "10.83.71"  # visible to the two hosts only
_BUFFER = ("burst", "32kbit", "latency", "400ms")
_REMEDY = "run this as root with iproute2 installed, or leave the part out (--only=…)"


@dataclasses.dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        namespace: its name.
        address: address that the other host uses.
    """

    namespace: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """Returns the command prefix that runs a program on this host, in the same process."""
        return ["ip", "netns", "exec", self.namespace]


def check():
    """Checks the rights and programs that `two_hosts` needs.

    Raises:
        PermissionError: this is not root.
        FileNotFoundError: `ip` or `tc` is not installed.
    """
    if os.geteuid() != 0:
        raise PermissionError(f"a slow link between two hosts needs root; {_REMEDY}")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise FileNotFoundError(f"a slow link needs the program {program}; {_REMEDY}")


@contextlib.contextmanager
def apart() -> Iterator[tuple[Host, Host]]:
    """Yields two hosts without a link, and removes them afterwards.

    Raises:
        PermissionError, FileNotFoundError: see `check`.
        RuntimeError: the kernel refused, as it may in a container, even for root.
    """
    check()
    _remove_leftovers()
    names = [_name(os.getpid(), side) for side in (1, 2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        yield tuple(Host(name, f"{_NETWORK}.{side}") for side, name in enumerate(names, 1))
    finally:
        for name in names:
            _remove(name)


@contextlib.contextmanager
def two_hosts(rate_mbit: int) -> Iterator[tuple[Host, Host]]:
    """Yields two hosts with a link between them.

    Args:
        rate_mbit: rate of the link in either direction, in Mbit/s.

    Raises:
        PermissionError, FileNotFoundError, RuntimeError: see `apart`.
    """
    with apart() as hosts:
        _join(*(host.namespace for host in hosts))
        for host in hosts:
            set_up(host)
            _shape(host, "add", "tbf", "rate", f"{rate_mbit}mbit", *_BUFFER)
        yield hosts


def cut(host: Host):
    """Takes a host's link down."""
    _run("ip", "-netns", host.namespace, "link", "set", _LINK, "down")


def heal(host: Host):
    """Brings a host's link up again."""
    _run("ip", "-netns", host.namespace, "link", "set", _LINK, "up")


def limit(host: Host, rate_mbit: int):
    """Changes the rate at which a host sends, in Mbit/s."""
    _shape(host, "change", "tbf", "rate", f"{rate_mbit}mbit", *_BUFFER)


def _shape(host, verb, *discipline):
    where = ("-netns", host.namespace, "qdisc", verb, "dev", _LINK, "root")
    _run("tc", *where, *discipline)


def _name(pid, side):
    return f"kdist-{pid}-{side}"


def _join(one, other):
    """Creates a veth pair that exists only in the two namespaces."""
    peer = ("peer", "name", _LINK, "netns", other)
    _run("ip", "link", "add", _LINK, "netns", one, "type", "veth", *peer)


def set_up(host: Host):
    """Gives the host its address, after it got its end of the link."""

    def ip(*arguments):
        _run("ip", "-netns", host.namespace, *arguments)

    ip("address", "add", f"{host.address}/24", "dev", _LINK)
    ip("link", "set", "lo", "up")
    ip("link", "set", _LINK, "up")


def _remove_leftovers():
    """Removes namespaces of programs that were killed before they could clean up."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for match in re.finditer(r"^kdist-(\d+)-[12]\b", listed.stdout, re.MULTILINE):
        if not os.path.exists(f"/proc/{match[1]}"):
            _remove(match[0])


def _remove(namespace):
    """Deletes a namespace and its link, if it exists."""
    command = ["ip", "netns", "delete", namespace]
    subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)


def _run(*command):
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"{' '.join(command)}: {error.stderr.strip()}; {_REMEDY}; in a container, root also "
            "needs the capabilities NET_ADMIN and SYS_ADMIN"
        ) from error
