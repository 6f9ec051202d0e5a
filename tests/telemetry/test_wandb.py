"""The W&B writer with a stub of W&B's server and the real wandb package."""

import contextlib
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import yaml

import kdist.telemetry.writers.tracker
import kdist.telemetry.writers.wandb
from kdist.run_directory import RunDirectory
from kdist.telemetry import RunWriter, Samples, SeveralWriters, WandbWriter
from kdist.telemetry.writers import device_curves, metric_curves
from kdist.telemetry.writers.wandb_process import why_not_online
from tests.telemetry.waiting import wait_until
from tests.telemetry.wandb_stub import Stub
from tests.tiers import seldom

ROOT = pathlib.Path(__file__).parents[2]
KEY = "0123456789abcdef0123456789abcdef87654321"

# Generous: these are no measurements. A `write` that waited for a server would take longer.
AT_ONCE_SECONDS = 2.0
START_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _no_account(monkeypatch, tmp_path):
    """No login and no settings but those of the test; looks at the server often."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(kdist.telemetry.writers.wandb, "_WATCH_SECONDS", 1.0)
    monkeypatch.setattr(kdist.telemetry.writers.wandb, "_ANSWER_SECONDS", 1.0)


@pytest.fixture(autouse=True)
def _nothing_outlives_a_test(tmp_path):
    yield
    try:
        wait_for(lambda: not wandb_processes(tmp_path), 10.0)
    finally:
        for process in wandb_processes(tmp_path):
            process.kill()


@pytest.fixture
def stub(monkeypatch):
    with Stub() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield server


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "first", {"model": "mlp"})


def wandb_processes(directory):
    """Returns the processes of runs below the directory, also without their parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            cache = process.environ().get("WANDB_CACHE_DIR", "")
            if cache.startswith(str(directory)) and process.pid != os.getpid():
                found.append(process)
    return found


def new_writer(run, mode="auto", close_seconds=60.0, **options):
    return WandbWriter(
        run.path, mode, config={"model": "mlp"}, close_seconds=close_seconds, **options
    )


def wait_for(condition, seconds=START_SECONDS):
    wait_until(condition, seconds)


def metrics(steps):
    common = {"epoch": 1, "seconds": 0.5, "learning_rate": 0.1}
    for step in steps:
        yield {"kind": "train", "step": step, "examples": step * 32, **common, "loss": 1 / step}
    timing = {"step_seconds_p50": 0.25, "replica_busy_seconds": [0.125, 0.5], "input_share": None}
    yield {"kind": "timing", "step": steps[-1], "examples": steps[-1] * 32, **common, **timing}


def devices(moments):
    for moment in moments:
        for device in ("cpu/0", "cpu/1", "gpu/0"):
            yield {
                "time": 1e9 + moment,
                "seconds": float(moment),
                "host": "node7",
                "device": device,
                "utilization": 1 / (moment + 1),
            }


def use(writer, steps=range(1, 21)):
    """Writes as training does; gives how long the longest call took."""
    longest = 0.0
    for method, records in (("write", metrics(steps)), ("write_device", devices(steps))):
        for record in records:
            began = time.monotonic()
            getattr(writer, method)(record)
            longest = max(longest, time.monotonic() - began)
    return longest


def end(run, writer):
    """Writes what comes last, and closes."""
    writer.write_summary({"test_accuracy": 0.75, "verdict": ["nothing to say"]})
    run.report.write_text("<html>the report</html>")
    writer.write_report(run.report)
    axes = {"epoch": 1, "step": 20, "examples": 640, "seconds": 0.5}
    samples = Samples(np.zeros((2, 4, 4, 1), "uint8"), [0, 1])
    writer.write_samples({**axes, "rows": samples.rows(np.eye(2))})
    model = run.path / "models" / "my model" / "3"
    (model / "variables").mkdir(parents=True)
    (model / "variables" / "weights").write_text("the weights")
    writer.write_model(model, {"test_accuracy": 0.75}, aliases=["best"])
    writer.close()


