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

from kdist.cluster.slurm import read_slurm_nodes
from kdist.cluster.variables import read_number, read_variable
from kdist.json_text import parse_json

# Environment variables of kdist. An empty one counts as not set.
CHIEF_VARIABLE, PS_VARIABLE, HOSTS_VARIABLE = "KDIST_CHIEF", "KDIST_PS", "KDIST_HOSTS"
# Port of a task on engines that start one task per address.
PORT = 2222

_TF_CONFIG = "set TF_CONFIG for each task"

Nodes = tuple[list[str], int]  # addresses of all nodes, and the number of this one


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


# Engines that run on others come first: their addresses are those of the tasks.
_ENGINES: dict[str, Callable[[Mapping[str, str]], Nodes | None]] = {
    "SkyPilot": _skypilot,
    "dstack": _dstack,
    "SageMaker": _sagemaker,
    "Kubernetes": _kubernetes,
    "Slurm": read_slurm_nodes,
}
