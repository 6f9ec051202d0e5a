"""What a server can be set to, and what for."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """When a batch is started: once the device is free, and the batch is full or old enough.

    Attributes:
        timeout_seconds: what the oldest request of a batch waits, at most, for others while the
            device is free. 0: a free device takes what there is.
        max_batch: rows of a full batch.

    Raises:
        ValueError: a timeout below zero, or a batch without rows.
    """

    timeout_seconds: float = 0.0
    max_batch: int = 32

    def __post_init__(self):
        if not self.timeout_seconds >= 0 or self.max_batch < 1:
            raise ValueError(
                f"timeout_seconds={self.timeout_seconds}, max_batch={self.max_batch}: a timeout "
                "from 0 on, and a batch of at least one row"
            )

    def __str__(self):
        return f"timeout {self.timeout_seconds * 1e3:g} ms, batches of up to {self.max_batch}"


AIMS = ("latency", "throughput", "device_time")


@dataclasses.dataclass(frozen=True)
class Objective:
    """What the settings are chosen for.

    Attributes:
        aim: `"latency"`, the least mean latency; `"throughput"`, the highest rate of requests that
            could be served within `p99_seconds`; `"device_time"`, the smallest share of the
            device's time, within `p99_seconds` if that is given.
        p99_seconds: a bound on the latency that 99 of 100 requests do not exceed.

    Raises:
        ValueError: an unknown aim, a bound that is not above zero, or `"throughput"` without one.
    """

    aim: str = "latency"
    p99_seconds: float | None = None

    def __post_init__(self):
        if self.aim not in AIMS:
            raise ValueError(f"aim={self.aim!r}: there are {', '.join(AIMS)}")
        if self.p99_seconds is not None and not self.p99_seconds > 0:
            raise ValueError(f"p99_seconds={self.p99_seconds}: it has to be above zero")
        if self.aim == "throughput" and self.p99_seconds is None:
            raise ValueError(
                "the most throughput has no bound without p99_seconds: give one (--p99_ms=50)"
            )


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server takes.

    Attributes:
        body_bytes: of a request.
        all_bodies_bytes: of the requests that are under way, together.
        waiting_rows: of a model, before requests are refused.
        request_seconds: from a request's head to its answer.
        body_seconds: for a client to send its body.
        connections: at a time.
        head_bytes: of a request, besides its body.
        silent_seconds: for a client to send a request's head, and to take some of its answer.

    Raises:
        ValueError: one body is allowed more than all together.
    """

    body_bytes: int = 64 << 20
    all_bodies_bytes: int = 1 << 30
    waiting_rows: int = 1024
    request_seconds: float = 60.0
    body_seconds: float = 20.0
    connections: int = 2048
    head_bytes: int = 64 << 10
    silent_seconds: float = 20.0

    def __post_init__(self):
        if self.all_bodies_bytes < self.body_bytes:
            raise ValueError(
                f"all_bodies_bytes={self.all_bodies_bytes}: a body may have {self.body_bytes} "
                "bytes; give no less for all together"
            )