def assert_holds_all(run, rows):
    """Every number in the files of the run directory is in the rows, at its examples or seconds."""

    def rounded(row):
        return {name: float(f"{value:.10g}") for name, value in row.items()}

    rows = [rounded({k: v for k, v in row.items() if isinstance(v, int | float)}) for row in rows]
    for line in run.metrics.read_text().splitlines():
        wanted = rounded(metric_curves(json.loads(line))).items()
        assert any(wanted <= row.items() for row in rows), wanted
    for line in run.devices.read_text().splitlines():
        record = json.loads(line)
        wanted = rounded({"seconds": record["seconds"], **device_curves(record)}).items()
        assert any(wanted <= row.items() for row in rows), wanted


def inspect(directory):
    """Returns the records of a run's file, read by wandb itself."""
    command = [
        pathlib.Path(sys.executable).with_name("wandb"),
        "leet",
        "inspect",
        "--json",
        directory,
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in process.stdout.splitlines()]


def wandb_sync(said):
    """Does what the writer said."""
    command = shlex.split(said)
    assert command[:2] == ["wandb", "sync"]
    command[0] = str(pathlib.Path(sys.executable).with_name("wandb"))
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)


def of_kind(records, kind):
    return [record[kind] for record in records if record["type"] == kind]


def run_files(run):
    (directory,) = [path for path in (run.path / "wandb").glob("*run-*") if not path.is_symlink()]
    return directory


