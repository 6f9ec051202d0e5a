"""kubectl of a Kubernetes job, with a stand-in."""

import json

import pytest
import yaml

from kdist.launch.engines import Job, NoSuchJobError
from kdist.launch.engines.kubernetes import Kubernetes

JOB = Job("cats", ("train.py",), workers=2, image="cats:1", options={"claim": "runs"})


def job(status, managed_by="kdist"):
    """Returns the JSON of a job with this status."""
    metadata = {
        "name": "cats",
        "labels": {"app.kubernetes.io/managed-by": managed_by},
        "annotations": {"kdist/usd-per-hour": "0.5"},
        "creationTimestamp": "2026-11-25T10:00:00Z",
    }
    return json.dumps({"metadata": metadata, "spec": {"completions": 2}, "status": status})


def ended(kind, **fields):
    condition = {"type": kind, "status": "True", "lastTransitionTime": "2026-11-25T13:00:00Z"}
    return {"startTime": "2026-11-25T11:00:00Z", "conditions": [{**condition, **fields}]}


def test_submit_applies_the_text_and_a_secret(state):
    engine = Kubernetes()
    engine.submit(JOB)
    secret, *others = yaml.safe_load_all(state.read("applied"))
    assert others == list(yaml.safe_load_all(engine.text(JOB)))
    assert secret["metadata"]["name"] == "cats-token"
    token = secret["stringData"]["token"]
    assert len(token) == 32
    assert token not in state.read("calls")  # other users see the arguments of processes


def test_a_name_that_is_taken_is_refused(state):
    state.write("kind", "jobs.batch")
    state.write("job.json", job({"active": 2}))
    with pytest.raises(RuntimeError, match="another --name"):
        Kubernetes().submit(JOB)
    assert state.read("applied") == ""


def test_find_stop_and_cost(state):
    engine = Kubernetes()
    with pytest.raises(NoSuchJobError, match="no job cats"):
        engine.find("cats")
    state.write("kind", "tfjobs.kubeflow.org")  # without JobSets in the cluster
    state.write("job.json", job({"active": 2}))
    found = engine.find("cats")
    assert found.flavor == "tfjob"
    found.stop()
    calls = state.read("calls").splitlines()
    assert "delete --ignore-not-found tfjobs.kubeflow.org/cats" in calls
    assert calls[-1].startswith(
        "delete service,networkpolicy,secret -l app.kubernetes.io/name=cats"
    )
    state.write("job.json", job(ended("Complete")))
    assert found.cost().machine_hours == 4.0
    assert found.cost().usd == 2.0


def test_a_job_of_somebody_else_is_not_found(state):
    state.write("kind", "jobs.batch")
    state.write("job.json", job({"active": 2}, managed_by="Helm"))
    with pytest.raises(NoSuchJobError):
        Kubernetes().find("cats")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (ended("Complete"), 0),
        (ended("Failed", reason="BackoffLimitExceeded"), 3),
        (ended("Failed", reason="DeadlineExceeded"), 124),
    ],
)
def test_follow_shows_logs_until_the_end(state, monkeypatch, status, code):
    monkeypatch.setattr("kdist.launch.engines.kubernetes._POLL_SECONDS", 0.01)
    state.write("kind", "jobs.batch")
    state.write("job.json", job({"active": 2, "ready": 2}))
    state.write("next.json", job(status))
    state.write("logs", "[pod/cats-0] epoch 1\n")
    terminated = [{"exitCode": 143, "finishedAt": "1"}, {"exitCode": 3, "finishedAt": "2"}]
    containers = [{"state": {"terminated": each}} for each in terminated]
    pods = [{"status": {"containerStatuses": [each]}} for each in containers]
    state.write("pods.json", json.dumps({"items": pods}))
    shown = []
    assert Kubernetes().find("cats").follow(shown.append) == code
    assert shown[:2] == [
        "kdist: job cats is running: 2 of 2 pods are ready",
        "[pod/cats-0] epoch 1",
    ]
