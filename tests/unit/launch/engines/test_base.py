"""Jobs of engines, and machines that can replace a planned one."""

import dataclasses
import subprocess

import pytest

from kdist import planner
from kdist.launch.engines import ENGINES, Cost, Job, MachineType, Status, get_engine
from kdist.launch.engines.base import Saving, call, similar_machines


def test_parameter_servers_add_a_chief():
    job = Job("cats", ("train.py",), workers=2, ps=1)
    assert job.tasks == {"chief": 1, "worker": 2, "ps": 1}
    assert job.num_machines == 4
    assert job.variables["KDIST_PS"] == job.variables["KDIST_CHIEF"] == "1"
    alone = Job("cats", ("train.py",))
    assert alone.tasks == {"worker": 1}
    assert not {"KDIST_PS", "KDIST_CHIEF", "KDIST_RUN_DIR"} & alone.variables.keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "Cats"}, "lower-case"),
        ({"name": "cats-"}, "lower-case"),
        ({"name": "c" * 41}, "at most 40"),
        ({"command": ()}, "no command"),
        ({"workers": 0}, "at least one"),
        ({"environment": {"A B": "c"}}, "environment variable"),
        ({"workers": 2, "min_workers": 3}, "from 1 to --workers=2"),
        ({"workers": 2, "min_workers": 1, "ps": 1}, "leave out ps and chief"),
        ({"workers": 2, "min_workers": 1, "max_restarts": 0}, "raise max_restarts"),
    ],
)
def test_jobs_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Job(**{"name": "cats", "command": ("train.py",), **fields})


@pytest.mark.parametrize(
    ("engine", "cloud", "options", "notice"),
    [
        ("gce", "gcp", {}, 30),
        ("skypilot", "aws", {}, 120),
        ("skypilot", "lambda", {}, None),
        ("kubernetes", "aws", {}, 60),  # the grace time of pods
        ("kubernetes", "azure", {}, 30),
        ("ray", "", {}, None),
    ],
)
def test_notices_of_preemptions(engine, cloud, options, notice):
    machine = MachineType("m", cloud)
    job = Job("cats", ("train.py",), machine=machine, spot=True, options=options)
    assert get_engine(engine).notice_seconds(job) == notice
    assert get_engine(engine).notice_seconds(dataclasses.replace(job, spot=False)) is None


@pytest.mark.parametrize(
    ("errors", "remedy"),
    [
        ("squeue: fatal: Could not establish a configuration source", "machine of the cluster"),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "--write"),
        ("The connection to the server localhost:8080 was refused", "KUBECONFIG"),
        ("ERROR: You do not currently have an active account selected.\nRun:\n a", "auth login"),
        ("squeue: error: Invalid user", "Invalid user"),
    ],
)
def test_a_cluster_that_does_not_answer_is_named(errors, remedy, monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", errors)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError, match=remedy):
        call(["program"])


def test_the_notice_is_the_shortest_of_all_clouds():
    machines = {"machine": MachineType("a", "aws"), "alternatives": (MachineType("b", "gcp"),)}
    job = Job("cats", ("train.py",), **machines, spot=True)
    assert get_engine("skypilot").notice_seconds(job) == 30


def test_a_checkpoint_has_to_fit_into_the_notice():
    machine = MachineType("n1-standard-8", "gcp")
    job = Job("cats", ("train.py",), machine=machine, spot=True)
    engine = get_engine("gce")
    assert engine.checkpoint_remark(job) == ""
    fits = dataclasses.replace(job, saving=Saving(0.66e9, 10.0, 600.0, 0.1))
    assert "0.66 GB takes 10 s to save, at 66 MB/s, and fits" in engine.checkpoint_remark(fits)
    late = dataclasses.replace(job, saving=Saving(6.6e9, 100.0, 600.0, 0.1))
    assert "longer than the notice of 30 s" in engine.checkpoint_remark(late)
    assert "up to 10 min" in engine.checkpoint_remark(late)
    hopeless = dataclasses.replace(job, saving=Saving(660e9, 10000.0, 10000.0, 0.4))
    assert any("hardly progress" in each for each in engine.check(hopeless))
    assert not any("hardly progress" in each for each in engine.check(late))


def test_the_time_limit_follows_the_plan():
    assert Job("cats", ("train.py",)).time_limit_hours is None
    assert Job("cats", ("train.py",), hours=2.0).time_limit_hours == 3.0
    assert Job("cats", ("train.py",), hours=2.0, time_limit_hours=9.0).time_limit_hours == 9.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gcp n1-standard-4 + 4 x K80", ("gcp", "n1-standard-4", "K80")),
        ("gcp a2-highgpu-8g (8x A100-40GB)", ("gcp", "a2-highgpu-8g", "A100-40GB")),
        ("aws p3.2xlarge (1x V100)", ("aws", "p3.2xlarge", "V100")),
        ("lambda gpu_8x_v100", ("lambda", "gpu_8x_v100", "V100 SXM2 16GB")),
        ("dgx1-v100", ("", "dgx1-v100", "V100 SXM2 16GB")),
    ],
)
def test_names_of_planned_machines(name, expected):
    machine = planner.Machine(name, "V100 SXM2 16GB", 4, "nvlink2")
    found = MachineType.from_planned(machine)
    assert (found.cloud, found.name, found.device) == expected
    assert found.num_devices == 4


