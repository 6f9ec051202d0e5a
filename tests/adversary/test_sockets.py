"""Sockets that each program listens on: the table in SECURITY.md, and the kernel's list."""

import contextlib
import pathlib
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.serving.running import save_times

ROOT = pathlib.Path(__file__).parents[2]
_SECONDS = 120
TASK = """
import os, pathlib, sys, time
import kdist
strategy = kdist.create_strategy("multi_worker")
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
time.sleep(600)
"""
TRAINING = ["--dataset=digits", "--model=mlp", "--num_devices=2", "--epochs=10000", "--verbose=0"]


def addresses(program):
    """Returns the addresses in the rows of the table that begin with a program, sorted."""
    text = (ROOT / "SECURITY.md").read_text().partition("## Sockets")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    found = [row[1:] for row in rows if len(row) == 3 and row[0].startswith(f"`{program}")]
    assert found, f"{program} is not in the table"
    return sorted(where.partition(";")[0] for what, where in found if what != "none")


def listening(process):
    """Returns the addresses on which a process and its descendants receive, sorted.

    Sockets of one process that share a port, such as those that guard it, count once.
    """
    found = set()
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in each.net_connections("inet"):
                is_datagram = one.type == socket.SOCK_DGRAM
                if one.status == psutil.CONN_LISTEN or (is_datagram and not one.raddr):
                    address = one.laddr.ip.removeprefix("::ffff:")
                    is_any = address in ("::", "0.0.0.0")
                    found.add(("all addresses" if is_any else address, one.laddr.port))
    return sorted(address for address, _ in found)


@contextlib.contextmanager
def running(tmp_path, is_ready, program, *flags):
    """Starts a program, and yields its process once `is_ready` is true of its output."""
    log = tmp_path / "log"
    with log.open("w") as output:
        command = [sys.executable, ROOT / "scripts" / program, *flags]
        process = subprocess.Popen([*map(str, command)], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + _SECONDS
        while not is_ready(log.read_text()):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(_SECONDS)


@pytest.mark.exhaustive
def test_training_and_its_live_page(tmp_path):
    run = tmp_path / "run"
    metrics = run / "metrics.jsonl"
    flags = [f"--run_dir={run}", *TRAINING]
    with running(tmp_path, lambda _: metrics.exists(), "train.py", *flags) as process:
        assert listening(process) == addresses("kdist train") == []
    flags = ["--watch", "--port=0", f"--output={tmp_path / 'page.html'}", run]
    with running(tmp_path, lambda text: "http://" in text, "report.py", *flags) as process:
        assert listening(process) == addresses("kdist report")


@pytest.mark.exhaustive
def test_a_server_with_workers(tmp_path):
    save_times(tmp_path / "model" / "1", 2)
    flags = [f"--model_dir={tmp_path / 'model'}", "--port=0", "--grpc_port=0", "--workers=1"]
    with running(tmp_path, lambda text: "kdist serves" in text, "serve.py", *flags) as process:
        assert listening(process) == addresses("kdist serve")


@pytest.mark.slow
def test_a_job(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    ready = tmp_path / "ready"
    ready.mkdir()
    flags = ["--workers=2", f"--run_dir={tmp_path / 'run'}", "--", tmp_path / "task.py", ready]
    with running(tmp_path, lambda _: len([*ready.iterdir()]) == 2, "launch.py", *flags) as process:
        second_task = addresses("kdist launch`, each task")
        assert listening(process) == sorted(addresses("kdist launch") + second_task)
