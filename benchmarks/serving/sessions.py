"""Measures all servers under the same loads, in turns."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

from benchmarks.serving import client
from benchmarks.serving.contenders import Contender, Options
from benchmarks.serving.loads import Limits
from benchmarks.serving.models import INPUT_NAME
from benchmarks.serving.servers import ROOT, Server


@dataclasses.dataclass(frozen=True)
class Load:
    """Load of a server.

    Attributes:
        clients: number of clients of a closed loop, or
        rate: rate of an open loop, in requests per second.
    """

    clients: int | None = None
    rate: float | None = None

    def __str__(self):
        if self.rate:
            return f"{self.rate:g} requests a second, Poisson"
        return f"{self.clients} client{'s' if self.clients != 1 else ''}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Server that takes part in a session.

    Attributes:
        contender: the contender.
        python: interpreter that runs it.
        setting: one of the contender's settings.
    """

    contender: Contender
    python: str
    setting: str

    @property
    def title(self) -> str:
        return self.contender.said(self.setting)


@dataclasses.dataclass(frozen=True)
class Served:
    """Model to serve, and its examples.

    Attributes:
        name: name of the model.
        directory: directory of its versions.
        examples: file that `Examples.save` wrote.
    """

    name: str
    directory: pathlib.Path
    examples: pathlib.Path


@dataclasses.dataclass
class Measured:
    """Measurements of one server under one load, one value per round.

    Attributes:
        entry: the server.
        outcomes: `Outcome.summary` of each round.
        memory: resident bytes after the load.
    """

    entry: Entry
    outcomes: list[dict] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)

    def values(self, key: str) -> list[float]:
        """Returns one measure in all rounds."""
        return [outcome[key] for outcome in self.outcomes]


class Session:
    """Session that measures servers with one model.

    Args:
        served: the model.
        options: options of all servers.
        cores: threads that TensorFlow computes with.
        limits: limits of each load.
        start_seconds: time limit for the start of a server.
    """

    def __init__(
        self,
        served: Served,
        options: Options,
        cores: int,
        limits: Limits,
        start_seconds: float = 120.0,
    ):
        self._served, self._options, self._cores = served, options, cores
        self._limits, self._start_seconds = limits, start_seconds

    def best_settings(
        self,
        contenders: Mapping[Contender, str],
        load: Load,
        seconds: float,
        say: Callable[[str], None],
    ) -> list[Entry]:
        """Returns each contender with the setting that answers the most requests."""
        limits = dataclasses.replace(self._limits, seconds=seconds)
        entries = []
        for contender, python in contenders.items():
            tried = {}
            for setting in contender.settings:
                entry = Entry(contender, python, setting)
                if len(contender.settings) > 1:
                    ((outcome, _),) = self._turn(entry, [load], limits)
                    tried[setting] = outcome["per_second"]
                    say(f"{entry.title}: {tried[setting]:.0f} requests/s in a trial")
                else:
                    tried[setting] = 0.0
            entries.append(Entry(contender, python, max(tried, key=tried.get)))
        return entries

    def measure(
        self,
        entries: Sequence[Entry],
        loads: Sequence[Load],
        rounds: int,
        say: Callable[[str], None],
    ) -> dict[Load, list[Measured]]:
        """Measures all servers under all loads.

        A round starts every server once, so that a slow phase of the machine affects all of them.
        Each round begins with another server.
        """
        measured = {load: [Measured(entry) for entry in entries] for load in loads}
        for number in range(rounds):
            for place in range(len(entries)):
                index = (place + number) % len(entries)
                say(f"round {number + 1} of {rounds}: {entries[index].title}")
                turn = self._turn(entries[index], loads, self._limits)
                for load, (outcome, memory) in zip(loads, turn, strict=True):
                    measured[load][index].outcomes.append(outcome)
                    measured[load][index].memory.append(memory)
        return measured

    def _turn(self, entry, loads, limits):
        contender = entry.contender
        command = contender.command(
            entry.python, entry.setting, self._served.directory, self._options
        )
        with self._started(command) as server:
            return [
                (client.run(self._order(contender, server, load, limits), ROOT), server.memory())
                for load in loads
            ]

    def _started(self, command):
        try:
            return Server(command, self._cores, self._start_seconds)
        except RuntimeError:  # of a whole session, one start may fail
            return Server(command, self._cores, self._start_seconds)

    def _order(self, contender, server, load, limits):
        return client.Order(
            examples=str(self._served.examples),
            port=server.grpc_port if contender.dialect == "grpc" else server.port,
            path=contender.path.format(model=self._served.name),
            dialect=contender.dialect,
            limits=dataclasses.asdict(limits),
            clients=load.clients,
            rate=load.rate,
            model=self._served.name,
            input_name=INPUT_NAME,
        )
