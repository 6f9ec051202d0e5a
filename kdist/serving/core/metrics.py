"""Prometheus metrics of a model server."""

import contextlib
import time
from collections.abc import Callable

import prometheus_client as prometheus

_SECONDS = [0.0005 * 2**n for n in range(16)]  # to 16 s
_ROWS = [2**n for n in range(11)]


class Metrics:
    """Counters, histograms, and gauges for all models of a server.

    The `registry` holds these metrics only, so that one process can run several servers.
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
            "Time from the head of a served request to its response.",
            ["model", "protocol"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._rejections = prometheus.Counter(
            "kdist_serving_rejections",
            "Requests and connections that were rejected before they were read, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._batch_rows = prometheus.Histogram(
            "kdist_serving_batch_rows",
            "Rows of requests in a batch, without padding.",
            ["model", "version"],
            buckets=_ROWS,
            registry=self.registry,
        )
        self._batch_seconds = prometheus.Histogram(
            "kdist_serving_batch_seconds",
            "Time that the device computed a batch.",
            ["model", "version"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._children = {}

    def gauge(self, name: str, text: str, read: Callable[[], float], **labels: str) -> None:
        """Registers a gauge that is read on each scrape; replaces one with the same labels."""
        key = f"kdist_serving_{name}"
        if key not in self._children:
            self._children[key] = prometheus.Gauge(key, text, list(labels), registry=self.registry)
        gauge = self._children[key]
        (gauge.labels(**labels) if labels else gauge).set_function(read)

    def forget_version(self, model: str, version: int) -> None:
        """Removes all metrics of a version that is no longer served."""
        gauges = [each for each in self._children.values() if isinstance(each, prometheus.Gauge)]
        for metric in [self._batch_rows, self._batch_seconds, *gauges]:
            # Some gauges describe the server, and have no labels.
            with contextlib.suppress(KeyError, ValueError):
                metric.remove(model, str(version))

    def record_request(self, model: str, protocol: str, status: str, since: float) -> None:
        """Counts a request, and records its latency if its `status` is "200" or "OK".

        The name of a `model` that does not exist must be empty, since clients can make up names.
        `since` is the arrival time by `time.perf_counter()`.
        """
        self._child(self._requests, model, protocol, status).inc()
        if status in ("200", "OK"):
            self._child(self._seconds, model, protocol).observe(time.perf_counter() - since)

    def record_rejection(self, reason: str) -> None:
        """Counts a request or connection that was rejected before it was read."""
        self._child(self._rejections, reason).inc()

    def batch_observer(self, model: str, version: int) -> Callable[[int, int, float], None]:
        """Returns a callback for `Batcher(on_batch=…)`."""
        batch_rows = self._batch_rows.labels(model, str(version))
        batch_seconds = self._batch_seconds.labels(model, str(version))

        def observe(rows, size, seconds):
            batch_rows.observe(rows)
            batch_seconds.observe(seconds)

        return observe

    def text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return prometheus.generate_latest(self.registry)

    def _child(self, metric, *labels):
        """Returns a labeled metric; cached because the lookup is slower than counting."""
        key = (id(metric), *labels)
        if key not in self._children:
            self._children[key] = metric.labels(*labels)
        return self._children[key]
