"""Layout: the degrees of parallelism of a training.

A replica runs on a group of devices, numbered from 0 within the group. Imports no TensorFlow.
"""

import dataclasses
import difflib
import itertools
from collections.abc import Sequence

SCHEDULES = ("1f1b", "gpipe")
BETWEEN = ("data", "model")
SHARDS = ("optimizer", "gradients", "weights")
# Strategies whose replicas can divide state among themselves.
_WITH_SHARDS = ("mirrored", "multi_worker")
# The fields that make a layout one of these strategies.
_FIELDS_OF = {
    "split": "tensor, pipeline, or branch",
    "multi_worker": "machines",
    "parameter_server": "asynchronous",
}

_DEGREES = ("data", "tensor", "pipeline", "branch", "micro_batches", "machines", "accumulate")
_DEFAULT_MIN_SHARD_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Layout:
    """Degrees of parallelism: how replicas and the parts of a model share devices.

    A split model needs `tensor`, `pipeline`, or `branch`. The fields from `machines` on describe
    how whole replicas work together; only plans set them.

    Example:

        >>> layout = Layout(data=2, pipeline=2, micro_batches=4)  # two replicas of two stages
        >>> layout.devices, layout.group_size
        (4, 2)
        >>> Layout.parse("data=2,pipeline=2,micro_batches=4") == layout
        True
        >>> print(layout)
        data=2,pipeline=2,micro_batches=4
        >>> Layout(data=16, machines=2).strategy
        'multi_worker'

    Args:
        data: Number of replicas; each trains on its own rows of a batch. Defaults to 1.
        tensor: Number of devices that share the weights of a layer. Defaults to 1.
        pipeline: Number of stages, each with consecutive layers. Defaults to 1.
        branch: Number of devices that compute parallel branches of a model. Defaults to 1.
        micro_batches: Parts of a replica's rows that follow each other through the stages, so that
            the stages work at the same time. Defaults to 1, where they work in turn.
        schedule: `"1f1b"` starts a backward pass as early as possible and holds the activations of
            one micro-batch per stage. `"gpipe"` computes all forward passes first.
            Defaults to `"1f1b"`.
        between: What the hosts of a job divide. `"data"` gives each host its own replicas, as far
            as they fit; `"model"` gives each host a part of every replica. Defaults to `"data"`.
        recompute: Whether a stage keeps only its inputs and recomputes its activations in the
            backward pass: less memory for up to a third more work. Defaults to `False`.
        shard: What the replicas divide among themselves, to save memory. `"optimizer"` (ZeRO stage
            1): each replica holds the optimizer's slots of 1/`data` of each large weight, and
            updates that part. `"gradients"` (stage 2): also the sums of gradients over micro-steps
            (`accumulate`). `"weights"` (stage 3): also the weights, each of which is gathered
            where a layer uses it, in the forward and in the backward pass. Machines of several
            devices each divide the weights among their own; machines of one device, among all.
            `None`, the default, divides nothing.
        min_shard_bytes: Smallest size of a weight, in bytes, whose state is divided. Defaults to
            65,536.
        machines: Number of machines, each with an equal share of the devices. Defaults to 1.
        accumulate: Micro-steps whose gradients are added before an update. Defaults to 1.
        local_steps: Updates of each replica between two averages of the weights (local SGD).
            `None`, the default, exchanges gradients in every update.
        asynchronous: Whether replicas update parameter servers without waiting for each other.
            Defaults to `False`.

    Raises:
        ValueError: If a degree is not a whole number from 1 on, an option is unknown, or degrees do
            not suit each other.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    branch: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    between: str = "data"
    recompute: bool = False
    shard: str | None = None
    min_shard_bytes: int = _DEFAULT_MIN_SHARD_BYTES
    machines: int = 1
    accumulate: int = 1
    local_steps: int | None = None
    asynchronous: bool = False

    def __post_init__(self):
        for name in _DEGREES:
            _check_degree(name, getattr(self, name))
        if self.local_steps is not None:
            _check_degree("local_steps", self.local_steps)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: use true or false")
        for name, known in (("schedule", SCHEDULES), ("between", BETWEEN)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: use {' or '.join(known)}")
        self._check_split()
        self._check_replicas()
        self._check_shard()

    def _check_split(self):
        if self.between == "model" and self.group_size == 1:
            raise ValueError(
                "between=model needs a split model: set pipeline=2, tensor=2, or "
                "branch=2, or leave between out"
            )
        if self.micro_batches > 1 and self.pipeline == 1:
            raise ValueError(
                f"micro_batches={self.micro_batches} needs stages: set pipeline=2 or more, or "
                f"save memory with compile(accumulate={self.micro_batches}) "
                f"(--accumulate={self.micro_batches})"
            )
        if self.recompute and self.pipeline == 1:
            raise ValueError(
                "recompute needs stages: set pipeline=2 or more and micro_batches=2 or more, or "
                "save memory with compile(accumulate=2) (--accumulate=2)"
            )
        if self.recompute and self.micro_batches == 1:
            raise ValueError(
                "recompute saves no memory with micro_batches=1, as a stage holds one micro-batch "
                "at a time: set micro_batches=2 or more, or leave recompute out"
            )
        if self.branch > 1 and self.pipeline * self.tensor > 1:
            raise ValueError(
                f"branch={self.branch} combines with data only, not with "
                f"pipeline={self.pipeline} and tensor={self.tensor}: leave branch out, or the "
                "other two"
            )

    def _check_replicas(self):
        if self.devices % self.machines:
            raise ValueError(
                f"machines={self.machines}: {self.devices} devices cannot be divided evenly; "
                "change data or machines"
            )
        if self.asynchronous and self.group_size > 1:
            raise ValueError("asynchronous replicas cannot be split: leave asynchronous out")

    def _check_shard(self):
        _check_degree("min_shard_bytes", self.min_shard_bytes)
        if self.shard is None:
            if self.min_shard_bytes != _DEFAULT_MIN_SHARD_BYTES:
                raise ValueError(
                    f"min_shard_bytes={self.min_shard_bytes} has no effect without "
                    "shard: set both, or leave min_shard_bytes out"
                )
            return
        if self.shard not in SHARDS:
            raise ValueError(f"shard={self.shard!r}: use {', '.join(SHARDS[:-1])} or {SHARDS[-1]}")
        other = "local_steps" if self.local_steps is not None else None
        # A layout for one device may carry the value to another number of devices.
        if self.strategy != "one_device" and self.shard not in supported_shards(self.strategy):
            other = _FIELDS_OF[self.strategy]
        if other:
            raise ValueError(
                f"shard={self.shard} divides the state of whole replicas that are updated together "
                f"in each step: leave {other} out, or shard"
            )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parses a layout such as `"data=2,pipeline=2"`.

        Args:
            text: Fields with commas between them. A name alone, such as `recompute`, is true. An
                empty text is one device.

        Returns:
            The `Layout`; `str(layout)` is its inverse.

        Raises:
            ValueError: If the text has another form, names a field twice, or is no valid layout.
        """
        given: dict[str, int | str | bool] = {}
        names = [field.name for field in dataclasses.fields(cls)]
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, separator, value = (piece.strip() for piece in part.partition("="))
            if name in _FLAGS and not separator:
                separator, value = "=", "true"
            if not separator or name not in names:
                raise ValueError(
                    f"{part!r} in layout {text!r}{_suggestion(name, names)}: write it as "
                    "data=2,pipeline=2; the fields are " + ", ".join(names)
                )
            if name in given:
                raise ValueError(f"layout {text!r} sets {name} twice; leave one out")
            given[name] = _value(value)
        return cls(**given)  # type: ignore[arg-type]

    @property
    def group_size(self) -> int:
        """Number of devices of one replica."""
        return self.tensor * self.pipeline * self.branch

    @property
    def devices(self) -> int:
        """Number of devices of all replicas."""
        return self.data * self.group_size

    @property
    def devices_per_machine(self) -> int:
        """Number of devices on each machine."""
        return self.devices // self.machines

    @property
    def num_parts(self) -> int:
        """Number of replicas that divide state.

        Weights are divided on each machine, unless it has one device. All replicas divide the rest.
        """
        devices = self.devices_per_machine
        return devices if self.shard == "weights" and devices > 1 else self.data

    @property
    def strategy(self) -> str:
        """Name of the strategy for `kdist.create_strategy`; `"split"` for a split model."""
        if self.group_size > 1:
            return "split"
        if self.asynchronous:
            return "parameter_server"
        if self.machines > 1:
            return "multi_worker"
        return "mirrored" if self.devices > 1 else "one_device"

    @property
    def degrees(self) -> "Layout":
        """The same placement without machines, accumulation, local steps, and asynchrony."""
        return dataclasses.replace(
            self, machines=1, accumulate=1, local_steps=None, asynchronous=False
        )

    def check_only_degrees(self):
        """Checks that no field is set that only a plan can hold.

        Raises:
            ValueError: If `machines`, `accumulate`, `local_steps`, or `asynchronous` is set.
        """
        if self != self.degrees:
            raise ValueError(
                f"{self} has fields that only a plan can have: pass accumulate and local_steps to "
                "compile(), machines to kdist launch --workers, and instead of asynchronous "
                "use the strategy parameter_server"
            )

    def check_mesh(self):
        """Checks that a JAX mesh supports the layout.

        Raises:
            ValueError: If the layout has stages or branches, or a field that only a plan can have.
        """
        self.check_only_degrees()
        refused = [
            f"{name}={n}" for name in ("pipeline", "branch") if (n := getattr(self, name)) > 1
        ]
        if self.shard:
            refused.append(f"shard={self.shard}")
        if refused:
            raise ValueError(
                f"{' and '.join(refused)}: on a JAX mesh all devices of a replica compute every "
                "layer, and a layout has data and tensor alone. Remove the other degrees, or use "
                "Keras's TensorFlow backend and kdist.create_strategy (--backend=tensorflow)"
            )

    def groups(self, hosts: Sequence[Sequence[str]]) -> list[list[str]]:
        """Returns the devices of each replica.

        Args:
            hosts: The device names of each host; all hosts have the same number.

        Raises:
            ValueError: If the number of devices differs from the layout's, or the layout cannot be
                divided over the hosts.
        """
        available = sum(map(len, hosts))
        if available != self.devices:
            names = ", ".join(device for host in hosts for device in host)
            raise ValueError(
                f"{self} is for {self.devices} devices and there are {available} ({names}): name "
                f"{self.devices}, or use another layout"
            )
        size = self.group_size
        if self.between == "model":
            if size % len(hosts):
                raise ValueError(
                    f"{self}: the {size} devices of a replica cannot be divided over {len(hosts)} "
                    "hosts; use another layout, or leave between out"
                )
            part = size // len(hosts)
            parts = [[host[n * part : (n + 1) * part] for host in hosts] for n in range(self.data)]
            return [list(itertools.chain.from_iterable(group)) for group in parts]
        devices = list(itertools.chain.from_iterable(hosts))
        return [devices[first : first + size] for first in range(0, len(devices), size)]

    def __str__(self):
        fields = [
            f"{field.name}={str(getattr(self, field.name)).lower()}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ",".join(fields) or "data=1"


_FLAGS = tuple(field.name for field in dataclasses.fields(Layout) if field.default is False)


def supported_shards(strategy: str) -> tuple[str, ...]:
    """Returns what the replicas of a strategy can divide, as values of `Layout.shard`.

    Args:
        strategy: Name of the strategy, as in `Layout.strategy`.
    """
    return SHARDS if strategy in _WITH_SHARDS else ()


def _check_degree(name, degree):
    if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
        raise ValueError(f"{name}={degree!r}: a degree must be a whole number of at least 1")


def _value(text):
    """Returns the number, boolean, or name in a text."""
    if text.isdecimal():
        return int(text)
    return {"true": True, "false": False}.get(text, text)


def _suggestion(name, names):
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
