"""Machines that are namespaces of this one, and their network."""

import sys

import pytest

from kdist.testing.clouds.hosts import Network, missing_for_hosts


@pytest.fixture
def network(tmp_path):
    if missing := missing_for_hosts():
        pytest.skip(missing)
    with Network(tmp_path) as network:
        yield network


SERVE = "import socket; socket.create_server(('', 2222)).accept()[0].send(b'hello')"
ASK = "import socket; print(socket.create_connection(('{}', 2222)).recv(5).decode())"


def test_machines_have_names_and_ports_of_their_own(network):
    first, second = network.add("n1"), network.add("n2", "n2.cats")
    assert first.run(["hostname"]) == "n1\n"
    servers = [host.popen([sys.executable, "-c", SERVE]) for host in (first, second)]
    for host, name in ((first, "n2.cats"), (second, "n1")):
        again = 'until "$@" 2> /dev/null; do sleep 0.02; done'
        asking = ["sh", "-c", again, "sh", sys.executable, "-c", ASK.format(name)]
        assert host.run(asking) == "hello\n"
    assert [server.wait(10) for server in servers] == [0, 0]
    assert "default" not in first.run(["ip", "route"])  # no way to other networks


def test_power_off_kills_all_processes(network, tmp_path):
    host = network.add("n1")
    started = tmp_path / "started"
    process = host.popen(["sh", "-c", f"setsid sleep 60 & touch {started}; wait"])
    while not started.exists():
        assert process.poll() is None
    network.remove(host)
    assert process.wait(10) != 0
    assert "n1" not in (tmp_path / "hosts").read_text()


def test_a_socket_of_this_program_listens_on_a_machine(network):
    with network.switch.listen() as listening:
        _, port = listening.getsockname()
        host = network.add("n1")
        code = f"import socket; socket.create_connection(('{network.switch.address}', {port}))"
        client = host.popen([sys.executable, "-c", code])
        listening.accept()[0].close()
        assert client.wait(10) == 0
