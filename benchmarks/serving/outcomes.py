"""Responses and latencies that clients measured."""

import collections
import dataclasses
from collections.abc import Mapping

import numpy as np

RIGHT = "right"
WRONG = "wrong"
PERCENTILES = (50, 90, 99)


@dataclasses.dataclass
class Outcome:
    """Counts and latencies of requests.

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
        """Responses that were not correct, by kind."""
        return {kind: number for kind, number in self.answers.items() if kind != RIGHT}

    @property
    def per_second(self) -> float:
        """Correct responses per second."""
        return self.answers.get(RIGHT, 0) / self.seconds

    @property
    def mean_ms(self) -> float:
        """Mean latency in milliseconds; NaN without responses."""
        return float(np.mean(self.latencies)) * 1e3 if len(self.latencies) else float("nan")

    def percentile_ms(self, percent: float) -> float:
        """Returns a percentile of the latency in milliseconds, by nearest rank.

        NaN without responses.
        """
        if not len(self.latencies):
            return float("nan")
        return float(np.percentile(self.latencies, percent, method="inverted_cdf")) * 1e3

    def summary(self) -> dict:
        """Returns all numbers in a JSON-compatible form; latencies as mean and percentiles."""
        return {
            "seconds": self.seconds,
            "answers": dict(self.answers),
            "per_second": self.per_second,
            "mean_ms": self.mean_ms,
            **{f"p{percent}_ms": self.percentile_ms(percent) for percent in PERCENTILES},
            "client_cores": self.client_cores,
        }


class Tally:
    """Counter of responses while clients run."""

    def __init__(self):
        self.latencies: list[float] = []
        self.answers: collections.Counter[str] = collections.Counter()

    def add(self, kind: str, seconds: float | None = None):
        """Adds a response; `seconds` is the latency of a correct one."""
        self.answers[kind] += 1
        if kind == RIGHT:
            self.latencies.append(seconds)

    def clear(self):
        """Discards all responses of the warm-up."""
        self.latencies.clear()
        self.answers.clear()

    def outcome(self, seconds: float, client_cores: float | None = None) -> Outcome:
        """Returns the outcome of the given number of seconds."""
        return Outcome(seconds, np.array(self.latencies), dict(self.answers), client_cores)
