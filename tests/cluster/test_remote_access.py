"""Remote access to the servers of a job, tried through this machine's own addresses."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from kdist.cluster import Cluster, remote_access
from kdist.cluster.remote_access import check_remote_access, is_loopback_only, restrict_to_loopback
from tests.forked import python
from tests.tiers import seldom


def cluster_of(*hosts):
    return Cluster({"worker": [f"{host}:{4000 + n}" for n, host in enumerate(hosts)]}, "worker", 0)


def test_loopback_addresses():
    assert is_loopback_only(cluster_of("127.0.0.1", "localhost", "[::1]", "127.3.2.1"))
    assert not is_loopback_only(cluster_of("127.0.0.1", "10.0.0.2"))
    assert not is_loopback_only(cluster_of("a-host", "another"))


def test_other_machines_need_allow_remote():
    check_remote_access(cluster_of("127.0.0.1", "127.0.0.1"), allow_remote=False)
    check_remote_access(Cluster(), allow_remote=False)
    check_remote_access(cluster_of("10.0.0.1", "10.0.0.2"), allow_remote=True)
    with pytest.raises(ValueError, match="worker 0's address 10.0.0.1:4000 .* --allow_remote"):
        check_remote_access(cluster_of("10.0.0.1", "10.0.0.2"), allow_remote=False)


@pytest.fixture(scope="module")
def own_address():
    """Returns an address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        return one.getsockname()[0]


def reaches(host, port, seconds=1):
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError:
        return False
    return True


def job_on(port):
    return Cluster({"worker": [f"127.0.0.1:{port}", "127.0.0.1:1"]}, "worker", 0)


def create_server(family, port=0, shares_port=False):
    both = family == socket.AF_INET6
    return socket.create_server(
        ("", port), family=family, dualstack_ipv6=both, reuse_port=shares_port
    )


@pytest.fixture(autouse=True)
def close_guards(monkeypatch):
    """Closes the guards of a test at its end."""
    guards = []
    monkeypatch.setattr(remote_access, "_guards", guards)
    yield
    for guard in guards:
        guard.close()


def check_only_loopback_reaches(port, family, own_address):
    hosts = ["127.0.0.1"] if family == socket.AF_INET else ["127.0.0.1", "::1"]
    assert all(reaches(host, port) for host in hosts * 5)
    assert not reaches(own_address, port, 0.3)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_packets_to_other_addresses_are_dropped_from_the_start(family, own_address, monkeypatch):
    monkeypatch.setattr(remote_access, "_has_ipv6", lambda: family == socket.AF_INET6)
    monkeypatch.delenv("TF_GRPC_REUSE_PORT", raising=False)
    with create_server(family) as server:
        port = server.getsockname()[1]
        assert reaches(own_address, port)
    with contextlib.ExitStack() as stack:
        with restrict_to_loopback(job_on(port)):
            assert os.environ["TF_GRPC_REUSE_PORT"] == "1"
            assert not reaches(own_address, port, 0.3)
            stack.enter_context(create_server(family, port, shares_port=True))
            check_only_loopback_reaches(port, family, own_address)
        assert "TF_GRPC_REUSE_PORT" not in os.environ
        check_only_loopback_reaches(port, family, own_address)


