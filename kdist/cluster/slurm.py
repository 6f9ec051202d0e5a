"""Nodes of a Slurm job step, read from the environment variables that `srun` sets.

TensorFlow's own SlurmClusterResolver sorts hosts by name, which assigns wrong addresses where
Slurm's order differs (n9, n10). It also requires nvidia-smi, even without GPUs.
"""

import re
from collections.abc import Mapping

from kdist.cluster.variables import read_number, read_variable

# Task t of a host listens on port _FIRST_PORT + offset of the job + t, so that two jobs on one host
# use different ports. The range ends below Linux's range for outgoing connections.
_FIRST_PORT, _NUM_PORTS, _PORTS_PER_JOB = 20000, 12000, 64
_REMEDY = "start with srun, or unset the variables of Slurm"


def read_slurm_nodes(environment: Mapping[str, str]) -> tuple[list[str], int] | None:
    """Returns (addresses of all tasks, number of this one); None outside of a multi-task job step.

    Raises ValueError if one of the variables SLURM_PROCID, SLURM_STEP_NUM_TASKS,
    SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE, and SLURM_JOB_ID is missing or malformed, and in
    a job of several nodes outside of any step.
    """
    nodes = read_number(environment, "SLURM_JOB_NUM_NODES", _REMEDY, 1)
    if nodes > 1 and "SLURM_STEP_NUM_TASKS" not in environment:
        raise ValueError(
            f"the Slurm job has {nodes} nodes, and this process runs on one of them; start it with "
            "srun, or set TF_CONFIG={} to train on this node alone"
        )
    if read_number(environment, "SLURM_STEP_NUM_TASKS", _REMEDY, 1) < 2:
        return None
    return _addresses(environment), read_number(environment, "SLURM_PROCID", _REMEDY)


def expand_hosts(text: str) -> list[str]:
    """Returns the host names of a Slurm node list, or raises ValueError.

    >>> expand_hosts("n[1-2],m5,o[08-10,12]")
    ['n1', 'n2', 'm5', 'o08', 'o09', 'o10', 'o12']
    """
    if not re.fullmatch(r"(?:[\w.-]+(?:\[[\d,-]+\])?(?:,(?!$)|$))+", text):
        raise ValueError(f"{text!r} is not a list of Slurm hosts, such as n[1-2],m5")
    hosts = []
    for prefix, ranges in re.findall(r"([\w.-]+)(?:\[([\d,-]+)\])?", text):
        if not ranges:
            hosts.append(prefix)
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            hosts += [f"{prefix}{number:0{len(first)}}" for number in numbers]
    return hosts


def expand_task_counts(text: str) -> list[int]:
    """Returns the number of tasks of each host, or raises ValueError.

    >>> expand_task_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"{text!r} is not a list of Slurm task counts, such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _addresses(environment):
    hosts = expand_hosts(read_variable(environment, "SLURM_STEP_NODELIST", _REMEDY))
    counts = expand_task_counts(read_variable(environment, "SLURM_STEP_TASKS_PER_NODE", _REMEDY))
    if len(hosts) != len(counts):
        raise ValueError(
            f"SLURM_STEP_NODELIST has {len(hosts)} hosts, SLURM_STEP_TASKS_PER_NODE {len(counts)}"
        )
    job = read_number(environment, "SLURM_JOB_ID", _REMEDY, 0)
    port = _FIRST_PORT + job * _PORTS_PER_JOB % _NUM_PORTS
    return [
        f"{host}:{port + task}"
        for host, count in zip(hosts, counts, strict=True)
        for task in range(count)
    ]
