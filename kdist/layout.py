"""Over how many devices what is divided: data, stages, tensors, branches.

    Layout(data=2, pipeline=2, micro_batches=4)     # two replicas of two stages: four devices
    Layout.parse("data=2,pipeline=2,micro_batches=4")
    Layout(data=2, pipeline=2, between="model")     # each host of two has a stage of both replicas

A replica is on a group of devices, numbered from 0 within the group. Imports no TensorFlow.
"""

import dataclasses
import difflib
import itertools
from collections.abc import Sequence

SCHEDULES = ("1f1b", "gpipe")
BETWEEN = ("data", "model")

_DEGREES = ("data", "tensor", "pipeline", "branch", "micro_batches")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The degrees of parallelism.

    Attributes:
        data: replicas, each with its rows of a batch.
        tensor: devices that share the weights of a layer.
        pipeline: stages, each of which holds layers that follow each other.
        branch: devices that hold branches of a model, which run side by side.
        micro_batches: parts of a replica's rows that follow each other through the stages, so that
            these work at the same time; 1 has one stage work after the other.
        schedule: `"1f1b"` lets a stage go back as soon as it can, and holds the activations of as
            many micro-batches as there are stages; `"gpipe"` goes forward with all of them first.
        between: what is divided over the hosts of a job of several: `"data"` gives each its own
            replicas, as far as they fit into one; `"model"` gives each its part of every replica.
        recompute: a stage keeps of a micro-batch only what it takes from other stages, and computes
            its activations again before it goes back: less memory for up to a third more work.

    Raises:
        ValueError: a degree is no whole number from 1 on, an unknown schedule or division over
            hosts, or degrees that do not go together.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    branch: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    between: str = "data"
    recompute: bool = False

    def __post_init__(self):
        for name in _DEGREES:
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"{name}={degree!r}: a degree is a whole number from 1 on")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r}: there are {' and '.join(SCHEDULES)}")
        if self.between not in BETWEEN:
            raise ValueError(f"between={self.between!r}: there are {' and '.join(BETWEEN)}")
        if self.between == "model" and self.group_size == 1:
            raise ValueError(
                "between=model without a model that is split: give pipeline=2, tensor=2 or "
                "branch=2, or leave between out"
            )
        if self.micro_batches > 1 and self.pipeline == 1:
            raise ValueError(
                f"micro_batches={self.micro_batches} without stages: give pipeline=2 or more, or "
                f"save memory with compile(accumulate={self.micro_batches}) "
                f"(--accumulate={self.micro_batches})"
            )
        self._check_recompute()
        if self.branch > 1 and self.pipeline * self.tensor > 1:
            raise ValueError(
                f"branch={self.branch} goes with data only, not with pipeline={self.pipeline} and "
                f"tensor={self.tensor}: leave branch out, or the others"
            )

    def _check_recompute(self):
        if not isinstance(self.recompute, bool):
            raise ValueError(f"recompute={self.recompute!r}: it is true or false")
        if self.recompute and self.pipeline == 1:
            raise ValueError(
                "recompute without stages: give pipeline=2 or more and micro_batches=2 or more, or "
                "save memory with compile(accumulate=2) (--accumulate=2)"
            )
        if self.recompute and self.micro_batches == 1:
            raise ValueError(
                "recompute with micro_batches=1 saves nothing, as no stage holds more than it goes "
                "back with: give micro_batches=2 or more, or leave recompute out"
            )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The layout that is written as `"data=2,pipeline=2"`; an empty text is one device.

        `recompute` alone is `recompute=true`.

        Raises:
            ValueError: it is written otherwise, says something twice, or is no possible layout.
        """
        given: dict[str, int | str | bool] = {}
        names = [*_DEGREES, "schedule", "between", "recompute"]
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, separator, value = (piece.strip() for piece in part.partition("="))
            if name == "recompute" and not separator:
                separator, value = "=", "true"
            if not separator or name not in names:
                raise ValueError(
                    f"{part!r} in layout {text!r}{_meant(name, names)}: write it as "
                    "data=2,pipeline=2; there are " + ", ".join(names)
                )
            if name in given:
                raise ValueError(f"layout {text!r} says {name} twice; leave one out")
            given[name] = _value(value)
        return cls(**given)  # type: ignore[arg-type]

    @property
    def group_size(self) -> int:
        """Devices of one replica."""
        return self.tensor * self.pipeline * self.branch

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.data * self.group_size

    def groups(self, hosts: Sequence[Sequence[str]]) -> list[list[str]]:
        """The devices of each replica.

        Args:
            hosts: the devices of each host, as many on each.

        Raises:
            ValueError: there are not as many as the layout has, or they cannot be divided so.
        """
        there_are = sum(map(len, hosts))
        if there_are != self.devices:
            names = ", ".join(device for host in hosts for device in host)
            raise ValueError(
                f"{self} is for {self.devices} devices and there are {there_are} ({names}): name "
                "as many, or take another layout"
            )
        size = self.group_size
        if self.between == "model":
            if size % len(hosts):
                raise ValueError(
                    f"{self}: the {size} devices of a replica cannot be divided over {len(hosts)} "
                    "hosts; take another layout, or leave between out"
                )
            part = size // len(hosts)
            parts = [[host[n * part : (n + 1) * part] for host in hosts] for n in range(self.data)]
            return [list(itertools.chain.from_iterable(group)) for group in parts]
        devices = list(itertools.chain.from_iterable(hosts))
        return [devices[first : first + size] for first in range(0, len(devices), size)]

    def __str__(self):
        said = [
            f"{field.name}={str(getattr(self, field.name)).lower()}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ",".join(said) or "data=1"


def _value(text):
    """What is written: a number, true, false or a name."""
    if text.isdecimal():
        return int(text)
    return {"true": True, "false": False}.get(text, text)


def _meant(name, names):
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
