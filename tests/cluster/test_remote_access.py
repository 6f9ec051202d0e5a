"""Remote access to the servers of a job, tried through this machine's own addresses."""

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from kdist.cluster import Cluster, remote_access
from kdist.cluster.remote_access import check_remote_access, is_loopback_only, restrict_to_loopback


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


def reaches(host, port):
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_filter_drops_packets_to_other_addresses(family, own_address):
    wildcard = "::" if family == socket.AF_INET6 else "0.0.0.0"
    both = family == socket.AF_INET6
    with socket.create_server((wildcard, 0), family=family, dualstack_ipv6=both) as server:
        port = server.getsockname()[1]
        assert reaches("127.0.0.1", port)
        assert reaches(own_address, port)
        restrict_to_loopback(Cluster({"worker": [f"127.0.0.1:{port}", "127.0.0.1:1"]}, "worker", 0))
        assert reaches("127.0.0.1", port)
        assert reaches("127.0.0.1", port)
        if both:
            assert reaches("::1", port)
        assert not reaches(own_address, port)


def test_a_kernel_that_refuses_is_logged(monkeypatch, capsys):
    def refuses(listener):
        raise OSError("Protocol not available")

    monkeypatch.setattr(remote_access, "_attach", refuses)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        restrict_to_loopback(Cluster({"worker": [f"127.0.0.1:{port}", "127.0.0.1:1"]}, "worker", 0))
    assert f"port {port} of all addresses of this machine" in capsys.readouterr().err


TASK = """
import pathlib, sys, time
import kdist
strategy = kdist.create_strategy(sys.argv[1])
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server"])
def test_no_task_of_a_job_accepts_other_machines(strategy, own_address, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    launch = os.path.join(os.path.dirname(__file__), "..", "..", "scripts", "launch.py")
    flags = ["--workers=2", *(["--ps=1"] if strategy == "parameter_server" else [])]
    ready = tmp_path / "ready"
    command = [launch, *flags, f"--run_dir={tmp_path}", "--", tmp_path / "task.py", strategy, ready]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen([sys.executable, *map(str, command)], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert job.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
            time.sleep(1)  # the other tasks start their servers
            ports = _listening_ports(psutil.Process(job.pid).children(recursive=True))
        finally:
            tasks = 4 if strategy == "parameter_server" else 2
            try:
                assert len(ports) >= tasks
                assert all(not reaches(own_address, port) for port in ports)
            finally:
                job.terminate()
                job.wait(30)


def _listening_ports(processes):
    """Returns the ports that these processes listen on."""
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
