"""The tasks of a Slurm job step, read off the environment that `srun` gives each of them.

TensorFlow's own SlurmClusterResolver sorts hosts by name, which gives tasks wrong addresses where
Slurm's order is another (n9, n10), and wants nvidia-smi even without GPUs.
"""

import re
from collections.abc import Mapping

# Task t of a host listens on the port that many above this, shifted by the job's number, so that
# two jobs that share a host do not meet. Below the range that Linux gives to outgoing connections.
_FIRST_PORT, _PORTS, _PORTS_A_JOB = 20000, 12000, 64


def tasks_of_slurm(environment: Mapping[str, str], num_ps: int = 0):
    """(role -> addresses, this task's role, its index); None outside of a job step of several.

    All tasks are workers. With parameter servers, task 0 is the chief, the next ones are the ps.

    Args:
        environment: with SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST,
            SLURM_STEP_TASKS_PER_NODE and SLURM_JOB_ID.
        num_ps: how many tasks are parameter servers.

    Raises:
        ValueError: a variable is missing or says what Slurm never would, or too few tasks.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) < 2:
        return None
    addresses = _addresses(environment)
    rank = int(_variable(environment, "SLURM_PROCID"))
    if not num_ps:
        return {"worker": addresses}, "worker", rank
    if len(addresses) < num_ps + 2:
        raise ValueError(
            f"{len(addresses)} Slurm tasks for a chief, {num_ps} ps and no worker; ask for at "
            f"least {num_ps + 2} (srun --ntasks)"
        )
    tasks = {
        "chief": addresses[:1],
        "ps": addresses[1 : 1 + num_ps],
        "worker": addresses[1 + num_ps :],
    }
    first = {"chief": 0, "ps": 1, "worker": 1 + num_ps}
    role = next(role for role in ("worker", "ps", "chief") if rank >= first[role])
    return tasks, role, rank - first[role]


def hosts(text: str) -> list[str]:
    """Slurm's list of hosts, written out.

    >>> hosts("n[1-2],m5,o[08-10,12]")
    ['n1', 'n2', 'm5', 'o08', 'o09', 'o10', 'o12']

    Raises:
        ValueError: it is no such list.
    """
    if not re.fullmatch(r"(?:[\w.-]+(?:\[[\d,-]+\])?(?:,(?!$)|$))+", text):
        raise ValueError(f"{text!r} is no list of Slurm hosts, such as n[1-2],m5")
    found = []
    for prefix, ranges in re.findall(r"([\w.-]+)(?:\[([\d,-]+)\])?", text):
        if not ranges:
            found.append(prefix)
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            found += [f"{prefix}{number:0{len(first)}}" for number in numbers]
    return found


def tasks_per_host(text: str) -> list[int]:
    """Slurm's numbers of tasks, written out.

    >>> tasks_per_host("2(x3),1")
    [2, 2, 2, 1]
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"{text!r} are no numbers of Slurm tasks, such as 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _addresses(environment):
    names = hosts(_variable(environment, "SLURM_STEP_NODELIST"))
    counts = tasks_per_host(_variable(environment, "SLURM_STEP_TASKS_PER_NODE"))
    if len(names) != len(counts):
        raise ValueError(
            f"SLURM_STEP_NODELIST has {len(names)} hosts, SLURM_STEP_TASKS_PER_NODE {len(counts)}"
        )
    job = int(environment.get("SLURM_JOB_ID", 0))
    port = _FIRST_PORT + job * _PORTS_A_JOB % _PORTS
    return [
        f"{name}:{port + number}"
        for name, count in zip(names, counts, strict=True)
        for number in range(count)
    ]


def _variable(environment, name):
    if name not in environment:
        raise ValueError(f"{name} is not set, and other variables of Slurm are; start by srun")
    return environment[name]