def test_a_kernel_that_refuses_is_logged(monkeypatch, capsys):
    def refuses(*arguments):
        raise OSError("Protocol not available")

    monkeypatch.setattr(remote_access, "_attach", refuses)
    monkeypatch.delenv("TF_GRPC_REUSE_PORT", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with restrict_to_loopback(job_on(port)):
            assert "TF_GRPC_REUSE_PORT" not in os.environ
    assert f"port {port} of all addresses of this machine" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_server_that_the_guard_does_not_cover_is_logged(monkeypatch, capsys):
    monkeypatch.setattr(remote_access, "_has_ipv6", lambda: True)
    with create_server(socket.AF_INET) as server:
        port = server.getsockname()[1]
    with restrict_to_loopback(job_on(port)):
        server = create_server(socket.AF_INET, port, shares_port=True)
    with server:
        assert f"port {port} of all addresses of this machine" in capsys.readouterr().err


def test_jobs_on_several_machines_are_not_restricted(own_address):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with restrict_to_loopback(Cluster({"worker": [f"127.0.0.1:{port}", f"{own_address}:1"]})):
            pass
        assert reaches(own_address, port)


# It runs without rights, also in tests that run as root.
SERVER = """
import json, os, sys
import encodings.idna
import tensorflow as tf
from kdist.cluster import Cluster
from kdist.cluster.remote_access import restrict_to_loopback
from kdist.launch.local_engine import reserve_ports
from tests.cluster.test_remote_access import job_on, reaches

with reserve_ports(1) as (port,):
    cluster, attempts = job_on(port), [("127.0.0.1", port), (sys.argv[1], port, 0.3)]
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)
    with restrict_to_loopback(cluster):
        server = tf.distribute.Server(dict(cluster.tasks), "worker", 0, protocol="grpc")
        during = [reaches(*attempt) for attempt in attempts]
    print(json.dumps([during, [reaches(*attempt) for attempt in attempts]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_server_of_tensorflow_is_guarded_while_it_starts(own_address):
    assert python(SERVER, [own_address]) == [[True, False], [True, False]]


TASK = """
import pathlib, sys, time
import kdist
strategy = kdist.create_strategy(sys.argv[1])
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("strategy", ["multi_worker", *seldom(["parameter_server"])])
def test_no_task_of_a_job_accepts_other_machines(strategy, own_address, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    launch = os.path.join(os.path.dirname(__file__), "..", "..", "scripts", "launch.py")
    flags = ["--workers=2", *(["--ps=1"] if strategy == "parameter_server" else [])]
    ready = tmp_path / "ready"
    command = [launch, *flags, f"--run_dir={tmp_path}", "--", tmp_path / "task.py", strategy, ready]
    with open(tmp_path / "log", "w") as log, contextlib.ExitStack() as stack:
        job = subprocess.Popen([sys.executable, *map(str, command)], stdout=log, stderr=log)
        stack.callback(job.wait, 30)
        stack.callback(job.terminate)
        intruder = stack.enter_context(Intruder(job.pid, own_address))
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert job.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        time.sleep(1)  # the other tasks start their servers
        processes = psutil.Process(job.pid).children(recursive=True)
        ports = _listening_ports(processes)
        assert len(intruder.ports) == (4 if strategy == "parameter_server" else 2)
        assert set(intruder.ports) <= ports
        assert not any(reaches(own_address, port) for port in ports)
        # The kernel completes at most the one connection that fills the queue of a port's guard.
        assert len(intruder.connections) <= len(intruder.ports)
        assert not intruder.addresses() & _peers(processes)


class Intruder:
    """Tries to connect to the tasks of a job from its start on, and keeps its connections."""

    def __init__(self, pid, host):
        self._launcher, self._host = psutil.Process(pid), host
        self.ports, self.connections = [], []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._ended.set()
        self._thread.join()
        for connection in self.connections:
            connection.close()

    def addresses(self):
        """Returns the own (host, port) of each connection."""
        return {connection.getsockname()[:2] for connection in self.connections}

    def _run(self):
        while not self._ended.is_set():
            self.ports = self.ports or self._find_ports()
            for port in self.ports:
                with contextlib.suppress(OSError):
                    self.connections.append(socket.create_connection((self._host, port), 0.02))
            time.sleep(0.01)

    def _find_ports(self):
        for process in self._launcher.children(recursive=True):
            with contextlib.suppress(psutil.Error, KeyError):
                tasks = json.loads(process.environ()["TF_CONFIG"])["cluster"]
                return [int(one.rpartition(":")[2]) for role in tasks.values() for one in role]
        return []


def _peers(processes):
    """Returns the (host, port) of the clients whose connections these processes have accepted."""
    return {
        (connection.raddr.ip.removeprefix("::ffff:"), connection.raddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.raddr
    }


def _listening_ports(processes):
    """Returns the ports that these processes listen on."""
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
