"""Machines inside this one, made of Linux namespaces.

    with Network(directory) as network:
        first, second = network.add("n1"), network.add("n2")
        first.popen(["python", "train.py"])
        second.power_off()                       # kills all that runs on it

They share the files and the cores of this machine. Each has host name, processes, ports, and an
address of its own, and only machines of the same network can connect to each other. All processes
end with the program that has made the network, however it ends.
"""

import ctypes
import os
import pathlib
import shutil
import socket
import subprocess
from collections.abc import Sequence

# Python's libraries have setns from 3.12 on.
_CLONE_NEWNET = 0x40000000
_SUBNET = "10.77.0."
_GATEWAY = 254
_PROGRAMS = ("ip", "mount", "nsenter", "unshare")


def missing_for_hosts() -> str:
    """Returns what this machine lacks for `Network`; "" if it lacks nothing."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"programs that are not installed: {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "network namespaces need root"


def write_program(path: pathlib.Path, line: str):
    """Writes a shell script of one line, which can be executed."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def child_of(process_id: int) -> int:
    """Returns the id of the only child of a process.

    Raises:
        ValueError: If it has none, or several.
    """
    children = f"/proc/{process_id}/task/{process_id}/children"
    return int(pathlib.Path(children).read_text())


class Host:
    """A machine of a `Network`, which makes it by `Network.add`.

    Example:

        host = network.add("vm-0")
        print(host.run(["hostname"]))

    Args:
        name: Host name.
        address: IP address, which the network gives it.
        hosts: File of host names, which is /etc/hosts on the machine.

    Attributes:
        name: Host name.
        address: IP address.
        process_id: Id of the machine's first process, as others see it from outside.
    """

    def __init__(self, name: str, address: str, hosts: pathlib.Path):
        self.name, self.address = name, address
        # The end of its input is the end of this program.
        start = 'hostname "$1"; mount --bind "$2" /etc/hosts; ip link set lo up; echo; exec cat'
        kinds = ("--net", "--pid", "--mount", "--uts", "--fork", "--kill-child=KILL")
        self._holder = subprocess.Popen(
            ["unshare", *kinds, "--mount-proc", "sh", "-ec", start, "sh", name, str(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            raise RuntimeError(f"the machine {name} cannot be made, see above")
        self.process_id = child_of(self._holder.pid)

    def popen(self, arguments: Sequence, **options):
        """Starts a program on this machine; options are those of `subprocess.Popen`."""
        # In a session of its own, so that Ctrl-C does not reach it.
        return subprocess.Popen(self._command(arguments), start_new_session=True, **options)

    def run(self, arguments: Sequence) -> str:
        """Runs a program on this machine, and returns what it prints.

        Raises:
            subprocess.CalledProcessError: If it fails.
        """
        return subprocess.run(
            self._command(arguments), check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def listen(self) -> socket.socket:
        """Returns a socket of this program that listens on this machine, at any free port."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (
            open("/proc/thread-self/ns/net") as own,
            open(f"/proc/{self.process_id}/ns/net") as there,
        ):
            # It concerns this thread only. A socket stays where it was made.
            if libc.setns(there.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
            try:
                return socket.create_server((self.address, 0))
            finally:
                libc.setns(own.fileno(), _CLONE_NEWNET)

    def power_off(self):
        """Kills all processes of this machine, and removes it."""
        self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout):
            pipe.close()

    def _command(self, arguments):
        enter = [f"--target={self.process_id}", "--net", "--pid", "--mount", "--uts"]
        return ["nsenter", *enter, "--", *map(str, arguments)]


class Network:
    """A network of machines inside this one, as a context manager.

    Example:

        with Network(directory) as network:
            host = network.add("n1")

    Args:
        directory: Directory for the file of host names.

    Raises:
        RuntimeError: On entering, if a program or the rights are missing.

    Attributes:
        switch: The machine that connects the others, for programs that all of them reach.
    """

    def __init__(self, directory: str | os.PathLike):
        self._hosts_file = pathlib.Path(directory) / "hosts"
        self._hosts: list[Host] = []
        self._numbers = iter(range(1, _GATEWAY))

    def __enter__(self):
        if missing := missing_for_hosts():
            raise RuntimeError(f"no machines can be made inside this one: {missing}")
        self._hosts_file.write_text("127.0.0.1 localhost\n")
        self.switch = Host("switch", f"{_SUBNET}{_GATEWAY}", self._hosts_file)
        self._hosts.append(self.switch)
        self._ip("link add bridge type bridge")
        self._ip(f"addr add {self.switch.address}/24 dev bridge")
        self._ip("link set bridge up")
        return self

    def __exit__(self, *_):
        while self._hosts:
            self._hosts.pop().power_off()

    def add(self, name: str, *other_names: str) -> Host:
        """Adds a machine.

        Args:
            name: Host name.
            *other_names: Further names under which other machines find it.
        """
        number = next(self._numbers)
        host = Host(name, f"{_SUBNET}{number}", self._hosts_file)
        self._hosts.append(host)
        self._ip(f"link add to{number} type veth peer name eth0 netns {host.process_id}")
        self._ip(f"link set to{number} master bridge up")
        host.run(["ip", "addr", "add", f"{host.address}/24", "dev", "eth0"])
        host.run(["ip", "link", "set", "eth0", "up"])
        with self._hosts_file.open("a") as file:
            file.write(" ".join([host.address, name, *other_names]) + "\n")
        return host

    def remove(self, host: Host):
        """Powers off a machine, and forgets its names."""
        if host not in self._hosts:  # the network is being closed
            return
        self._hosts.remove(host)
        host.power_off()
        lines = self._hosts_file.read_text().splitlines(keepends=True)
        # In place, because the file is mounted.
        self._hosts_file.write_text(
            "".join(line for line in lines if line.split()[0] != host.address)
        )

    def _ip(self, arguments):
        # Not in the switch's process namespace: the ids of processes are those outside.
        enter = ["nsenter", f"--target={self.switch.process_id}", "--net", "--", "ip"]
        subprocess.run([*enter, *arguments.split()], check=True)
