"""Trains on two of three nodes of a Ray cluster on this machine, whose processes a test kills.

Run as a program: `python ray_program.py DIRECTORY CHECKPOINTS RESULT`. The last line of its output
says, as JSON, what was seen.
"""

import json
import pathlib
import sys
import time

from kdist import launch
from kdist.launch.engines import Job, get_engine
from tests.serving.ray_program import nodes

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(__file__).with_name("training_program.py")


def main(directory, checkpoints, result):
    with nodes(pathlib.Path(directory), 3):
        seen = {"roles": roles()}
        seen |= {"code": train(checkpoints, result), "stopped": stopped()}
        seen["called"] = launch.on("ray", place, workers=2, arguments=("a",))
    print(json.dumps(seen))


def train(checkpoints, result):
    engine = get_engine("ray")
    command = (str(PROGRAM), "multi_worker", checkpoints, result)
    environment = {"PYTHONPATH": str(ROOT)}
    run_dir = str(pathlib.Path(checkpoints).parent)
    job = Job("cats", command, workers=2, run_dir=run_dir, environment=environment, max_restarts=1)
    assert engine.check(job) == []
    engine.submit(job)
    code = engine.find("cats").follow(lambda line: print(line, flush=True))
    assert engine.find("cats").status().restarts == 3
    engine.find("cats").remove()
    return code


def roles():
    """Returns the tasks of a job with a parameter server, and the refusal of a larger one."""
    engine, lines = get_engine("ray"), []
    engine.submit(Job("roles", ("sh", "-c", "echo $TF_CONFIG"), ps=1)).follow(lines.append)
    try:
        engine.submit(Job("large", ("true",), workers=4, options={"room_seconds": "3"}))
    except RuntimeError as error:
        lines.append(str(error))
    return lines


def stopped():
    """Returns whether a job that runs has ended when `stop` returns."""
    engine = get_engine("ray")
    marker = pathlib.Path(sys.argv[1]) / "runs"
    shell = f"touch {marker}; trap 'rm {marker}; exit 143' TERM; while true; do sleep 0.1; done"
    engine.submit(Job("dogs", ("sh", "-c", shell), grace_seconds=10))
    while not marker.exists():
        time.sleep(0.05)
    engine.find("dogs").stop()
    return not marker.exists()


def place(name):
    """Returns the place of this task and its Ray."""
    import os

    import kdist

    cluster = kdist.Cluster.resolve()
    return [name, cluster.counts(), cluster.name, os.environ.get("TF_USE_LEGACY_KERAS")]


if __name__ == "__main__":
    main(*sys.argv[1:])
