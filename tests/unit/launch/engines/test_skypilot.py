"""The task that kdist writes for SkyPilot, and what it reads from SkyPilot's queue."""

import dataclasses
import json
import pathlib

import pytest
import yaml

from kdist.launch.engines import Job, MachineType, NoSuchJobError, get_engine
from kdist.launch.engines import skypilot as module

MACHINES = (
    MachineType("a2-highgpu-8g", "gcp", "us-central1", "A100-40GB", 8, 96, 9.998),
    MachineType("p4d.24xlarge", "aws", "", "A100-40GB", 8, 96, 32.77),
    MachineType("gpu_8x_v100", "lambda", "all", "V100 SXM2 16GB", 8, 92, 6.32),
)
JOB = Job(
    "cats",
    ("kdist", "train", "--allow_remote", "--local_batch_size=256"),
    workers=2,
    ps=1,
    machine=MACHINES[0],
    alternatives=MACHINES[1:],
    spot=True,
    hours=2.0,
    setup="pip install kdist\npip install extra",
    mirror="gs://bucket/cats",
    plan="2 × gcp a2-highgpu-8g (8x A100-40GB), local batch 256, global batch 4096",
)


def test_the_task_has_what_is_planned():
    text = get_engine("skypilot").text(JOB)
    assert f"# {JOB.plan}\n" in text
    # Four machines.
    assert '"accelerators": "A100:8"}  # $39.9920 per hour' in text
    task = yaml.safe_load(text)
    assert task["num_nodes"] == 4
    assert task["resources"] == {
        "use_spot": True,
        "disk_size": 100,
        "job_recovery": {
            "strategy": "EAGER_NEXT_REGION",
            "max_restarts_on_errors": 3,
            "recover_on_exit_codes": [143],
        },
        "any_of": [
            {"infra": "lambda", "instance_type": "gpu_8x_v100"},
            {
                "infra": "gcp/us-central1",
                "instance_type": "a2-highgpu-8g",
                "accelerators": "A100:8",
            },
            {"infra": "aws", "instance_type": "p4d.24xlarge"},
        ],
    }
    assert task["envs"] == {"KDIST_CHIEF": "1", "KDIST_PS": "1", "PYTHONUNBUFFERED": "1"}
    assert task["setup"] == "pip install kdist\npip install extra\n"
    assert task["run"].endswith(
        "timeout --kill-after=60 $left python3 -m kdist train --allow_remote "
        "--local_batch_size=256\n"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": MachineType("VM.GPU4.8", "oci")}, "the plan is for machines of oci"),
        ({"machine": MachineType()}, "--gpus_per_machine"),
        ({"setup": ""}, "--setup"),
        ({"mirror": ""}, "--mirror"),
        ({"max_usd": 9.0}, "--engine=gce"),
    ],
)
def test_what_is_wrong_is_said(changes, message):
    assert get_engine("skypilot").check(JOB) == []
    [problem] = get_engine("skypilot").check(dataclasses.replace(JOB, **changes))
    assert message in problem


def test_jobs_are_submitted_found_and_cancelled(monkeypatch):
    records, calls = [], []

    def call(arguments):
        calls.append(arguments[2:])
        if arguments[2] == "queue":
            return f"Some warning\n{json.dumps(records)}"
        if arguments[2] == "launch":
            assert "num_nodes: 4" in pathlib.Path(arguments[-1]).read_text()
        return ""

    monkeypatch.setattr(module, "call", call)
    engine = get_engine("skypilot")
    with pytest.raises(NoSuchJobError):
        engine.find("cats")
    engine.submit(JOB)
    assert calls[-1][:4] == ["launch", "--yes", "--detach-run", "--name=cats"]
    assert calls[-1][4].startswith("--env=KDIST_SUBMITTED=")
    record = {"job_name": "cats", "resources": "4x(gpus=A100:8)[spot]", "job_duration": 1800.0}
    records += [
        {**record, "job_id": 3, "status": "FAILED", "failure_reason": "code 1"},
        {**record, "job_id": 7, "status": "RECOVERING", "recovery_count": 2},
    ]
    with pytest.raises(RuntimeError, match="runs"):
        engine.submit(JOB)
    handle = engine.find("cats")
    assert str(handle.status()) == "running, 2 restarts: recovering"
    assert handle.cost().machine_hours == 2.0
    handle.stop()
    assert calls[-1] == ["cancel", "--yes", "7"]
    del records[1]
    assert str(handle.status()) == "failed: code 1"
