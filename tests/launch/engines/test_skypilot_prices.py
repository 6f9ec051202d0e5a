"""SkyPilot itself parses the tasks of plans, and its prices are those of the plans.

SkyPilot is installed in an environment of its own: python3 -m venv sky; sky/bin/pip install
'skypilot[gcp]==0.14.1'; KDIST_SKYPILOT_PYTHON=sky/bin/python.
"""

import json
import os
import pathlib
import subprocess

import pytest

import kdist
from kdist.launch.engines import Job, MachineType, get_engine
from kdist.planner.tables import read

PYTHON = os.environ.get("KDIST_SKYPILOT_PYTHON")
PROGRAM = pathlib.Path(__file__).with_name("skypilot_program.py")
PRICES = pathlib.Path(read.__file__).with_name("vm_prices.csv")


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="SkyPilot is not installed (KDIST_SKYPILOT_PYTHON)")
def test_the_price_of_a_task_is_that_of_its_plan(tmp_path):
    plans, paths = [], []
    offers = kdist.planner.select_offers(kdist.planner.known_offers(), cloud="gcp")
    for gpu, limits in (("A100", {}), ("V100", {"spot": True}), ("T4", {"max_hours": 8.0})):
        selected = kdist.planner.select_offers(offers, gpu=gpu)
        arguments = {"examples": 1_281_167, "epochs": 3, "measurements": None, "offers": selected}
        plan = kdist.plan("resnet50", **arguments, **limits).best
        price = plan.usd / plan.hours / plan.layout.machines
        machine = MachineType.from_planned(plan.machine, region="us-central1", usd_per_hour=price)
        job = Job(
            "cats",
            ("train.py",),
            workers=plan.layout.machines,
            machine=machine,
            spot=plan.spot,
            hours=plan.hours,
            setup="pip install kdist",
        )
        plans.append(plan)
        paths.append(tmp_path / f"{gpu}.yaml")
        paths[-1].write_text(get_engine("skypilot").text(job))
    home = {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    output = subprocess.run(
        [PYTHON, PROGRAM, PRICES, *paths],
        env={**os.environ, **home},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    for plan, (nodes, vm, gpus, spot, usd) in zip(plans, found, strict=True):
        assert nodes == plan.layout.machines
        assert vm in plan.machine.name
        assert list(gpus.values()) == [plan.machine.gpus_per_node]
        assert spot == plan.spot
        assert usd == pytest.approx(plan.usd / plan.hours, abs=0.01)
