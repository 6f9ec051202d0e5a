"""Trains on two of three nodes of a Ray cluster on this machine, whose processes a test kills.

Run as a program: `python ray_program.py DIRECTORY CHECKPOINTS RESULT`. The last line of its output
says, as JSON, what was seen.
"""

import json
import os
import pathlib
import sys
import time

from kdist import launch
from kdist.launch.engines import Job, get_engine
from tests.serving.ray_program import NODE, nodes

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(__file__).with_name("training_program.py")


def main(directory, checkpoints, result):
    directory = pathlib.Path(directory)
    with nodes(directory, 3):
        seen = {"roles": roles()}
        seen |= {"code": train(checkpoints, result), "stopped": stopped()}
        seen["called"] = launch.on("ray", place, workers=2, arguments=("a",))
    with nodes(directory / "e", 1, head_cpus=2) as cluster:
        seen["elastic"] = elastic(cluster, directory)
    print(json.dumps(seen))


def train(checkpoints, result):
    engine = get_engine("ray")
    command = (str(PROGRAM), "multi_worker", checkpoints, result)
    environment = {"PYTHONPATH": f"{ROOT / 'tests' / 'site'}{os.pathsep}{ROOT}"}
    run_dir = str(pathlib.Path(checkpoints).parent)
    job = Job("cats", command, workers=2, run_dir=run_dir, environment=environment, max_restarts=1)
    assert engine.check(job) == []
    engine.submit(job)
    code = engine.find("cats").follow(lambda line: print(line, flush=True))
    # A node's end is noticed after seconds, in which the tasks may end by themselves.
    assert engine.find("cats").status().restarts in (2, 3)
    engine.find("cats").remove()
    return code


def roles():
    """Returns the tasks of a job with a parameter server, and the refusal of a larger one."""
    engine, lines = get_engine("ray"), []
    engine.submit(Job("roles", ("sh", "-c", "echo $TF_CONFIG"), ps=1)).follow(lines.append)
    engine.find("roles").remove()  # its actor would be on a node that a test kills
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


def elastic(cluster, directory):
    """Takes a node away and adds one; returns the exit code."""
    engine, log, end = get_engine("ray"), directory / "elastic", directory / "end"
    shell = (
        f"echo $KDIST_PLANNED_WORKERS $TF_CONFIG >> {log}; trap 'exit 143' TERM; "
        f"until [ -e {end} ]; do sleep 0.1; done"
    )
    job = Job(
        "elastic",
        ("sh", "-c", shell),
        workers=2,
        min_workers=1,
        wait_minutes=0.1,
        max_restarts=1,
        grace_seconds=10,
        options={"room_seconds": "3"},
    )
    assert engine.check(job) == []
    engine.submit(job)
    _wait_for_tasks(log, [(2, 2)] * 2)
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    _wait_for_tasks(log, [(2, 2)] * 2 + [(1, 2)])
    cluster.add_node(num_cpus=2, **NODE)
    _wait_for_tasks(log, [(2, 2)] * 2 + [(1, 2)] + [(2, 2)] * 2)
    end.touch()
    code = engine.find("elastic").follow(lambda line: print(line, flush=True))
    engine.find("elastic").remove()
    return code


def _wait_for_tasks(log, expected):
    """Waits for the numbers of workers, and of planned ones, that tasks have written."""
    deadline, found = time.monotonic() + 300, []
    while found != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
        lines = log.read_text().splitlines() if log.exists() else []
        pairs = [line.split(" ", 1) for line in lines]
        found = [(len(json.loads(c)["cluster"]["worker"]), int(n)) for n, c in pairs]


def place(name):
    """Returns the place of this task and its Ray."""
    import os

    import kdist

    cluster = kdist.Cluster.resolve()
    return [name, cluster.counts(), cluster.name, os.environ.get("TF_USE_LEGACY_KERAS")]


if __name__ == "__main__":
    main(*sys.argv[1:])