def assert_whole(run):
    """The run directory has everything, whatever became of W&B."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert len(lines) >= 21
    assert json.loads(run.summary.read_text())["test_accuracy"] == 0.75


def assert_key_is_nowhere(run, *texts):
    for path in run.path.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    for text in texts:
        assert KEY not in text


def command_lines():
    processes = psutil.Process().children(recursive=True)
    return [" ".join(process.cmdline()) for process in processes]


@pytest.mark.slow
def test_offline_holds_what_the_run_directory_holds(run, capfd):
    about = {"group": "job", "job_type": "train", "tags": ["first", "cpu"], "notes": "a note"}
    wandb = new_writer(run, "offline", **about)
    writer = SeveralWriters([RunWriter(run), wandb])
    writer.write_config({"batch": {"global": 128, "replicas": 2}})
    print("a line of the program")
    use(writer)
    wait_for(lambda: wandb.location)
    end(run, writer)
    files = run_files(run)
    assert wandb.location == str(files)
    records = inspect(files)
    rows = [item["item"] for item in of_kind(records, "history")]
    assert_holds_all(run, rows)
    (about,) = of_kind(records, "run")
    assert about["config"]["update"]["model"] == "mlp"
    assert about["tags"] == ["first", "cpu"]
    assert about["notes"] == "a note"
    assert about["git"]["commit"]
    (config,) = of_kind(records, "config")
    assert config["update"]["batch"] == {"global": 128, "replicas": 2}
    named = {name: about[name] for name in ("project", "display_name", "run_group", "job_type")}
    assert named == {
        "project": "kdist",
        "display_name": "first",
        "run_group": "job",
        "job_type": "train",
    }
    summary = [item["update"] for item in of_kind(records, "summary") if "update" in item]
    assert {"test_accuracy": 0.75, "verdict": ["nothing to say"]} in summary
    report, table, model = of_kind(records, "artifact")
    assert (report["type"], table["type"], model["type"]) == ("report", "run_table", "model")
    assert report["manifest"]["contents"][0]["local_path"] == str(run.report)
    assert (model["name"], set(model["aliases"])) == ("my-model", {"best", "latest"})
    assert json.loads(model["metadata"]) == {"test_accuracy": 0.75}
    assert model["manifest"]["contents"][0]["path"] == "variables/weights"
    (row,) = [row for row in rows if "samples._type" in row]
    assert (row["samples.nrows"], row["samples.ncols"], row["examples"]) == (2, 4, 640)
    axes = {
        metric.get("glob_name") or metric.get("name"): metric.get("step_metric")
        for metric in of_kind(records, "metric")
    }
    names = "train/*", "timing/*", "learning_rate", "samples"
    assert {axes[name] for name in names} == {"examples"}
    assert axes["gpu/*"] == "seconds"
    assert of_kind(records, "exit")[0].get("exit_code", 0) == 0
    assert "proc.memory.rssMB" in of_kind(records, "stats")[0]["item"]
    logged = [item["line"] for item in of_kind(records, "output_raw")]
    assert logged[0] == "a line of the program\n"
    output = capfd.readouterr()
    assert output.out == "a line of the program\n"
    assert output.err == f"kdist: W&B: offline; to upload it: wandb sync {files}\n"


def test_online_uploads_the_same_and_never_the_key(run, stub, capfd):
    wandb = new_writer(run, "auto", group="job", job_type="train")
    writer = SeveralWriters([RunWriter(run), wandb])
    use(writer)
    wait_for(lambda: wandb.location)
    assert wandb.location.startswith(stub.url)
    lines = command_lines()
    assert any("wandb-core" in line for line in lines)
    assert not any(KEY in line for line in lines)
    end(run, writer)
    (sent,) = stub.runs.values()
    assert_holds_all(run, sent.history)
    assert sent.config["model"]["value"] == "mlp"
    assert sent.variables["groupName"] == "job"
    assert sent.variables["jobType"] == "train"
    assert sent.summary["test_accuracy"] == 0.75
    assert sent.exit_code == 0
    assert sorted(stub.artifacts) == ["model", "report", "run_table"]  # uploaded in any order
    assert b"the weights" in stub.uploads.values()
    assert b"<html>the report</html>" in stub.uploads.values()
    assert stub.keys == {KEY}
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err == f"kdist: W&B: {wandb.location}\n"
    assert_key_is_nowhere(run, output.out, output.err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("frozen", "does not answer"),
        *seldom(
            [
                ("refusing", "answers with 503"),
                ("dead", "does not answer"),
                ("expired", "does not accept the API key (wandb login --relogin)"),
            ]
        ),
    ],
)
def test_a_server_lost_during_the_run_blocks_nothing(run, stub, capfd, mode, says):
    wandb = new_writer(run, "auto", close_seconds=8.0)
    writer = SeveralWriters([RunWriter(run), wandb])
    use(writer)
    wait_for(lambda: wandb.location)
    stub.mode = mode
    longest = use(writer, range(21, 300))
    said = ""

    def is_said():
        nonlocal said
        said += capfd.readouterr().err
        return "afterwards: " in said

    wait_for(is_said)
    assert says in said
    longest = max(longest, use(writer, range(300, 350)))
    assert longest < AT_ONCE_SECONDS
    began = time.monotonic()
    end(run, writer)
    assert time.monotonic() - began < 8.0 + 5.0
    assert capfd.readouterr().err == ""  # it had been said
    assert_whole(run)
    assert_key_is_nowhere(run)
    # And what it said to do delivers everything, in a later session.
    stub.mode = "healthy"
    stub.runs.clear()
    wandb_sync(said.partition("afterwards: ")[2])
    (sent,) = stub.runs.values()
    assert_holds_all(run, sent.history)
    assert sent.summary["test_accuracy"] == 0.75
    assert sent.exit_code == 0
    assert {b"<html>the report</html>", b"the weights"} <= set(stub.uploads.values())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("frozen", "does not answer"),
        ("refusing", "answers with 503"),
        ("expired", "does not accept the API key"),
    ],
)
def test_without_a_server_at_the_start_the_run_is_offline(run, stub, capfd, mode, says):
    stub.mode = mode
    wandb = new_writer(run, "online")
    writer = SeveralWriters([RunWriter(run), wandb])
    assert use(writer) < AT_ONCE_SECONDS
    end(run, writer)
    said = capfd.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert said.endswith(f"offline; to upload it: wandb sync {run_files(run)}\n")
    assert_whole(run)
    assert_holds_all(run, [item["item"] for item in of_kind(inspect(run_files(run)), "history")])


def test_online_without_a_login_is_logged(run, stub, monkeypatch, capfd):
    monkeypatch.delenv("WANDB_API_KEY")
    new_writer(run, "online").close()
    assert "there is no login (wandb login); offline" in capfd.readouterr().err
    assert not stub.operations


def test_wandb_mode_is_respected(run, stub, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")
    new_writer(run).close()
    assert "kdist: W&B: offline" in capfd.readouterr().err
    assert not stub.operations


def test_a_login_in_netrc_is_found(run, stub, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY")
    netrc = tmp_path / "home" / ".netrc"
    machine = stub.url.removeprefix("http://")
    netrc.write_text(f"machine {machine}\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    wandb = new_writer(run)
    wandb.close()
    assert wandb.location.startswith(stub.url)
    assert stub.keys == {KEY}
    assert_key_is_nowhere(run)


def test_a_hanging_process_is_killed(run, capfd):
    """Simulates a hang anywhere in wandb."""
    wandb = new_writer(run, "offline", close_seconds=1.0)
    writer = SeveralWriters([RunWriter(run), wandb])
    wait_for(lambda: wandb.location)
    wandb._process.send_signal(signal.SIGSTOP)
    # More than a pipe holds.
    assert use(writer, range(1, 1000)) < AT_ONCE_SECONDS
    end(run, writer)
    said = capfd.readouterr().err
    assert said.count("the upload did not end within 1 s") == 1
    assert f"afterwards: wandb sync {run_files(run)}\n" in said
    assert_whole(run)
    wandb._process.wait(timeout=10)


@pytest.mark.slow
def test_excess_records_are_dropped_and_logged_once(run, monkeypatch, capfd):
    monkeypatch.setattr(kdist.telemetry.writers.tracker, "_MAX_QUEUED", 10)
    wandb = new_writer(run, "offline")
    for record in metrics(range(1, 2000)):
        wandb.write(record)
    wandb.close()
    assert capfd.readouterr().err.count("wandb is too slow and misses some records") == 1
    history = of_kind(inspect(run_files(run)), "history")
    assert 0 < len(history) < 2000


@pytest.mark.slow
def test_a_process_that_dies_is_logged_once(run, capfd):
    wandb = new_writer(run, "offline")
    writer = SeveralWriters([RunWriter(run), wandb])
    wait_for(lambda: wandb.location)
    wandb._process.kill()
    wandb._process.wait()
    use(writer)
    end(run, writer)
    assert capfd.readouterr().err.count("its process ended with code -9") == 1
    assert_whole(run)


def test_a_package_that_cannot_be_imported_is_logged_once(run, monkeypatch, tmp_path, capfd):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "wandb.py").write_text("raise ImportError('no wandb here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    writer = SeveralWriters([RunWriter(run), new_writer(run)])
    use(writer)
    end(run, writer)
    said = capfd.readouterr().err
    assert said.count("(ImportError: no wandb here); the run continues without W&B") == 1
    assert said.count("\n") == 1
    assert_whole(run)


def run_agents(tmp_path, monkeypatch, more, number):
    """Runs agents of wandb that take a trial each; returns what they printed.

    Args:
        tmp_path: working directory of the agents.
        monkeypatch: of pytest.
        more: further flags of `kdist train`; the last value of a flag counts.
        number: number of agents, each a process.
    """
    command = tmp_path / "bin" / "kdist"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kdist "$@" {more}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    agent = [pathlib.Path(sys.executable).with_name("wandb"), "agent", "--count=1", "me/kdist/s"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(agent, cwd=tmp_path, **output) for _ in range(number)]
    try:
        printed = [each.communicate(timeout=240)[0] for each in agents]
    finally:
        for each in agents:
            each.kill()
    assert [each.returncode for each in agents] == [0] * number, printed
    return printed


@pytest.mark.exhaustive
def test_an_agent_of_a_sweep_trains_with_its_parameters(stub, tmp_path, monkeypatch):
    """The agent is wandb's own, and runs the command of the sweep that users copy."""
    stub.sweep = (ROOT / "scripts" / "wandb_sweep.yaml").read_text()
    sweep = yaml.safe_load(stub.sweep)
    chosen = {"learning_rate": 0.02, "jit_compile": False}
    for name, parameter in sweep["parameters"].items():
        chosen.setdefault(name, parameter.get("values", [None])[-1])
    stub.trials["trial"] = chosen
    more = "--epochs=2 --wandb_samples=2 --export=models/digits"
    [said] = run_agents(tmp_path, monkeypatch, more, 1)
    assert stub.runs.keys() == {"trial"}, said
    sent = stub.runs["trial"]
    assert {name: sent.config[name]["value"] for name in chosen} == chosen
    metric = sweep["metric"]["name"]
    assert 0 <= sent.summary[metric] <= 1
    for name in (metric, "samples"):
        assert len([row for row in sent.history if name in row]) == 2
    assert sorted(stub.artifacts) == ["model", "model", "report", "run_table", "run_table"]
    assert sent.exit_code == 0
    # Runs of a sweep share a directory, which `kdist report` compares.
    [parent] = (tmp_path / "runs").iterdir()
    assert parent.name.startswith("sweep-")
    [run] = kdist.report.read_runs([parent])
    assert {name: run.config[name] for name in chosen} == chosen


