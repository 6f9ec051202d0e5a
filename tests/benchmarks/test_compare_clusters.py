"""The program as a user runs it, with so few steps that its figures mean nothing; and its parts."""

import functools
import re
import signal
import subprocess
import threading

import pytest

from benchmarks.clusters import brake, jobs, network, parts, tables
from benchmarks.rivals.cluster_workload import ClusterWorkload
from tests.benchmarks import programs

compare = functools.partial(programs.run, "compare_clusters")


def rates(*values, accuracy=None):
    """Answers, one for each repetition."""
    more = {} if accuracy is None else {"accuracy": accuracy}
    return [{"examples_per_second": v, "ms_per_step": 32e3 / v, **more} for v in values]


@pytest.mark.exhaustive
def test_two_processes_beside_one(tmp_path):
    process = compare(
        *("--only=multi_worker", "--steps=4", "--steps_per_call=4", "--repeats=1"),
        *("--save", f"--results_dir={tmp_path}"),
    )
    assert process.returncode == 0, process.stderr[-3000:]
    rows = re.findall(r"^\| (\w+), 4 per call +\| +4 \| +([\d.]+) \|", process.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == ["mirrored", "multi_worker"]
    assert all(float(milliseconds) > 0 for _, milliseconds in rows)
    assert re.search(r"relative to mirrored, 4 per call: \d+\.\d\d .*(met|missed)", process.stdout)
    (saved,) = tmp_path.iterdir()
    text = saved.read_text()
    assert text.startswith("# Clusters compared")
    assert "TF_NUM_INTRAOP_THREADS=1" in text
    assert "## multi_worker and mirrored" in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--steps_per_call=0"], "--steps_per_call=0: give numbers"),
        (["--only=multi_worker", "--cores=10000"], "--cores=10000, but only"),
    ],
)
def test_refuses(flags, says):
    process = compare(*flags)
    assert process.returncode == 1
    assert says in process.stderr


def test_a_slow_link_is_refused_without_its_rights_or_programs(monkeypatch):
    monkeypatch.setattr(network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda program: None)
    with pytest.raises(FileNotFoundError, match="iproute2"):
        network.check()
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionError, match=r"as root .*--only="):
        network.check()


def test_ratios_are_taken_within_a_repetition_and_held_against_the_target():
    """The machine is ten times slower in the second repetition, for both."""
    part = parts.multi_worker(parts.Sizes(steps_per_call=[1, 16]))
    answers = {
        "mirrored, 1 per call": rates(1000, 100, 1000),
        "multi_worker, 1 per call": rates(800, 75, 690),
        "mirrored, 16 per call": rates(1000, 100, 1000),
        "multi_worker, 16 per call": rates(650, 65, 600),
    }
    one, sixteen = tables.outcomes(part, answers)
    assert list(one.values) == pytest.approx([0.8, 0.75, 0.69])
    assert (one.verdict, sixteen.verdict) == ("met", "missed")
    assert "1 per call: 0.75 (0.69 to 0.80); target ≥ 0.7: met" in tables.text(part, answers)


def test_accuracy_is_compared_in_points():
    part = parts.network(parts.Sizes())
    answers = {
        "synchronous": rates(1000, 1000, accuracy=0.880),
        "local SGD, 8 steps": rates(3500, 3600, accuracy=0.877),
    }
    rate, accuracy = tables.outcomes(part, answers)
    assert rate.median == pytest.approx(3.55)
    assert accuracy.median == pytest.approx(-0.3)
    assert (rate.verdict, accuracy.verdict) == ("met", "met")
    answers["local SGD, 8 steps"] = rates(3500, 3600, accuracy=0.873)
    assert tables.outcomes(part, answers)[1].verdict == "missed"
    assert "0.8730" in tables.table(part, answers)


def test_without_local_sgd_nothing_is_held_against_it():
    part = parts.network(parts.Sizes(local_steps=0))
    assert list(part.trials) == ["synchronous"]
    assert tables.outcomes(part, {"synchronous": rates(1000, accuracy=0.9)}) == []


def test_what_is_shown_only_has_no_verdict():
    part = parts.slowed(parts.Sizes())
    answers = {name: rates(100.0) for name in part.trials}
    answers["parameter_server, slowed"] = rates(59.0)
    verdicts = [outcome.verdict for outcome in tables.outcomes(part, answers)]
    assert verdicts == ["", "missed", ""]


class _Stopped:
    """A task that keeps the signals it gets."""

    def __init__(self, enough):
        self.signals, self.has_enough = [], threading.Event()
        self._enough = enough

    def signal(self, number):
        self.signals.append(number)
        if len(self.signals) >= self._enough:
            self.has_enough.set()


def test_a_slowed_task_is_stopped_and_always_goes_on():
    task, warm = _Stopped(enough=6), threading.Event()
    with brake.slowed(task, warm.is_set) as found:
        assert task.signals == []
        warm.set()
        assert task.has_enough.wait(60)
    stops, goes_on = task.signals[::2], task.signals[1::2]
    assert set(stops) == {signal.SIGSTOP}
    assert set(goes_on) == {signal.SIGCONT}
    assert len(stops) == len(goes_on) >= 3
    assert 0 < found.share < 1


def test_a_task_that_fails_is_named_with_its_last_lines():
    trial = jobs.Trial("no_such_rival", ClusterWorkload("multi_worker", 1, 1), {"worker": 2})
    with pytest.raises(RuntimeError, match=r"worker \d failed with exit code 1(.|\n)*No module"):
        jobs.run(trial, seed=0, timeout_seconds=60)


def test_of_two_hosts_nothing_is_left():
    try:
        with network.two_hosts(rate_mbit=10) as hosts:
            assert {host.namespace for host in hosts} <= _namespaces()
            shown = _output(*hosts[0].prefix, "tc", "qdisc", "show")
            assert "tbf" in shown
            assert "rate 10Mbit" in shown
            assert f"{hosts[1].address}/24" in _output(*hosts[1].prefix, "ip", "address")
    except (PermissionError, FileNotFoundError, RuntimeError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    assert not {host.namespace for host in hosts} & _namespaces()


def _namespaces():
    return {line.split()[0] for line in _output("ip", "netns", "list").splitlines()}


def _output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
