"""The tasks of a job: discovery, handshake, liveness, heartbeat, and remote access.

    cluster = kdist.Cluster.resolve()     # from the variables of an engine, such as TF_CONFIG
    cluster.is_chief, cluster.num_workers

Nothing in this package imports TensorFlow.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence

from kdist.cluster.nodes import read_place
from kdist.cluster.variables import read_number
from kdist.json_text import parse_json

__all__ = ["ROLES", "Cluster"]

ROLES = ("chief", "worker", "ps", "evaluator")
TF_CONFIG = "TF_CONFIG"
# Set by the launcher of a job that may run with fewer workers than planned.
PLANNED_WORKERS = "KDIST_PLANNED_WORKERS"

# Strategy -> roles that it requires, and further roles that it allows.
_STRATEGY_ROLES = {
    "multi_worker": ({"worker"}, {"chief", "evaluator"}),
    "parameter_server": ({"chief", "worker", "ps"}, {"evaluator"}),
    "a layout": ({"worker"}, {"chief"}),
}


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The tasks of a job and the place of this process among them.

    Example:

        >>> cluster = Cluster({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "worker", 1)
        >>> cluster.name, cluster.address, cluster.is_chief
        ('worker 1', '10.0.0.2:2222', False)

    Args:
        tasks: Mapping from role to addresses (`"host:port"`), in the order of task indices.
            Defaults to no tasks: a single process.
        role: Role of this process: `"chief"`, `"worker"`, `"ps"`, or `"evaluator"`. Defaults to
            `"worker"`.
        index: Index of this process within its role, from 0. Defaults to 0.
        planned_workers: Number of workers when none is missing, including the chief, of a job that
            may run with fewer (`kdist launch --min_workers`). Defaults to `None`: it may not.

    Raises:
        ValueError: If a role is unknown, an address is malformed or listed twice, no task has this
            role and index, there is more than one chief or evaluator, or there are more workers
            than planned.
    """

    tasks: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    role: str = "worker"
    index: int = 0
    planned_workers: int | None = None

    def __post_init__(self):
        tasks = {role: tuple(addresses) for role, addresses in self.tasks.items() if addresses}
        object.__setattr__(self, "tasks", tasks)
        _check_roles(tasks)
        _check_addresses(tasks)
        if tasks:
            _check_place(tasks, self.role, self.index)
        if self.planned_workers is not None and self.planned_workers < max(1, self.num_workers):
            raise ValueError(
                f"{self.num_workers} workers, and {self.planned_workers} are planned "
                f"({PLANNED_WORKERS}); unset {PLANNED_WORKERS}, which kdist launch sets"
            )

    @classmethod
    def resolve(cls, environment: Mapping[str, str] | None = None) -> "Cluster":
        """Reads the cluster from the environment variables that an engine sets.

        TF_CONFIG comes first: `kdist launch`, TFJob, Vertex AI, and Ray set it, with the roles of
        all tasks. Otherwise it is read from the variables of SkyPilot, dstack, SageMaker, a
        Kubernetes Indexed Job (with KDIST_HOSTS, the names of its pods), or Slurm. Their nodes are
        workers; KDIST_CHIEF=1 makes the first one the chief, and KDIST_PS=n the last n parameter
        servers. KDIST_PLANNED_WORKERS, which `kdist launch` sets, is `planned_workers`.

        Args:
            environment: Environment variables. Defaults to those of this process.

        Returns:
            The cluster; a single process if no engine has set variables of several nodes.

        Raises:
            ValueError: If variables are missing, malformed, or contradict each other.
        """
        environment = os.environ if environment is None else environment
        planned = None
        if environment.get(PLANNED_WORKERS):
            planned = read_number(environment, PLANNED_WORKERS, "unset it; kdist launch sets it")
        if environment.get(TF_CONFIG):
            cluster = cls.from_tf_config(environment[TF_CONFIG])
        else:
            cluster = cls(*(read_place(environment) or ()))
        return dataclasses.replace(cluster, planned_workers=planned)

    @classmethod
    def from_tf_config(cls, text: str) -> "Cluster":
        """Parses the value of TF_CONFIG, JSON in the format that TensorFlow documents.

        Raises:
            ValueError: If the text is malformed.
        """
        try:
            tasks, role, index = _parse_tf_config(text)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f'TF_CONFIG is not {{"cluster": {{"worker": ["host:port", …]}}, "task": {{"type": '
                f'"worker", "index": 0}}}}: {error}. Correct it, or unset it to train in a single '
                "process"
            ) from error
        return cls(tasks, role, index)

    def to_tf_config(self) -> str:
        """Returns the cluster in the format of TF_CONFIG."""
        task = {"type": self.role, "index": self.index}
        return json.dumps({"cluster": {k: list(v) for k, v in self.tasks.items()}, "task": task})

    def publish(self, environment: dict[str, str] | None = None):
        """Writes the variables of `resolve` into an environment; by default of this process."""
        environment = os.environ if environment is None else environment  # type: ignore[assignment]
        environment[TF_CONFIG] = self.to_tf_config()  # type: ignore[index]
        environment.pop(PLANNED_WORKERS, None)  # type: ignore[union-attr]
        if self.planned_workers is not None:
            environment[PLANNED_WORKERS] = str(self.planned_workers)  # type: ignore[index]

    # This process.

    @property
    def name(self) -> str:
        """The task's name, such as "worker 1"; "chief" and "evaluator" have no index."""
        return self.role if self.role in ("chief", "evaluator") else f"{self.role} {self.index}"

    @property
    def address(self) -> str:
        """The address of this process."""
        return self.tasks[self.role][self.index]

    @property
    def is_alone(self) -> bool:
        """True if the job has no other task."""
        return sum(map(len, self.tasks.values())) <= 1

    @property
    def is_chief(self) -> bool:
        """True for the chief, and for worker 0 if there is no chief."""
        if self.role == "chief":
            return True
        return self.role == "worker" and self.index == 0 and "chief" not in self.tasks

    # All tasks.

    @property
    def num_workers(self) -> int:
        """Number of tasks that train under `multi_worker`, including the chief."""
        return len(self.tasks.get("chief", ())) + len(self.tasks.get("worker", ()))

    @property
    def first_task(self) -> "Cluster":
        """The cluster as the first task sees it: the chief, or worker 0 without one."""
        return self.all_tasks()[0]

    def others(self) -> list["Cluster"]:
        """Returns the cluster as each other task sees it."""
        return [task for task in self.all_tasks() if task != self]

    def all_tasks(self) -> list["Cluster"]:
        """Returns the cluster as each of its tasks sees it, chief first."""
        return [
            dataclasses.replace(self, role=role, index=index)
            for role in ROLES
            for index in range(len(self.tasks.get(role, ())))
        ]

    def check_roles_for(self, strategy: str):
        """Checks that the cluster has the roles that a strategy requires, and no idle ones.

        Args:
            strategy: `"multi_worker"`, `"parameter_server"`, or `"a layout"`.

        Raises:
            ValueError: If a required role is missing, or the strategy does not use a role.
        """
        required, allowed = _STRATEGY_ROLES[strategy]
        missing = [role for role in ROLES if role in required - self.tasks.keys()]
        if missing:
            servers = " (KDIST_PS=1 for a server)" * ("ps" in missing)
            raise ValueError(
                f"{strategy} needs tasks of the role {' and '.join(missing)}; the cluster has "
                f"{self.counts() or 'none'}. Start them with kdist launch, or srun{servers}, or "
                "set TF_CONFIG for each task"
            )
        unused = [role for role in self.tasks if role not in required | allowed]
        if unused:
            raise ValueError(
                f"{strategy} does not use tasks of the role {', '.join(unused)}; remove them from "
                "the cluster, or use --strategy=parameter_server"
            )

    def counts(self) -> str:
        """Returns the number of tasks per role, such as "1 chief, 2 workers, 1 ps"."""
        numbers = {role: len(self.tasks[role]) for role in ROLES if role in self.tasks}
        return ", ".join(
            f"{number} {role}{'s' * (role == 'worker' and number > 1)}"
            for role, number in numbers.items()
        )