@pytest.mark.exhaustive
def test_two_agents_share_a_sweep_and_its_better_region_is_found(stub, tmp_path, monkeypatch):
    stub.sweep = (ROOT / "scripts" / "wandb_sweep.yaml").read_text()
    metric = yaml.safe_load(stub.sweep)["metric"]["name"]
    rates = {"bad": 1e-6, "good": 0.05}
    stub.trials = {name: {"learning_rate": rate} for name, rate in rates.items()}
    run_agents(tmp_path, monkeypatch, "--epochs=3 --local_batch_size=16", 2)
    assert stub.takers.keys() == rates.keys()
    assert len(set(stub.takers.values())) == 2
    for name, rate in rates.items():
        sent = stub.runs[name]
        assert (sent.config["learning_rate"]["value"], sent.exit_code) == (rate, 0)
        assert len([row for row in sent.history if metric in row]) == 3
    assert stub.runs["good"].summary[metric] > 0.5 > 0.3 > stub.runs["bad"].summary[metric]
    # The report finds the same without the server.
    [parent] = (tmp_path / "runs").iterdir()
    runs = kdist.report.read_runs([parent])
    best = max(runs, key=lambda run: run.summary["test_accuracy"])
    assert (len(runs), best.config["learning_rate"]) == (2, 0.05)


