"""What clients saw of a server."""

import collections
import dataclasses
from collections.abc import Mapping

import numpy as np

RIGHT = "right"
WRONG = "wrong"
PERCENTILES = (50, 90, 99)


@dataclasses.dataclass
class Outcome:
    """Counts and times of requests.

    Attributes:
        seconds: in which they were sent.
        latencies: seconds that each right answer took, (answers,); in an open loop from the moment
            at which the request was due, so that a client that lags hides nothing.
        answers: how many of each kind: "right", "wrong" for a prediction of another example,
            "timeout", "disconnected", "unsent" for want of connections, or a status such as "429".
        client_cores: cores that the clients took of the machine; None if unknown.
    """

    seconds: float
    latencies: np.ndarray
    answers: Mapping[str, int]
    client_cores: float | None = None

    @property
    def errors(self) -> dict[str, int]:
        """All that is no right answer, by kind."""
        return {kind: number for kind, number in self.answers.items() if kind != RIGHT}

    @property
    def per_second(self) -> float:
        """Right answers a second."""
        return self.answers.get(RIGHT, 0) / self.seconds

    @property
    def mean_ms(self) -> float:
        """Mean latency in milliseconds; NaN if nothing was answered."""
        return float(np.mean(self.latencies)) * 1e3 if len(self.latencies) else float("nan")

    def percentile_ms(self, percent: float) -> float:
        """A latency in milliseconds that `percent` % of the answers do not exceed, by nearest rank.

        NaN if nothing was answered.
        """
        if not len(self.latencies):
            return float("nan")
        return float(np.percentile(self.latencies, percent, method="inverted_cdf")) * 1e3

    def summary(self) -> dict:
        """All figures as JSON can hold them; latencies only as mean and percentiles."""
        return {
            "seconds": self.seconds,
            "answers": dict(self.answers),
            "per_second": self.per_second,
            "mean_ms": self.mean_ms,
            **{f"p{percent}_ms": self.percentile_ms(percent) for percent in PERCENTILES},
            "client_cores": self.client_cores,
        }


class Tally:
    """Gathers answers while clients run."""

    def __init__(self):
        self.latencies: list[float] = []
        self.answers: collections.Counter[str] = collections.Counter()

    def add(self, kind: str, seconds: float | None = None):
        """One answer; `seconds` is the latency of a right one."""
        self.answers[kind] += 1
        if kind == RIGHT:
            self.latencies.append(seconds)

    def clear(self):
        """Forgets all so far: the server was warming up."""
        self.latencies.clear()
        self.answers.clear()

    def outcome(self, seconds: float, client_cores: float | None = None) -> Outcome:
        """What was gathered in so many seconds."""
        return Outcome(seconds, np.array(self.latencies), dict(self.answers), client_cores)
