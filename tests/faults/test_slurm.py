"""Jobs on Slurm itself, whose nodes are namespaces of this machine."""

import time

import pytest

from kdist.exit_codes import INTERRUPTED
from kdist.launch.engines import Job, get_engine
from tests.faults.jobs import check_equal

pytestmark = pytest.mark.slow


def shell_job(code, **fields):
    return Job("dogs", ("sh", "-c", code), options={"cpus-per-task": "1"}, **fields)


def test_a_preempted_job_is_requeued_once_and_ends_as_an_undisturbed_one(
    slurm_cluster, start, undisturbed, record, tmp_path, monkeypatch
):
    expected = undisturbed("multi_worker")
    monkeypatch.chdir(tmp_path)  # for the file with the output
    run = start("multi_worker", "--engine=slurm", "--follow", "--name=cats", "--partition=low")
    run.wait_for_checkpoint(10)
    slurm_cluster.preempt()
    run.wait_for_success()
    check_equal(run, expected)
    assert run.num_lost_examples() == 0
    assert get_engine("slurm").find("cats").status().restarts == 1
    outcome = "all save; Slurm queues the job again"
    record("a job of a higher partition, on Slurm", "multi_worker", outcome, None, 0, "yes")


def test_roles_ends_and_limits(slurm_cluster, tmp_path, monkeypatch):
    """Roles, failures, and `scancel`: shell scripts, which start at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kdist.launch.engines.slurm._POLL_SECONDS", 0.2)
    engine = get_engine("slurm")
    code = (
        "from kdist.cluster import Cluster; own = Cluster.resolve();"
        "import socket; print(own.name, own.counts(), socket.gethostname())"
    )
    lines = []
    job = Job("roles", ("python", "-c", code), ps=1)
    assert engine.submit(job).follow(lines.append) == 0
    for line in ("0: chief", "1: worker 0", "2: ps 0"):
        number = int(line[0]) + 1
        assert f"{line} 1 chief, 1 worker, 1 ps n{number}" in lines
    failing = "[ $SLURM_PROCID = 0 ] || sleep 100; echo x >> tries; exit 3"
    handle = engine.submit(shell_job(failing, workers=2, max_restarts=1))
    assert handle.follow(lines.append) == 3
    assert handle.status().restarts == 0
    assert (tmp_path / "tries").read_text() == "x\n" * 2
    saving = "trap 'exit 143' TERM; touch begun; while true; do sleep 0.1; done"
    handle = engine.submit(shell_job(saving))
    while not (tmp_path / "begun").exists():
        time.sleep(0.05)
    handle.stop()
    assert handle.follow(lines.append) == INTERRUPTED
    assert handle.status().restarts == 0