TRAINING = """
import os, resource, signal, sys, time
from kdist.run_directory import RunDirectory
from kdist.telemetry import create_writer

run = RunDirectory.create(sys.argv[1], {"model": "mlp"})
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
writer = create_writer(run, is_chief=True, wandb_mode="offline")
for step in range(1, 400):
    writer.write({"kind": "train", "epoch": 1, "step": step, "examples": step, "loss": 1 / step})
    time.sleep(0.01)
"""

ENDS = {
    "closes": "writer.write_summary({'test_accuracy': 0.75})\nwriter.close()\n",
    "forgets": "raise RuntimeError('training failed')\n",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)\n",
}


def train(tmp_path, how, *arguments):
    command = [sys.executable, "-c", TRAINING + ENDS[how], str(tmp_path / "run"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_training_continues_on_a_full_disk(tmp_path):
    process = train(tmp_path, "closes", "12000")
    assert process.returncode == 0, process.stderr
    said = process.stderr.splitlines()
    assert len([line for line in said if "cannot write metrics" in line]) == 1
    assert len([line for line in said if line.startswith("kdist: W&B:")]) <= 2
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == {"test_accuracy": 0.75}


# A process of W&B that starts when training has ended, as on a busy machine.
SLOW_START = """
import os, sys, time

if any("wandb_process" in argument for argument in sys.orig_argv):
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["quick", "slow"])
@pytest.mark.parametrize("how", ["forgets", "killed"])
def test_the_process_of_a_killed_training_ends(tmp_path, monkeypatch, how, start):
    """It has written the records, though nobody reads its answers."""
    if start == "slow":
        (tmp_path / "sitecustomize.py").write_text(SLOW_START)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert train(tmp_path, how).returncode != 0
    run = RunDirectory(tmp_path / "run")
    wait_for(lambda: not wandb_processes(run.path))
    records = inspect(run_files(run))
    assert of_kind(records, "exit")[0]["exit_code"] == 1
    # A thread hands records on; the last few may be lost with the process.
    assert len(of_kind(records, "history")) >= 350


@pytest.mark.parametrize("mode", ["healthy", "refusing", "expired", "dead", "frozen"])
def test_reasons_of_a_server_to_refuse_runs(mode):
    says = {
        "healthy": None,
        "refusing": "answers with 503",
        "expired": "does not accept the API key",
        "dead": "does not answer",
        "frozen": "does not answer",
    }[mode]
    with Stub(mode) as server:
        reason = why_not_online(server.url, KEY, 0.5)
    assert (reason is None) if says is None else (says in reason)


def test_an_unreachable_server():
    with Stub() as server:
        url = server.url
    assert "does not answer" in why_not_online(url, KEY, 0.5)
