"""Batch scripts for Slurm."""

import dataclasses

import pytest

from kdist.launch.engines import Job, MachineType
from kdist.launch.engines import slurm as module
from kdist.launch.engines.slurm import Slurm, _exit_code, _status

V100 = MachineType(device="V100 SXM2 16GB", num_devices=4, cores=32, usd_per_hour=1.25)
JOB = Job("cats", ("true",), workers=2, machine=V100, options={"partition": "gpu"})


def directives(job):
    """Returns the options of sbatch in the script of a job."""
    lines = [line for line in Slurm().text(job).splitlines() if line.startswith("#SBATCH --")]
    pairs = [line.removeprefix("#SBATCH --").partition("=") for line in lines]
    found = {name: value for name, _, value in pairs}
    assert len(found) == len(pairs)
    return found


def test_nodes_devices_and_restarts():
    found = directives(dataclasses.replace(JOB, ps=1, grace_seconds=120, time_limit_hours=30.5))
    assert found["nodes"] == "4"
    assert found["ntasks-per-node"] == "1"
    assert found["gres"] == "gpu:v100:4"
    assert found["cpus-per-task"] == "32"
    assert found["time"] == "1-06:30:00"
    assert found["signal"] == "TERM@120"
    assert found["partition"] == "gpu"
    assert found["requeue"] == ""
    assert found["open-mode"] == "append"
    assert found["comment"] == "usd_per_hour=1.25"


def test_the_users_options_come_first():
    options = {"gres": "gpu:a100:2", "cpus-per-task": "8", "at_time_limit": "requeue"}
    found = directives(dataclasses.replace(JOB, options=options))
    assert (found["gres"], found["cpus-per-task"]) == ("gpu:a100:2", "8")
    assert "at_time_limit" not in found
    # Without a number of cores, Slurm would give a task one.
    assert "exclusive" in directives(Job("cats", ("true",)))
    assert "time" not in directives(JOB)


def test_the_program_gets_its_arguments_and_variables():
    job = Job("cats", ("train.py", "--x=a b"), environment={"WHO": "a'b"}, setup="module load x")
    text = Slurm().text(job)
    assert "python train.py '--x=a b'" in text
    assert """export WHO='a'"'"'b'""" in text
    assert text.index("module load x") < text.index("srun")


def test_the_plan_is_in_the_script():
    planned = dataclasses.replace(JOB, plan="2 machines, local batch 64", hours=4.0)
    text = Slurm().text(planned)
    assert "# Plan: 2 machines, local batch 64" in text
    assert "#SBATCH --time=0-06:00:00" in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": "cats:1"}, "apptainer"),
        ({"max_usd": 3.0}, "--time_limit_hours"),
        ({"spot": True, "options": {}}, "--partition"),
        ({"time_limit_hours": 0.01}, "no time to train"),
        ({"options": {"at_time_limit": "stop"}}, "at_time_limit"),
        ({"command": ("nowhere.py",)}, "there is no nowhere.py"),
        ({"machine": MachineType("n1-standard-4", "gcp")}, "machines of gcp"),
    ],
)
def test_what_does_not_apply_is_refused(fields, message):
    assert Slurm().check(JOB) == []
    (problem,) = Slurm().check(dataclasses.replace(JOB, **fields))
    assert message in problem


@pytest.mark.parametrize(
    ("fields", "state", "code"),
    [
        ({"JobState": "COMPLETED", "ExitCode": "0:0"}, "done", 0),
        ({"JobState": "FAILED", "ExitCode": "3:0"}, "failed", 3),
        ({"JobState": "FAILED", "ExitCode": "0:9"}, "failed", 137),
        ({"JobState": "NODE_FAIL", "ExitCode": "0:0"}, "failed", 1),
        ({"JobState": "TIMEOUT", "ExitCode": "0:15"}, "failed", 124),
        ({"JobState": "CANCELLED by 1000", "ExitCode": "0:15"}, "stopped", 130),
    ],
)
def test_states_of_ended_jobs(fields, state, code):
    status = _status(fields)
    assert (status.state, status.is_over) == (state, True)
    assert _exit_code(status, fields) == code


def test_states_of_other_jobs():
    pending = _status({"JobState": "PENDING", "Reason": "Resources", "Restarts": "2"})
    assert str(pending) == "pending, 2 restarts: PENDING Resources"
    assert not pending.is_over
    assert _status({"JobState": "COMPLETING", "Reason": "None"}).state == "running"


@pytest.mark.parametrize(("grace", "notice"), [("120", 120), ("0", None)])
def test_the_notice_is_the_grace_time_of_the_partition(monkeypatch, grace, notice):
    job = Job("cats", ("train.py",), options={"partition": "low"})
    monkeypatch.setattr(module.shutil, "which", lambda program: program)
    shown = f"PartitionName=low AllowGroups=ALL GraceTime={grace} Hidden=NO\n"
    asked = []
    monkeypatch.setattr(module, "call", lambda command: asked.append(command) or shown)
    assert Slurm().notice_seconds(job) == notice
    assert asked == [["scontrol", "show", "partition", "--oneliner", "low"]]
    assert Slurm().notice_seconds(dataclasses.replace(job, options={})) is None
