"""Trains on two VMs of a stand-in for Compute Engine, one of which is preempted.

Run as a program in network and mount namespaces of its own:
`python gce_program.py DIRECTORY CHECKPOINTS RESULT`.
The last line of its output says, as JSON, what was seen.
"""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

from kdist.launch.engines import Job, MachineType, get_engine
from kdist.launch.engines.gce import ComputeEngineJob
from kdist.run_directory import checkpoint_step
from tests.faults.compute_engine import ZONES, ComputeEngine

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(__file__).with_name("training_program.py")
SMALL, LARGE = (
    MachineType(f"n1-standard-{cores}", "gcp", "us-central1", cores=cores, usd_per_hour=cores / 20)
    for cores in (8, 16)
)


def main(directory, checkpoints, result):
    directory = pathlib.Path(directory)
    hosts = directory / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    ComputeEngineJob.poll_seconds = 1.0
    # `python3` of the VMs.
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    with ComputeEngine(directory, hosts) as service:
        os.environ.update(service.environment)
        seen = train(service, checkpoints, result)
        seen["limited"] = limited(service)
    print(json.dumps(seen))


def train(service, checkpoints, result):
    engine = get_engine("gce")
    job = Job(
        "cats",
        (str(PROGRAM), "multi_worker", checkpoints, result),
        workers=2,
        machine=SMALL,
        alternatives=(LARGE,),
        spot=True,
        time_limit_hours=1.0,
        max_restarts=0,
        options={"shared_run_dir": "1"},
        environment={"PYTHONPATH": str(ROOT)},
    )
    assert [each for each in engine.check(job) if "--setup" not in each] == []
    service.without_capacity.add((SMALL.name, ZONES[0]))
    engine.submit(job)
    seen = {"saved after": None}
    preemption = threading.Thread(target=preempt, args=[service, checkpoints, seen], daemon=True)
    preemption.start()
    seen["code"] = engine.find("cats").follow(lambda line: print(line, flush=True))
    seen["created"] = [
        (each["name"], each["kind"], each["zone"], each["scheduling"]["provisioningModel"])
        for each in service.requests
    ]
    seen["left"] = list(service.vms)
    return seen


def preempt(service, checkpoints, seen):
    """Preempts a VM after the tenth step, when the cloud has no other one of its kind."""
    while (
        max((checkpoint_step(p) or 0 for p in pathlib.Path(checkpoints).glob("*")), default=0) < 10
    ):
        time.sleep(0.05)
    service.without_capacity |= {(SMALL.name, zone) for zone in ZONES}
    log = service.vms["cats-worker-1"].log
    began = time.monotonic()
    service.preempt("cats-worker-1")
    while "exit code 143" not in log.read_text():
        time.sleep(0.05)
    seen["saved after"] = time.monotonic() - began
    service.delete("cats-worker-1")


def limited(service):
    """Returns what happens to a job that reaches its limit of dollars."""
    engine, before = get_engine("gce"), len(service.requests)
    usd = LARGE.usd_per_hour * 61 / 3600
    limits = {"time_limit_hours": 1.0, "max_usd": usd}
    handle = engine.submit(Job("dogs", ("sleep", "600"), machine=LARGE, **limits))
    states = [handle.status().state]
    lines = []
    code = handle.follow(lines.append)
    [request] = service.requests[before:]
    seconds = int(request["scheduling"]["maxRunDuration"]["seconds"])
    return {"code": code, "states": states, "seconds": seconds, "left": list(service.vms)}


if __name__ == "__main__":
    main(*sys.argv[1:])
