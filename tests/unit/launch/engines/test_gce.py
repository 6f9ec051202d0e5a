"""Jobs on Compute Engine: commands, zones, restarts, and limits, without `gcloud`."""

import base64
import dataclasses
import io
import json
import pathlib
import random
import tarfile
import time

import pytest

from kdist.launch.engines import Job, MachineType, NoSuchJobError, get_engine
from kdist.launch.engines import gce as module
from kdist.launch.engines.base import CommandError, Saving

SMALL = MachineType("n1-standard-4", "gcp", "us-central1", "K80", 4, 4, 0.5)
LARGE = dataclasses.replace(SMALL, name="n1-standard-8", cores=8, usd_per_hour=0.6)
JOB = Job(
    "cats",
    ("train.py", "--epochs=3"),
    workers=2,
    machine=SMALL,
    alternatives=(LARGE,),
    spot=True,
    hours=2.0,
    max_restarts=1,
    mirror="gs://bucket/cats",
    image="p/family",
    saving=Saving(0.66e9, 10.0, 600.0, 0.1),
    plan="2 × gcp n1-standard-4 + 4 x K80, multi_worker on 8 devices, local batch 32",
)
ZONES = ["us-central1-a", "us-central1-c"]


class Cloud:
    """`gcloud` as a function; VMs are a dict of names."""

    def __init__(self):
        self.vms, self.calls, self.full, self.output = {}, [], set(), {}

    def __call__(self, command):
        _, _, kind, verb, *rest = command
        names = [each for each in rest if not each.startswith("--")]
        flags = dict(each[2:].partition("=")[::2] for each in rest if each.startswith("--"))
        self.calls.append((verb, *names))
        if kind == "accelerator-types":
            assert flags["filter"] == "name=nvidia-tesla-k80 AND zone~/?us-central1-"
            return "\n".join(ZONES)
        if verb == "list":
            return json.dumps(list(self.vms.values()))
        if verb == "create":
            where = flags["machine-type"], flags["zone"]
            if where in self.full:
                raise CommandError("gcloud failed", "code: ZONE_RESOURCE_POOL_EXHAUSTED\nmore")
            files = dict(each.split("=") for each in flags["metadata-from-file"].split(","))
            items = [
                {"key": key, "value": pathlib.Path(path).read_text()} for key, path in files.items()
            ]
            for name in names:
                self.output[name] = []
                self.vms[name] = {
                    "name": name,
                    "status": "RUNNING",
                    "metadata": {"items": items},
                    "where": where,
                    "seconds": int(flags["max-run-duration"][:-1]),
                }
        if verb == "delete":
            for name in names:
                del self.vms[name]
        if verb == "get-serial-port-output":
            text = "".join(f"Nov 25 vm startup-script: {line}\n" for line in self.output[names[0]])
            start = int(flags["start"])
            return json.dumps({"contents": text[start:], "next": str(len(text.encode()))})
        return ""

    def exits(self, checkpoint="", **codes):
        self.output["cats-worker-0"].append(f"kdist: newest checkpoint {checkpoint}")
        for index, code in codes.items():
            self.output[f"cats-worker-{index[1:]}"].append(f"kdist: exit code {code}")


@pytest.fixture
def cloud(monkeypatch):
    cloud = Cloud()
    monkeypatch.setattr(module, "call", cloud)
    monkeypatch.setattr(module.ComputeEngineJob, "poll_seconds", 0)
    return cloud


@pytest.fixture
def follow(cloud, monkeypatch):
    """Returns a function that follows a job; its arguments are called between two looks at it."""

    def run(handle, *events):
        rest, lines = iter(events), []
        monkeypatch.setattr(module.time, "sleep", lambda _: next(rest)())
        return handle.follow(lines.append), lines

    return run


