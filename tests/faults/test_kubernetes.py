"""Kubernetes jobs as kdist writes them, on a stand-in whose pods are namespaces of this machine."""

import pytest

from kdist.launch.engines import Job, get_engine
from tests.faults.jobs import PYTHON_PATH, ROOT, check_equal

pytestmark = pytest.mark.slow


def test_an_eviction_costs_no_retry(kubernetes_cluster, start, undisturbed, record, tmp_path):
    expected = undisturbed("multi_worker")
    kubernetes_cluster.claims["runs"] = tmp_path
    run = start(
        "multi_worker",
        *("--engine=kubernetes", "--follow", "--name=cats", "--image=cats:1", "--max_restarts=0"),
        *("--option=claim=runs", f"--option=mount={tmp_path}", f"--env=PYTHONPATH={PYTHON_PATH}"),
    )
    run.wait_for_checkpoint(10)
    kubernetes_cluster.evict("cats-1")
    run.wait_for_success()
    check_equal(run, expected)
    assert run.num_lost_examples() == 0
    job = kubernetes_cluster.jobs["cats"]
    assert (job.num_failed, len(job.pods)) == (0, 4)
    outcome = "all save; both pods are created again, which costs no retry"
    record("a pod is evicted, on Kubernetes (stand-in)", "multi_worker", outcome, None, 0, "yes")


def test_roles_failures_and_limits(kubernetes_cluster, monkeypatch):
    """Shell scripts, which start at once."""
    monkeypatch.setattr("kdist.launch.engines.kubernetes._POLL_SECONDS", 0.2)
    engine, lines = get_engine("kubernetes"), []
    code = (
        "from kdist.cluster import Cluster; own = Cluster.resolve(); print(own.name, own.counts())"
    )
    environment = {"PYTHONPATH": str(ROOT)}
    job = Job("roles", ("python", "-c", code), ps=1, environment=environment, image="a")
    assert engine.submit(job).follow(lines.append) == 0
    assert "[pod/roles-0/task] chief 1 chief, 1 worker, 1 ps" in lines

    def run(name, code, **fields):
        job = Job(name, ("sh", "-c", code), image="a", **fields)
        return engine.submit(job).follow(lines.append), kubernetes_cluster.jobs[name].num_failed

    assert run("fails", "exit 3", max_restarts=1) == (3, 2)
    assert run("ends", "exit 124", max_restarts=1) == (124, 0)
    assert run("late", "sleep 100", time_limit_hours=1 / 3600) == (124, 0)
    handle = engine.submit(Job("stops", ("sleep", "100"), image="a"))
    handle.stop()
    assert "stops" not in kubernetes_cluster.jobs
