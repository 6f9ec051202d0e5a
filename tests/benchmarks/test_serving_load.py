"""The program as a user runs it, its servers' processes, and its ratios."""

import functools
import re
import sys

import psutil
import pytest

from benchmarks.serving import environments, tables
from benchmarks.serving.contenders import CONTENDERS
from benchmarks.serving.servers import Command, Server
from benchmarks.serving.sessions import Entry, Load, Measured
from tests.benchmarks import programs

compare = functools.partial(programs.run, "serving_load")

# Serves, with a child that never ends by itself, and does not care for SIGTERM.
STUBBORN = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
address = ("127.0.0.1", int(sys.argv[1]))
http.server.HTTPServer(address, http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def measured(name, rates, p99, setting=""):
    contender = CONTENDERS[name]
    outcomes = [
        {
            "per_second": rate,
            "p50_ms": 10.0,
            "p90_ms": 12.0,
            "p99_ms": p99,
            "mean_ms": 11.0,
            "client_cores": 0.1,
            "answers": {"right": 99, "429": 1},
        }
        for rate in rates
    ]
    entry = Entry(contender, sys.executable, setting)
    return Measured(entry, outcomes, [100_000_000] * len(rates))


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_ratios_are_of_rounds_and_to_the_best_rival():
    text = tables.report(
        "resnet",
        {
            Load(clients=32): [
                measured("kdist", [100.0, 400.0, 300.0], 20.0),
                measured("unbatched", [100.0, 200.0, 100.0], 40.0),
                measured("ray", [10.0, 10.0, 10.0], 10.0, "2"),
                measured("mlserver", [50.0, 100.0, 150.0], 25.0, "5"),
            ]
        },
    )
    assert "### 32 clients" in text
    assert "kdist beside the best rival, MLServer, 5 ms: 2.00 × the requests/s" in text
    assert "0.80 × its p99" in text
    assert "kdist beside unbatched: 2.00 × the requests/s" in text
    table = {row[0]: row for row in rows(text)}
    assert table["Ray Serve, 2 ms"][1:3] == ["10", "10–10"]
    assert table["Ray Serve, 2 ms"][-2:] == ["3 429", "30.00 ×"]


def test_a_server_ends_with_all_its_children():
    command = Command([sys.executable, "-c", STUBBORN, "{port}"], "/")
    with Server(command, cores=1, timeout_seconds=60) as server:
        process = next(
            child
            for child in psutil.Process().children()
            if child.cmdline()[1:3] == ["-c", STUBBORN]
        )
        family = [process, *process.children()]
        assert len(family) == 2
        assert server.memory() > max(one.memory_info().rss for one in family)
        server.end(patience_seconds=0.2)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_a_server_that_ends_too_early_says_why():
    command = Command([sys.executable, "-c", "print('no model there')"], "/")
    with pytest.raises(RuntimeError, match="ended before it was ready:\nno model there"):
        Server(command, cores=1)


def test_rivals_without_environment_are_left_out(tmp_path):
    process = compare("--contenders=mlserver,bentoml", f"--rivals_dir={tmp_path}")
    assert process.returncode == 1
    assert process.stdout.count("is left out") == 2
    assert "nothing is left to be measured" in process.stderr


def test_an_environment_from_other_pins_is_none(tmp_path):
    installed = tmp_path / "bentoml" / "installed.txt"
    installed.parent.mkdir()
    installed.write_text((environments.REQUIREMENTS / "bentoml.txt").read_text())
    assert environments.python(tmp_path, "bentoml") == str(tmp_path / "bentoml/bin/python")
    installed.write_text("bentoml==1.0.0\n")
    assert environments.python(tmp_path, "bentoml") is None


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_row_for_each_server_under_each_load(tmp_path):
    process = compare(
        *("--models=small_resnet", "--contenders=kdist,kdist_grpc,unbatched", "--clients=3"),
        *("--rates=20", "--rounds=1", "--seconds=1", "--warm_up_seconds=0.5"),
        *("--save", f"--results_dir={tmp_path}"),
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert re.findall("^### (.+)$", process.stdout, re.MULTILINE) == [
        "3 clients",
        "20 requests a second, Poisson",
    ]
    table = [row for row in rows(process.stdout) if row[0].startswith(("kdist", "unbatched"))]
    assert [row[0] for row in table] == ["kdist, auto", "kdist, gRPC, auto", "unbatched"] * 2
    assert all(float(row[1]) > 0 for row in table)
    assert [row[-2] for row in table] == ["0"] * 6, "answers that are not right"
    (saved,) = tmp_path.iterdir()
    assert saved.read_text().startswith("# Servers compared")
    assert rows(saved.read_text()) == rows(process.stdout)
