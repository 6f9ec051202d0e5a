"""What a server counts and times, for Prometheus."""

import contextlib
import time
from collections.abc import Callable

import prometheus_client as prometheus

_SECONDS = [0.0005 * 2**n for n in range(16)]  # to 16 s
_ROWS = [2**n for n in range(11)]


class Metrics:
    """Of all models of a server.

    Attributes:
        registry: of these metrics alone, so that several servers fit in one process.
    """

    def __init__(self):
        self.registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            "kdist_serving_requests",
            "Requests that were answered, by HTTP or gRPC status.",
            ["model", "protocol", "status"],
            registry=self.registry,
        )
        self._seconds = prometheus.Histogram(
            "kdist_serving_request_seconds",
            "From a request's head to its answer; of those that were served.",
            ["model", "protocol"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._batch_rows = prometheus.Histogram(
            "kdist_serving_batch_rows",
            "Rows of requests in a batch, without those that fill it up.",
            ["model", "version"],
            buckets=_ROWS,
            registry=self.registry,
        )
        self._batch_seconds = prometheus.Histogram(
            "kdist_serving_batch_seconds",
            "What a batch took the device.",
            ["model", "version"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._children = {}

    def gauge(self, name: str, text: str, read: Callable[[], float], **labels: str) -> None:
        """A number that is read when it is asked for; one of the same labels is replaced."""
        key = f"kdist_serving_{name}"
        if key not in self._children:
            self._children[key] = prometheus.Gauge(key, text, list(labels), registry=self.registry)
        gauge = self._children[key]
        (gauge.labels(**labels) if labels else gauge).set_function(read)

    def forget_version(self, model: str, version: int) -> None:
        """Shows nothing of it any more: versions come and go as long as a server runs."""
        gauges = [each for each in self._children.values() if isinstance(each, prometheus.Gauge)]
        for metric in [self._batch_rows, self._batch_seconds, *gauges]:
            with contextlib.suppress(KeyError):
                metric.remove(model, str(version))

    def answered(self, model: str, protocol: str, status: str, since: float) -> None:
        """A request was.

        Args:
            model: its name; empty for one that there is not, as a client may make up any.
            protocol: "rest" or "grpc".
            status: such as "200" or "OK".
            since: by `time.perf_counter()`, when it came.
        """
        self._child(self._requests, model, protocol, status).inc()
        if status in ("200", "OK"):
            self._child(self._seconds, model, protocol).observe(time.perf_counter() - since)

    def batch_observer(self, model: str, version: int) -> Callable[[int, int, float], None]:
        """For `Batcher(on_batch=…)`."""
        rows_of = self._batch_rows.labels(model, str(version))
        seconds_of = self._batch_seconds.labels(model, str(version))

        def observe(rows, size, seconds):
            rows_of.observe(rows)
            seconds_of.observe(seconds)

        return observe

    def text(self) -> bytes:
        """In Prometheus's format."""
        return prometheus.generate_latest(self.registry)

    def _child(self, metric, *labels):
        """Kept, as finding it takes longer than counting."""
        key = (id(metric), *labels)
        if key not in self._children:
            self._children[key] = metric.labels(*labels)
        return self._children[key]
