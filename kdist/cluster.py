"""Which tasks a job has, and which of them this process is.

    cluster = Cluster.resolve()       # from TF_CONFIG or Slurm; else this process is alone
    cluster = Cluster({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "worker", 0)

A task is a process of the job. Its role is one of

    chief       decides and writes; under parameter servers it is the coordinator
    worker      trains; without a chief, worker 0 decides and writes
    ps          a parameter server: keeps variables
    evaluator   follows checkpoints and evaluates; it is no part of the training

Only this module writes TF_CONFIG, the environment variable by which TensorFlow knows the job. It
imports no TensorFlow.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence

from kdist.slurm import tasks_of_slurm

ROLES = ("chief", "worker", "ps", "evaluator")
TF_CONFIG = "TF_CONFIG"

# Roles that a strategy needs, and those that it may have besides.
_ROLES_OF = {
    "multi_worker": ({"worker"}, {"chief", "evaluator"}),
    "parameter_server": ({"chief", "worker", "ps"}, {"evaluator"}),
    "a layout": ({"worker"}, {"chief"}),
}


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The tasks of a job and this process's place among them; checked when it is made.

    Attributes:
        tasks: role -> addresses ("host:port"), in the order of the tasks' indices. Empty for a
            process that is alone.
        role: this process's.
        index: its number in its role, from 0.

    Raises:
        ValueError: an unknown role, an address that is none or stands twice, an index that no task
            has, several chiefs or evaluators.
    """

    tasks: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    role: str = "worker"
    index: int = 0

    def __post_init__(self):
        tasks = {role: tuple(addresses) for role, addresses in self.tasks.items() if addresses}
        object.__setattr__(self, "tasks", tasks)
        _check_roles(tasks)
        _check_addresses(tasks)
        if tasks:
            _check_place(tasks, self.role, self.index)

    @classmethod
    def resolve(cls, environment: Mapping[str, str] | None = None) -> "Cluster":
        """The cluster that the environment tells of: TF_CONFIG, else Slurm's variables, else none.

        Args:
            environment: by default this process's.

        Raises:
            ValueError: what it tells is no cluster.
        """
        environment = os.environ if environment is None else environment
        if environment.get(TF_CONFIG):
            return cls.from_tf_config(environment[TF_CONFIG])
        slurm = tasks_of_slurm(environment)
        return cls(*slurm) if slurm else cls()

    @classmethod
    def from_tf_config(cls, text: str) -> "Cluster":
        """The cluster of a TF_CONFIG, the JSON that TensorFlow documents.

        Raises:
            ValueError: it is not such JSON.
        """
        try:
            config = json.loads(text)
            tasks = config.get("cluster", {})
            task = config.get("task", {})
            role, index = task.get("type", "worker"), int(task.get("index", 0))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f'TF_CONFIG is not {{"cluster": {{"worker": ["host:port", …]}}, "task": {{"type": '
                f'"worker", "index": 0}}}}: {error}; mend it, or unset it to train alone'
            ) from error
        return cls(tasks, role, index)

    def to_tf_config(self) -> str:
        """The cluster as TensorFlow reads it."""
        task = {"type": self.role, "index": self.index}
        return json.dumps({"cluster": {k: list(v) for k, v in self.tasks.items()}, "task": task})

    def publish(self, environment: dict[str, str] | None = None):
        """Writes TF_CONFIG, for this process's TensorFlow or into the environment of another."""
        environment = os.environ if environment is None else environment  # type: ignore[assignment]
        environment[TF_CONFIG] = self.to_tf_config()  # type: ignore[index]

    # This process.

    @property
    def name(self) -> str:
        """Such as "worker 1"; "chief" and "evaluator" have no number."""
        return self.role if self.role in ("chief", "evaluator") else f"{self.role} {self.index}"

    @property
    def address(self) -> str:
        """This process's own."""
        return self.tasks[self.role][self.index]

    @property
    def is_alone(self) -> bool:
        """There is no other task."""
        return sum(map(len, self.tasks.values())) <= 1

    @property
    def is_chief(self) -> bool:
        """This process decides and writes: the chief, or worker 0 where there is none."""
        if self.role == "chief":
            return True
        return self.role == "worker" and self.index == 0 and "chief" not in self.tasks

    # All of them.

    @property
    def num_workers(self) -> int:
        """Tasks that train under multi_worker: the chief, if there is one, is one of them."""
        return len(self.tasks.get("chief", ())) + len(self.tasks.get("worker", ()))

    def others(self) -> list["Cluster"]:
        """The same cluster, as every other task sees it."""
        return [task for task in self.all_tasks() if task != self]

    def all_tasks(self) -> list["Cluster"]:
        """The cluster as each of its tasks sees it, chief first."""
        return [
            dataclasses.replace(self, role=role, index=index)
            for role in ROLES
            for index in range(len(self.tasks.get(role, ())))
        ]

    def check_roles_for(self, strategy: str):
        """Raises a ValueError if the strategy of this name cannot run on these tasks."""
        needed, allowed = _ROLES_OF[strategy]
        missing = [role for role in ROLES if role in needed - self.tasks.keys()]
        if missing:
            raise ValueError(
                f"{strategy} needs tasks of the role {' and '.join(missing)}; the cluster has "
                f"{self.counts() or 'none'}. Start them by scripts/launch.py or srun, or set "
                "TF_CONFIG for each"
            )
        idle = [role for role in self.tasks if role not in needed | allowed]
        if idle:
            raise ValueError(
                f"{strategy} has no use for tasks of the role {', '.join(idle)}; take them out of "
                "the cluster, or take --strategy=parameter_server"
            )

    def counts(self) -> str:
        """Such as "1 chief, 2 worker, 1 ps"."""
        return ", ".join(f"{len(self.tasks[role])} {role}" for role in ROLES if role in self.tasks)


def _check_roles(tasks):
    unknown = [role for role in tasks if role not in ROLES]
    if unknown:
        raise ValueError(f"no such role: {', '.join(unknown)}; there are {', '.join(ROLES)}")
    for role in ("chief", "evaluator"):
        if len(tasks.get(role, ())) > 1:
            raise ValueError(
                f"{len(tasks[role])} tasks have the role {role}, and one can have it: make the "
                "others workers"
            )


def _check_addresses(tasks):
    addresses = [address for some in tasks.values() for address in some]
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{address!r} is no address; write it as host:port, port 1 to 65535")
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise ValueError(
            f"two tasks have the address {', '.join(twice)}; give each one its own host or port"
        )


def _check_place(tasks, role, index):
    if role not in tasks:
        raise ValueError(
            f"this process is {role} {index}, and the cluster has no {role}; it has "
            f"{', '.join(tasks)}"
        )
    if not 0 <= index < len(tasks[role]):
        raise ValueError(
            f"this process is {role} {index}, and the cluster has {role} 0 to "
            f"{len(tasks[role]) - 1}; correct the index, or add its address"
        )
