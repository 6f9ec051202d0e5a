"""`kdist launch --engine`: from a plan to the text, and to a submitted job and back."""

import os
import re
import subprocess
import sys

import pytest
import yaml

from kdist import planner
from kdist.launch.engines import Job, get_engine
from kdist.launch.engines.slurm import Slurm


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Returns the paths of plans for two spot machines of Google, and for two of one's own."""
    directory = tmp_path_factory.mktemp("plans")
    offers = planner.known_offers()
    own = planner.Machine("a server", "V100 SXM2 16GB", 4, "nvlink2", cpu_cores=32)
    choices = {
        "gcp": (planner.select_offers(offers, machine="n1-standard-32 + 4 x K80"), True),
        "own": (planner.make_offers([own], 1.0), False),
    }
    for name, (offers, spot) in choices.items():
        found = planner.search(
            planner.Predictor(planner.Job(planner.known_workload("resnet50"), 1_281_167, 9)),
            offers,
            planner.Constraints(spot=spot, strategies=("multi_worker",), max_machines=2),
        )
        plan = next(each for each in found.plans if each.layout.machines == 2)
        plan.save(directory / f"{name}.json")
    return {name: directory / f"{name}.json" for name in choices}


def launch(*flags, check=True):
    """Returns the standard output of `kdist launch`, or its error if it must fail."""
    done = kdist_launch(*flags)
    assert (done.returncode == 0) == check, done.stderr
    return done.stdout if check else done.stderr


def kdist_launch(*flags):
    """Runs `kdist launch` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kdist", "launch", *map(str, flags)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


TRAIN = ("--", "kdist", "train", "--allow_remote", "--run_dir=/runs/cats")


def test_a_plan_is_what_would_be_rented(plans, state):
    plan = planner.Plan.load(plans["gcp"])
    flags = (f"--plan={plans['gcp']}", "--setup=pip install kdist", "--write=-")
    flags = (*flags, "--image=my/cats", "--mirror=gs://b/cats", "--hang_seconds=90")
    usd, seconds = plan.usd / plan.hours, plan.hours * 1.5 * 3600
    text = launch("--engine=gce", *flags, *TRAIN)
    for part in (
        "create cats-worker-0 cats-worker-1 ",
        "--machine-type=n1-standard-32 ",
        "--accelerator=type=nvidia-tesla-k80,count=4 ",
        "--provisioning-model=SPOT ",
        f"--max-run-duration={int(seconds)}s ",
        f"# 2 × n1-standard-32 with 4 × K80 in us-central1, ${usd:,.4g} per hour",
        f"--checkpoint_minutes={plan.checkpoint_minutes:g} ",
        f"--local_batch_size={plan.local_batch} ",
        f"global batch {plan.batch.global_size}",
        "--mirror=gs://b/cats",
        "export KDIST_HANG_SECONDS=90",
    ):
        assert part in text, part
    text = launch("--engine=skypilot", *flags, *TRAIN)
    assert f"# ${usd:,.4f} per hour" in text
    task = yaml.safe_load(text)
    assert (task["num_nodes"], task["resources"]["use_spot"]) == (2, True)
    assert task["resources"]["any_of"][0]["instance_type"] == "n1-standard-32"
    assert task["resources"]["any_of"][0]["accelerators"] == "K80:4"
    assert f"--local_batch_size={plan.local_batch} " in task["run"]
    done = kdist_launch("--engine=gce", *flags, "--checkpoint_mb_per_second=2", *TRAIN)
    assert "0.205 GB takes 102 s to save, at 2 MB/s, which is longer than" in done.stderr
    (minutes,) = re.findall(r"--checkpoint_minutes=(\S+)", done.stdout)
    assert float(minutes) == pytest.approx(plan.checkpoint_minutes * 32.77**0.5, rel=0.01)
    refused = launch("--engine=ray", *flags, *TRAIN, check=False)
    assert "the plan is for machines of gcp" in refused


def test_a_plan_is_what_kubernetes_would_run(plans, state):
    plan = planner.Plan.load(plans["gcp"])
    flags = ("--engine=kubernetes", f"--plan={plans['gcp']}", "--image=cats:1", "--write=-")
    text = launch(*flags, "--option=claim=runs", *TRAIN)
    (job,) = [each for each in yaml.safe_load_all(text) if each["kind"] == "Job"]
    assert job["metadata"]["name"] == "cats"
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["parallelism"] == 2
    assert spec["activeDeadlineSeconds"] == round(plan.hours * 1.5 * 3600)
    assert pod["nodeSelector"]["node.kubernetes.io/instance-type"] == "n1-standard-32"
    assert pod["nodeSelector"]["cloud.google.com/gke-accelerator"] == "nvidia-tesla-k80"
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert f"--local_batch_size={plan.local_batch}" in container["command"]
    assert "--strategy=multi_worker" in container["command"]
    usd = float(job["metadata"]["annotations"]["kdist/usd-per-hour"])
    assert usd * plan.hours * 2 == pytest.approx(plan.usd, rel=1e-4)
    assert f"global batch {plan.batch.global_size}" in job["metadata"]["annotations"]["kdist/plan"]
    assert state.read("calls") == ""  # nothing is submitted


def test_a_plan_of_another_cloud_is_refused(plans):
    wrong = launch("--engine=slurm", f"--plan={plans['gcp']}", "--write=-", *TRAIN, check=False)
    assert "the plan is for machines of gcp" in wrong
    flags = ("--engine=kubernetes", f"--plan={plans['gcp']}", "--cloud=aws", "--write=-")
    assert "not for --cloud=aws" in launch(*flags, *TRAIN, check=False)


@pytest.mark.slow
def test_a_plan_for_own_machines_is_submitted_followed_and_stopped(plans, state):
    plan = planner.Plan.load(plans["own"])
    flags = ("--engine=slurm", f"--plan={plans['own']}", "--partition=gpu")
    launch(*flags, *TRAIN, "--local_batch_size=7")
    script = state.read("script")
    assert "#SBATCH --nodes=2" in script
    assert "#SBATCH --gres=gpu:v100:4" in script
    assert "#SBATCH --partition=gpu" in script
    assert f"local batch {plan.local_batch}" in script
    assert "--local_batch_size=7" in script  # the user's own flag comes first
    assert script.count("--local_batch_size") == 1
    assert launch("--job=cats") == "cats: pending, 1 restarts: PENDING\n"
    assert "1.00 machine hours" in launch("--job=cats", "--cost")
    assert launch("--job=cats", "--stop") == "cats: stopped\n"
    assert Slurm().find("cats").status().state == "stopped"
    assert "no job dogs" in launch("--engine=slurm", "--job=dogs", check=False)


def test_a_cluster_of_ray_that_does_not_answer_is_named(state):
    """Ray would try to connect for a quarter of an hour."""
    error = launch("--engine=ray", "--job=cats", check=False)
    assert "no Ray cluster answers (127.0.0.1:1)" in error


@pytest.mark.parametrize(
    ("seconds_ago", "output", "code"), [(None, "60", 0), (10, "50", 0), (60, "", 124)]
)
def test_skypilot_limits_the_time_of_all_attempts_together(tmp_path, seconds_ago, output, code):
    job = Job("cats", ("python",), time_limit_hours=1 / 60)
    run = yaml.safe_load(get_engine("skypilot").text(job))["run"]
    for name, text in (("date", "echo 1000"), ("timeout", "echo $2")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    if seconds_ago is not None:
        environment["KDIST_SUBMITTED"] = str(1000 - seconds_ago)
    done = subprocess.run(
        ["sh", "-c", run], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.returncode) == (output, code)