def test_all_offers_have_a_cloud_and_a_machine_type():
    for offer in planner.known_offers():
        found = MachineType.from_planned(offer.machine)
        assert found.cloud == offer.cloud
        assert found.name
        assert not set("()+ ") & set(found.name), found.name


def test_replacements_have_the_devices_and_are_in_the_order_of_dollars():
    offers = planner.known_offers()
    planned = next(each for each in offers if each.name == "n1-standard-4 + 4 x K80").machine
    found = similar_machines(planned, offers, spot=True)
    assert {each.num_devices for each in found} == {4}
    assert {each.device for each in found} == {"K80"}
    assert found[0].name == "n1-standard-4"
    prices = [each.usd_per_hour for each in found]
    assert prices == sorted(prices)
    assert len(prices) > 1
    without = [dataclasses.replace(each, spot_usd_per_hour=None) for each in offers]
    assert similar_machines(planned, without, spot=True) == []


@pytest.mark.parametrize("name", ENGINES)
def test_engines_refuse_other_clouds_and_unknown_options(name):
    machine = MachineType("moon-1", "moon")
    job = Job("cats", ("true",), machine=machine, options={"planet": "mars"})
    problems = " ".join(get_engine(name).check(job))
    assert "machines of moon" in problems
    assert "no option planet" in problems


@pytest.mark.parametrize("name", ENGINES)
def test_kdist_train_on_several_machines_needs_permission(name):
    def problems(*flags):
        job = Job("cats", ("kdist", "train", *flags), workers=2)
        return " ".join(get_engine(name).check(job))

    assert "--allow_remote" in problems()
    assert "--allow_remote" not in problems("--allow_remote")


def test_unknown_engines_are_named():
    with pytest.raises(ValueError, match="slurm"):
        get_engine("slrum")


def test_texts_of_states_and_costs():
    assert str(Status("running", "2 nodes", 3)) == "running, 3 restarts: 2 nodes"
    assert Status("failed").is_over
    assert not Status("pending").is_over
    assert str(Cost(1.5, 2.0)) == "1.50 machine hours, $3.00 ($2 per machine and hour)"
    assert "no price" in str(Cost(1.5))


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "ray"])
def test_engines_with_a_fixed_number_of_machines_say_why(name):
    engine = get_engine(name)
    job = Job("cats", ("train.py",), workers=4, min_workers=3)
    assert any("leave min_workers out" in each for each in engine.check(job))
    assert "min_workers" not in str(engine.check(dataclasses.replace(job, min_workers=None)))
