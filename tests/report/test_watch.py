import http.client
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from kdist import report
from tests.report.example_runs import write_run

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "report.py"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", windows=2)


@pytest.fixture
def served(run, tmp_path):
    """The program and its port."""
    flags = ["--watch", "--port=0", f"--output={tmp_path / 'page.html'}"]
    program = subprocess.Popen(
        [sys.executable, SCRIPT, run, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    address = program.stdout.readline().decode()
    assert address.startswith("http://127.0.0.1:")
    yield program, int(address.strip().strip("/").rpartition(":")[2])
    program.kill()
    program.communicate()


def get(port, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.slow
def test_the_page_updates_only_when_a_file_changes(served, run, tmp_path):
    _, port = served
    status, page = get(port, "/")
    assert status == 200
    first = json.loads(get(port, "/state")[1])
    assert f'data-version="{first["version"]}"' in page
    made = (tmp_path / "page.html").stat().st_mtime_ns
    time.sleep(3)  # longer than between two checks
    assert (tmp_path / "page.html").stat().st_mtime_ns == made
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "epoch", "examples": 77777, "val_loss": 0.5}\n')
    until = time.monotonic() + 30
    while json.loads(get(port, "/state")[1])["version"] == first["version"]:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert (tmp_path / "page.html").stat().st_mtime_ns > made
    # The page on disk connects to nothing; the served page connects to its server.
    assert "connect-src" not in (tmp_path / "page.html").read_text()
    assert "connect-src 'self'" in page


def test_ctrl_c_ends_it(served):
    program, _ = served
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=30)
    assert program.returncode == 130
    assert said.decode().strip() == "report.py: stopped by Ctrl-C"


def test_other_sites_cannot_read_the_page(served):
    _, port = served
    assert get(port, "/", Host="evil.example")[0] == 403
    assert get(port, "/", Host=f"localhost:{port}")[0] == 200
    assert get(port, "/etc/passwd")[0] == 404


def test_a_port_in_use_and_a_missing_run_are_refused(run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is in use"):
            report.watch([run], tmp_path / "page.html", port=port)
    with pytest.raises(FileNotFoundError, match="is no run directory"):
        report.watch([tmp_path / "nowhere"], tmp_path / "page.html", port=0)
