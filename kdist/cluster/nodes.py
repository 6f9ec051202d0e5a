"""Place of this process in a job that an engine started, read from its environment variables.

    read_place(os.environ)     # ({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "worker", 1)

Engines number their nodes and know no roles. All nodes are workers, in the engine's order, unless
these variables are set for all of them:

    KDIST_CHIEF=1      the first node is the chief
    KDIST_PS=2         the last two nodes are parameter servers; the first node is then the chief
    KDIST_HOSTS=a,b    addresses of the pods of a Kubernetes Indexed Job, by completion index
"""

import re
from collections.abc import Callable, Mapping

from kdist.json_text import parse_json

# Environment variables of kdist. An empty one counts as not set.
CHIEF_VARIABLE, PS_VARIABLE, HOSTS_VARIABLE = "KDIST_CHIEF", "KDIST_PS", "KDIST_HOSTS"
# Port of a task on engines that start one task per address.
PORT = 2222

_TF_CONFIG = "set TF_CONFIG for each task"

Nodes = tuple[list[str], int]  # addresses of all nodes, and the number of this one

# Slurm: task t of a host listens on port _FIRST_PORT + offset of the job + t, so that two jobs on
# one host use different ports. The range ends below Linux's range for outgoing connections.
_FIRST_PORT, _NUM_PORTS, _PORTS_PER_JOB = 20000, 12000, 64
_SLURM_REMEDY = "start with srun, or unset the variables of Slurm"


def read_variable(environment: Mapping[str, str], name: str, remedy: str) -> str:
    """Returns the value of a variable that other variables require.

    Raises:
        ValueError: If it is not set, or empty.
    """
    if not environment.get(name):
        raise ValueError(f"{name} is not set, but other variables of its engine are; {remedy}")
    return environment[name]


def read_number(
    environment: Mapping[str, str], name: str, remedy: str, default: int | None = None
) -> int:
    """Returns the value of a variable as a number from 0.

    Raises:
        ValueError: If it is not such a number, or it is not set and there is no default.
    """
    if default is not None and name not in environment:
        return default
    text = environment[name] if name in environment else read_variable(environment, name, remedy)
    if not re.fullmatch("[0-9]{1,12}", text.strip()):
        raise ValueError(f"{name}={text} is not a number; {remedy}")
    return int(text)


def read_place(environment: Mapping[str, str]) -> tuple[dict[str, list[str]], str, int] | None:
    """Returns (addresses by role, role, index) of this process; None outside of a job.

    A job of one node is none.

    Raises:
        ValueError: If variables of an engine are missing, or contradict each other.
    """
    read = {engine: reader(environment) for engine, reader in _ENGINES.items()}
    found = {engine: nodes for engine, nodes in read.items() if nodes is not None}
    if not found:
        _check_no_roles(environment)
        return None
    # One engine may run on another, such as SkyPilot on Slurm. Each node then has one number.
    if len({(len(addresses), index) for addresses, index in found.values()}) > 1:
        places = ", ".join(
            f"{engine} node {index} of {len(addresses)}"
            for engine, (addresses, index) in found.items()
        )
        raise ValueError(
            f"the environment is that of several jobs: {places}; unset the variables of all but "
            f"one of these engines, or {_TF_CONFIG}"
        )
    addresses, index = next(iter(found.values()))
    return _with_roles(addresses, index, environment)


def _with_roles(addresses, index, environment):
    ps, chief = _roles(environment)
    workers = len(addresses) - chief - ps
    if workers < 1:
        raise ValueError(
            f"{chief} chief and {ps} parameter servers ({PS_VARIABLE}, {CHIEF_VARIABLE}) leave no "
            f"worker in a job of {len(addresses)} nodes; start more nodes, or lower {PS_VARIABLE}"
        )
    tasks, places = {}, []
    for role, count in (("chief", chief), ("worker", workers), ("ps", ps)):
        first = len(places)
        tasks[role] = addresses[first : first + count]
        places += [(role, number) for number in range(count)]
    return {role: hosts for role, hosts in tasks.items() if hosts}, *places[index]


def _roles(environment):
    """Returns the numbers of parameter servers and of chiefs that the user has set."""
    given = {name: value for name, value in environment.items() if value}
    ps = read_number(given, PS_VARIABLE, "set it to the number of parameter servers", 0)
    chief = read_number(given, CHIEF_VARIABLE, "set it to 1 or 0", int(ps > 0))
    if chief > 1:
        raise ValueError(f"{CHIEF_VARIABLE}={chief}; a job has at most one chief, set it to 1 or 0")
    if ps and not chief:
        raise ValueError(
            f"{PS_VARIABLE}={ps} and {CHIEF_VARIABLE}=0, but parameter servers need a chief; unset "
            f"{CHIEF_VARIABLE}"
        )
    return ps, chief


def _check_no_roles(environment):
    """Raises an error if the user wants parameter servers, and this process has no other nodes."""
    ps, _ = _roles(environment)
    if ps:
        raise ValueError(
            f"{PS_VARIABLE}={ps}, but no engine has set variables of several nodes; start this "
            f"process by one (srun, kdist launch --ps={ps}), {_TF_CONFIG}, or unset {PS_VARIABLE}"
        )


# Engines. Each function returns the nodes of a job of several nodes, otherwise None.


def _skypilot(environment):
    # docs.skypilot.co/en/stable/running-jobs/environment-variables.html
    return _listed(
        environment,
        hosts="SKYPILOT_NODE_IPS",
        index="SKYPILOT_NODE_RANK",
        count="SKYPILOT_NUM_NODES",
        remedy="start the program in `run` of the SkyPilot task, or unset SKYPILOT_NODE_RANK and "
        f"SKYPILOT_NODE_IPS, or {_TF_CONFIG}",
    )


