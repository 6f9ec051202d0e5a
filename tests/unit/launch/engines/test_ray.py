"""Jobs on Ray: what is placed and refused, without Ray."""

import dataclasses
import json
import sys

import pytest

from kdist import launch
from kdist.launch.engines import Job, MachineType, get_engine
from kdist.launch.engines.ray import room_seconds

JOB = Job(
    "cats",
    ("train.py",),
    workers=2,
    ps=1,
    machine=MachineType(num_devices=4),
    options={"cpus": "8"},
    plan="2 × dgx, local batch 32",
)


def test_the_text_has_a_node_of_its_own_for_each_task(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # it is not imported
    text = json.loads(get_engine("ray").text(JOB))
    assert text["plan"] == JOB.plan
    assert text["placement_group"] == {
        "strategy": "STRICT_SPREAD",
        "bundles": [{"CPU": 8.0, "GPU": 4}] * 4,
    }
    assert text["tasks"] == {"chief": 1, "worker": 2, "ps": 1}


def test_without_room_a_job_is_refused_within_a_minute():
    assert room_seconds(JOB) < 55


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"strategy": "NEAR"}}, "STRICT_SPREAD"),
        ({"options": {"cores": "3"}}, "no option cores"),
        ({"machine": MachineType("a2-highgpu-8g", "gcp")}, "the plan is for machines of gcp"),
        ({"image": "debian"}, "leave image out"),
        ({"spot": True}, "leave spot out"),
    ],
)
def test_what_is_wrong_is_said(changes, message):
    assert get_engine("ray").check(JOB) == []
    [problem] = get_engine("ray").check(dataclasses.replace(JOB, **changes))
    assert message in problem


def test_functions_are_called_on_ray_only():
    with pytest.raises(ValueError, match="calls no functions"):
        launch.on("slurm", print)
    with pytest.raises(ValueError, match="STRICT_SPREAD"):
        launch.on("ray", print, options={"strategy": "NEAR"})
