"""Jobs on the stand-in for Compute Engine, whose VMs are namespaces of this machine."""

import threading
import time

import pytest

from kdist.launch.engines import Job, MachineType, get_engine
from kdist.testing.clouds.compute_engine import ZONES, ComputeEngineStandIn
from kdist.testing.clouds.hosts import missing_for_hosts
from tests.faults.jobs import PYTHON_PATH, TRAINING_PROGRAM, Run, check_equal

SMALL, LARGE = (
    MachineType(f"n1-standard-{cores}", "gcp", "us-central1", cores=cores, usd_per_hour=cores / 20)
    for cores in (8, 16)
)
# The time that Compute Engine gives.
_NOTICE_SECONDS = 30

pytestmark = pytest.mark.slow


def test_preempted_vms_are_created_again_with_the_next_machine(
    compute_engine, tmp_path, undisturbed, record
):
    expected = undisturbed("multi_worker")
    run = Run(tmp_path, "multi_worker")
    job = Job(
        "cats",
        (str(TRAINING_PROGRAM), "multi_worker", str(run.checkpoints), str(run.result)),
        workers=2,
        machine=SMALL,
        alternatives=(LARGE,),
        spot=True,
        time_limit_hours=1.0,
        max_restarts=0,
        options={"shared_run_dir": "1"},
        environment={"PYTHONPATH": PYTHON_PATH},
    )
    engine = get_engine("gce")
    assert [each for each in engine.check(job) if "--setup" not in each] == []
    compute_engine.without_capacity.add((SMALL.name, ZONES[0]))
    engine.submit(job)
    saved_after = []

    def preempt():
        """Preempts a VM after the tenth step, when the cloud has no other one of its kind."""
        while run.newest_step() < 10:
            time.sleep(0.05)
        compute_engine.without_capacity |= {(SMALL.name, zone) for zone in ZONES}
        vm, began = compute_engine.vms["cats-worker-1"], time.monotonic()
        vm.preempt(_NOTICE_SECONDS)
        while "exit code 143" not in vm.log.read_text():
            time.sleep(0.05)
        saved_after.append(time.monotonic() - began)
        compute_engine.delete(vm.name)

    preemption = threading.Thread(target=preempt, daemon=True)
    preemption.start()
    assert engine.find("cats").follow(print) == 0
    check_equal(run, expected)
    assert run.num_lost_examples() == 0
    assert saved_after[0] < _NOTICE_SECONDS
    created = [
        (each["kind"], each["zone"], each["scheduling"]["provisioningModel"])
        for each in compute_engine.requests
        if each["name"] == "cats-worker-0"
    ]
    # No capacity in the first zone; later none of this kind at all, and then of the next kind.
    assert created == [
        (SMALL.name, ZONES[0], "SPOT"),
        (SMALL.name, ZONES[1], "SPOT"),
        (SMALL.name, ZONES[0], "SPOT"),
        (SMALL.name, ZONES[1], "SPOT"),
        (LARGE.name, ZONES[0], "SPOT"),
    ]
    assert compute_engine.vms == {}
    fault = "a VM is preempted, no capacity for its kind, on Compute Engine (stand-in)"
    outcome = "all save; VMs of the next kind are created"
    record(fault, "multi_worker", outcome, saved_after[0], 0, "yes")


def test_the_limit_of_dollars_deletes_all_vms(tmp_path, monkeypatch):
    """With this machine's own `gcloud`, if it has one."""
    if missing := missing_for_hosts():
        pytest.skip(missing)
    usd = LARGE.usd_per_hour * 61 / 3600
    job = Job("dogs", ("sleep", "600"), machine=LARGE, time_limit_hours=1.0, max_usd=usd)
    with ComputeEngineStandIn(tmp_path) as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        assert get_engine("gce").submit(job).follow(print) == 124
        [request] = service.requests
        assert int(request["scheduling"]["maxRunDuration"]["seconds"]) == 60
        assert service.vms == {}