def _dstack(environment):
    # dstack.ai/docs/concepts/tasks/#system-environment-variables
    return _listed(
        environment,
        hosts="DSTACK_NODES_IPS",
        index="DSTACK_NODE_RANK",
        count="DSTACK_NODES_NUM",
        remedy=f"start the program by `commands` of a dstack task, or {_TF_CONFIG}",
    )


def _kubernetes(environment):
    # kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication
    index = "JOB_COMPLETION_INDEX"
    if environment.get(index, "0") == "0" and not environment.get(HOSTS_VARIABLE):
        return None  # the only pod of a job, as far as this pod can know
    return _listed(
        environment,
        hosts=HOSTS_VARIABLE,
        index=index,
        remedy=f"set {HOSTS_VARIABLE} in all pods of an Indexed Job to their names in a headless "
        f"service, such as cats-0.cats,cats-1.cats, or {_TF_CONFIG}. Pods that train "
        "independently of each other need TF_CONFIG={}",
    )


def _sagemaker(environment):
    # github.com/aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md
    hosts, current = "SM_HOSTS", "SM_CURRENT_HOST"
    remedy = f"start the program by SageMaker's training toolkit, or {_TF_CONFIG}"
    if not (environment.get(hosts) or environment.get(current)):
        return None
    text = read_variable(environment, hosts, remedy)
    host = read_variable(environment, current, remedy)
    try:
        names = parse_json(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or host not in names:
        raise ValueError(
            f"{hosts}={text} is not a list in JSON that contains {current}={host}; {remedy}"
        )
    return _nodes(names, names.index(host), hosts, remedy)


def _listed(environment, hosts, index, remedy, count=None):
    """Returns the nodes of an engine that lists all hosts in one variable.

    The arguments are the names of variables: `hosts`, separated by white space or commas, the
    `index` of this node, and the `count` of nodes if the engine sets it.
    """
    if not (environment.get(hosts) or environment.get(index)):
        return None
    if count and read_number(environment, count, remedy, 0) == 1:
        return None
    names = re.split(r"[\s,]+", read_variable(environment, hosts, remedy).strip())
    number = read_number(environment, index, remedy)
    if count and read_number(environment, count, remedy, len(names)) != len(names):
        raise ValueError(f"{count}={environment[count]}, but {hosts} has {len(names)}; {remedy}")
    if number >= len(names):
        raise ValueError(f"{index}={number}, but {hosts} has {len(names)} hosts; {remedy}")
    return _nodes(names, number, hosts, remedy)


def _nodes(names, index, variable, remedy):
    """Returns the nodes of a list of host names; None if there is only one."""
    for name in names:
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+(:\d+)?", name)):
            raise ValueError(f"{variable} contains {name!r}, which is no host name; {remedy}")
    if len(names) == 1:
        return None
    return [name if ":" in name else f"{name}:{PORT}" for name in names], index


def read_slurm_nodes(environment: Mapping[str, str]) -> tuple[list[str], int] | None:
    """Returns (addresses of all tasks, number of this one); None outside of a multi-task job step.

    Raises ValueError if one of the variables SLURM_PROCID, SLURM_STEP_NUM_TASKS,
    SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE, and SLURM_JOB_ID is missing or malformed, and in
    a job of several nodes outside of any step.

    TensorFlow's own SlurmClusterResolver sorts hosts by name, which assigns wrong addresses where
    Slurm's order differs (n9, n10). It also requires nvidia-smi, even without GPUs.
    """
    nodes = read_number(environment, "SLURM_JOB_NUM_NODES", _SLURM_REMEDY, 1)
    if nodes > 1 and "SLURM_STEP_NUM_TASKS" not in environment:
        raise ValueError(
            f"the Slurm job has {nodes} nodes, and this process runs on one of them; start it with "
            "srun, or set TF_CONFIG={} to train on this node alone"
        )
    if read_number(environment, "SLURM_STEP_NUM_TASKS", _SLURM_REMEDY, 1) < 2:
        return None
    return _slurm_addresses(environment), read_number(environment, "SLURM_PROCID", _SLURM_REMEDY)


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


def _slurm_addresses(environment):
    hosts = expand_hosts(read_variable(environment, "SLURM_STEP_NODELIST", _SLURM_REMEDY))
    counts = expand_task_counts(
        read_variable(environment, "SLURM_STEP_TASKS_PER_NODE", _SLURM_REMEDY)
    )
    if len(hosts) != len(counts):
        raise ValueError(
            f"SLURM_STEP_NODELIST has {len(hosts)} hosts, SLURM_STEP_TASKS_PER_NODE {len(counts)}"
        )
    job = read_number(environment, "SLURM_JOB_ID", _SLURM_REMEDY, 0)
    port = _FIRST_PORT + job * _PORTS_PER_JOB % _NUM_PORTS
    return [
        f"{host}:{port + task}"
        for host, count in zip(hosts, counts, strict=True)
        for task in range(count)
    ]


# Engines that run on others come first: their addresses are those of the tasks.
_ENGINES: dict[str, Callable[[Mapping[str, str]], Nodes | None]] = {
    "SkyPilot": _skypilot,
    "dstack": _dstack,
    "SageMaker": _sagemaker,
    "Kubernetes": _kubernetes,
    "Slurm": read_slurm_nodes,
}