def test_the_text_has_the_plan_and_a_limit_of_time():
    text = get_engine("gce").text(JOB)
    assert text == get_engine("gce").text(JOB)
    for part in (
        f"# {JOB.plan}",
        "# 2 × n1-standard-4 with 4 × K80 in us-central1, $1 per hour",
        "# Without capacity for it: 2 × n1-standard-8",
        "create cats-worker-0 cats-worker-1 ",
        "--machine-type=n1-standard-4",
        "--accelerator=type=nvidia-tesla-k80,count=4",
        "--provisioning-model=SPOT",
        "--max-run-duration=10800s",
        "--instance-termination-action=DELETE",
        "--scopes=storage-rw",
        '{"worker": ["cats-worker-0:2222", "cats-worker-1:2223"]}',
        "python3 train.py --epochs=3 &",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": MachineType("p3.2xlarge", "aws")}, "the plan is for machines of aws"),
        ({"machine": MachineType(cloud="gcp")}, "--machine_type"),
        ({"image": "", "setup": "pip install kdist"}, "NVIDIA"),
        ({"image": "", "machine": MachineType("n1-standard-8", "gcp")}, "--setup"),
        ({"image": "debian"}, "PROJECT/FAMILY"),
        ({"mirror": ""}, "--mirror"),
        ({"hours": None, "time_limit_hours": None}, "--time_limit_hours"),
        ({"options": {"zome": "a"}}, "no option zome"),
        ({"max_usd": 1.0, "alternatives": (MachineType("n1-standard-8"),)}, "price"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_rented(changes, message):
    assert get_engine("gce").check(JOB) == []
    [problem] = get_engine("gce").check(dataclasses.replace(JOB, **changes))
    assert message in problem


def test_without_capacity_the_next_zone_and_machine_are_tried(cloud):
    cloud.full = {(SMALL.name, zone) for zone in ZONES} | {(LARGE.name, ZONES[0])}
    get_engine("gce").submit(JOB)
    assert {vm["where"] for vm in cloud.vms.values()} == {(LARGE.name, ZONES[1])}
    with pytest.raises(RuntimeError, match="exists"):
        get_engine("gce").submit(JOB)
    cloud.vms.clear()
    cloud.full.add((LARGE.name, ZONES[1]))
    with pytest.raises(RuntimeError, match="no capacity for n1-standard-4 in us-central1-a"):
        get_engine("gce").submit(JOB)
    assert not cloud.vms


def test_a_job_is_found_from_its_vms(cloud, follow):
    submitted = get_engine("gce").submit(JOB)
    found = get_engine("gce").find("cats")
    assert str(found.status()) == "running: n1-standard-4 in us-central1-a"
    assert found._job == JOB
    assert found.cost().machine_hours == pytest.approx(submitted.cost().machine_hours, abs=1e-4)
    cloud.output["cats-worker-1"] += ["epoch 1", "half a l"]
    code, lines = follow(found, lambda: cloud.exits(_0=0))
    assert code == 0
    assert "[worker-1] epoch 1" in lines
    assert not cloud.vms
    with pytest.raises(NoSuchJobError):
        get_engine("gce").find("cats")


def test_preemptions_are_free_of_charge_and_failures_are_counted(cloud, follow):
    handle = get_engine("gce").submit(JOB)

    def preempt():
        cloud.exits(_0=143, _1=143)
        cloud.vms["cats-worker-1"]["status"] = "STOPPING"

    def end():
        assert ("reset", "cats-worker-0") not in cloud.calls  # it may still save
        del cloud.vms["cats-worker-1"]

    def starts():
        cloud.output["cats-worker-0"].append("kdist: starting")
        assert cloud.calls[-2:] == [("create", "cats-worker-1"), ("reset", "cats-worker-0")]

    def fail():
        for name in cloud.output:
            cloud.output[name].append("kdist: starting")
        cloud.exits(_1=1)

    # Lost; lost; failed once, which `max_restarts` allows; failed again.
    code, lines = follow(handle, preempt, end, starts, fail, fail)
    assert code == 1
    assert lines[-1] == "cats-worker-1 exited with 1; not started again"
    assert cloud.calls.count(("reset", "cats-worker-0", "cats-worker-1")) == 1
    assert not cloud.vms


def test_restarts_are_counted_since_the_last_new_checkpoint(cloud, follow):
    handle = get_engine("gce").submit(JOB)

    def fail_after(step):
        def fail():
            for name in cloud.output:
                cloud.output[name].append("kdist: starting")
            cloud.exits(f"step-{step:010d}", _1=1)

        return fail

    # One restart is allowed after each new checkpoint.
    code, lines = follow(handle, *map(fail_after, (100, 200, 1000, 1000)))
    assert code == 1
    assert handle.progress == ("step-0000001000", 1)
    assert sum("starting the job again" in line for line in lines) == 3


@pytest.mark.parametrize("code", [130, 124])
def test_what_a_person_or_a_limit_ended_is_not_started_again(cloud, follow, code):
    handle = get_engine("gce").submit(JOB)
    assert follow(handle, lambda: cloud.exits(_0=code))[0] == code
    assert not cloud.vms


def test_the_limit_of_dollars_deletes_all_vms(cloud, follow, monkeypatch):
    handle = get_engine("gce").submit(dataclasses.replace(JOB, max_usd=0.5))
    # Half an hour of two machines; Compute Engine itself keeps to it if nobody follows.
    assert {vm["seconds"] for vm in cloud.vms.values()} <= {1799, 1800}
    now = time.time()
    later = lambda: monkeypatch.setattr(module.time, "time", lambda: now + 1750)  # noqa: E731
    code, lines = follow(handle, later)
    assert code == 124
    assert "0.97 machine hours, $0.49" in lines[-1]
    assert not cloud.vms


def test_python_files_beside_the_script_travel_in_the_metadata(cloud, tmp_path):
    for name in ("train.py", "model.py", "lib/__init__.py", "lib/a.py", "data/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("pass")
    job = dataclasses.replace(JOB, command=(str(tmp_path / "train.py"),))
    get_engine("gce").submit(job)
    items = cloud.vms["cats-worker-0"]["metadata"]["items"]
    packed = next(each["value"] for each in items if each["key"] == "kdist-code")
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        assert set(archive.getnames()) == {"train.py", "model.py", "lib/__init__.py", "lib/a.py"}
    (tmp_path / "model.py").write_bytes(random.Random(0).randbytes(300_000))
    assert "metadata" in get_engine("gce").check(job)[0]