def _parse_tf_config(text):
    """Returns (addresses by role, role, index) of the value of TF_CONFIG."""
    config = parse_json(text)
    tasks, task = config.get("cluster", {}), config.get("task", {})
    role, index = task.get("type", "worker"), task.get("index", 0)
    if not isinstance(tasks, dict):
        raise TypeError(f"the cluster is {tasks!r} instead of an object")
    for name, addresses in tasks.items():
        if not isinstance(addresses, list):
            raise TypeError(f"the addresses of {name} are {addresses!r} instead of a list")
    if not isinstance(role, str):
        raise TypeError(f"the type of the task is {role!r} instead of a text")
    if not re.fullmatch("[0-9]{1,9}", str(index)):  # some programs write it as a text
        raise ValueError(f"the index of the task is {index!r} instead of a number from 0")
    if "sparseCluster" in config:  # each worker would train alone
        raise ValueError("it lists this worker only; set enableDynamicWorker: false in the TFJob")
    if not tasks and int(index):
        raise ValueError(f"the task is {role} {index}, and the cluster is missing")
    return tasks, role, int(index)


def _check_roles(tasks):
    unknown = [role for role in tasks if role not in ROLES]
    if unknown:
        raise ValueError(f"unknown role: {', '.join(unknown)}; the roles are {', '.join(ROLES)}")
    for role in ("chief", "evaluator"):
        if len(tasks.get(role, ())) > 1:
            raise ValueError(
                f"{len(tasks[role])} tasks have the role {role}, and only one may have it: make "
                "the others workers"
            )


def _check_addresses(tasks):
    addresses = [address for role in tasks.values() for address in role]
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"invalid address {address!r}; write it as host:port, port 1 to 65535")
    duplicates = sorted({address for address in addresses if addresses.count(address) > 1})
    if duplicates:
        raise ValueError(
            f"two tasks have the address {', '.join(duplicates)}; give each task its own host or "
            "port"
        )


def _check_place(tasks, role, index):
    if role not in tasks:
        # The others have to know where it is: it joins their handshake.
        remedy = (
            ". TFJob and Vertex AI leave the evaluator out of TF_CONFIG: remove it, and the chief "
            "validates, or add its address for all tasks"
        )
        raise ValueError(
            f"this process is {role} {index}, and the cluster has no {role}; it has "
            f"{', '.join(tasks)}{remedy * (role == 'evaluator')}"
        )
    if not 0 <= index < len(tasks[role]):
        raise ValueError(
            f"this process is {role} {index}, and the cluster has {role} 0 to "
            f"{len(tasks[role]) - 1}; correct the index, or add its address"
        )
