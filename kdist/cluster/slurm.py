"""Tasks of a Slurm job step, read from the environment variables that `srun` sets.

TensorFlow's own SlurmClusterResolver sorts hosts by name, which assigns wrong addresses where
Slurm's order differs (n9, n10). It also requires nvidia-smi, even without GPUs.
"""

import re
from collections.abc import Mapping

# Task t of a host listens on port _FIRST_PORT + offset of the job + t, so that two jobs on one host
# use different ports. The range ends below Linux's range for outgoing connections.
_FIRST_PORT, _NUM_PORTS, _PORTS_PER_JOB = 20000, 12000, 64


def read_slurm_tasks(
    environment: Mapping[str, str],
) -> tuple[dict[str, list[str]], str, int] | None:
    """Returns (addresses by role, role, index) of this task; None outside of a multi-task job step.

    All tasks are workers. Raises ValueError if one of the variables SLURM_PROCID,
    SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE, and SLURM_JOB_ID is
    missing or malformed.
    """
    if _number(environment, "SLURM_STEP_NUM_TASKS", 1) < 2:
        return None
    addresses = {"worker": _addresses(environment)}
    return addresses, "worker", _number(environment, "SLURM_PROCID")


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
    hosts = expand_hosts(_variable(environment, "SLURM_STEP_NODELIST"))
    counts = expand_task_counts(_variable(environment, "SLURM_STEP_TASKS_PER_NODE"))
    if len(hosts) != len(counts):
        raise ValueError(
            f"SLURM_STEP_NODELIST has {len(hosts)} hosts, SLURM_STEP_TASKS_PER_NODE {len(counts)}"
        )
    job = _number(environment, "SLURM_JOB_ID", 0)
    port = _FIRST_PORT + job * _PORTS_PER_JOB % _NUM_PORTS
    return [
        f"{host}:{port + task}"
        for host, count in zip(hosts, counts, strict=True)
        for task in range(count)
    ]


def _number(environment, name, default=None):
    if default is not None and name not in environment:
        return default
    text = _variable(environment, name)
    if not re.fullmatch("[0-9]{1,12}", text.strip()):
        raise ValueError(f"{name}={text} is not a number; unset it, or start with srun")
    return int(text)


def _variable(environment, name):
    if name not in environment:
        raise ValueError(f"{name} is not set, but other Slurm variables are; start with srun")
    return environment[name]
