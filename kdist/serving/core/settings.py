"""Settings, objectives, and limits of a model server."""

import dataclasses

# Environment variable that allows every operation, if it is "1". Set it for models whose authors
# you trust as you trust programs that you run.
TRUST_MODELS = "KDIST_TRUST_MODELS"


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """Conditions under which the server starts a batch.

    A batch starts once a device is free and either the batch is full or its oldest request has
    waited for the timeout.

    Example:

        >>> str(BatchSettings(timeout_seconds=0.002, max_batch=32))
        'timeout 2 ms, batches of up to 32'

    Attributes:
        timeout_seconds: longest time in seconds that the oldest request waits for others while a
            device is free. Defaults to 0: a free device takes the requests that are queued.
        max_batch: rows of a full batch. Defaults to 32.

    Raises:
        ValueError: the timeout is negative, or the batch has no rows.
    """

    timeout_seconds: float = 0.0
    max_batch: int = 32

    def __post_init__(self):
        if not self.timeout_seconds >= 0 or self.max_batch < 1:
            raise ValueError(
                f"timeout_seconds={self.timeout_seconds}, max_batch={self.max_batch}: the timeout "
                "must not be negative, and a batch needs at least one row"
            )

    def __str__(self):
        return f"timeout {self.timeout_seconds * 1e3:g} ms, batches of up to {self.max_batch}"


def padded_sizes(max_batch: int) -> list[int]:
    """Returns the sizes that batches are padded to: powers of two, then `max_batch`."""
    return [*(1 << n for n in range((max_batch - 1).bit_length())), max_batch]


AIMS = ("latency", "throughput", "device_time")


@dataclasses.dataclass(frozen=True)
class Objective:
    """Goal that batch settings are chosen for.

    Example:

        >>> Objective("device_time", p99_seconds=0.05).aim
        'device_time'

    Attributes:
        aim: `"latency"` minimizes the mean latency. `"throughput"` maximizes the request rate that
            could be served within `p99_seconds`. `"device_time"` minimizes the fraction of time
            that the device computes, within `p99_seconds` if it is given. Defaults to `"latency"`.
        p99_seconds: upper bound in seconds on the 99th percentile of the latency. Defaults to no
            bound.

    Raises:
        ValueError: the aim is unknown, the bound is not positive, or `"throughput"` has no bound.
    """

    aim: str = "latency"
    p99_seconds: float | None = None

    def __post_init__(self):
        if self.aim not in AIMS:
            raise ValueError(f"aim={self.aim!r}: choose one of {', '.join(AIMS)}")
        if self.p99_seconds is not None and not self.p99_seconds > 0:
            raise ValueError(f"p99_seconds={self.p99_seconds}: it must be above zero")
        if self.aim == "throughput" and self.p99_seconds is None:
            raise ValueError(
                "the aim 'throughput' has no bound without p99_seconds: give one (--p99_ms=50)"
            )


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Limits on requests and connections.

    Example:

        limits = kdist.serving.ServerLimits(body_bytes=1 << 20, request_seconds=5.0)
        kdist.serving.run(kdist.serving.ServerOptions({"fashion": "models/fashion"}, limits=limits))

    Attributes:
        body_bytes: bytes of one request body. Defaults to 64 MiB.
        all_bodies_bytes: bytes of all request bodies in flight, and of all gRPC messages that are
            being received. Defaults to 1 GiB.
        waiting_rows: rows in the queue of a model before requests are rejected. Defaults to 1,024.
        request_seconds: seconds from the head of a request to its response. Defaults to 60.
        body_seconds: seconds that a client may take to send a body. Defaults to 20.
        connections: concurrent connections over REST, and as many over gRPC. Defaults to 2,048, or
            as many as there are file descriptors for.
        head_bytes: bytes of a request without its body. Defaults to 64 KiB.
        silent_seconds: seconds that a client may take to send the head of a request, or to read
            some of its response. Defaults to 20.
        memory_bytes: bytes of memory of the server and its workers above which requests are
            rejected; 0 is no limit. Defaults to 90 % of the memory of the container or machine.
        load_seconds: seconds that a version may take to load. Defaults to 600.

    Raises:
        ValueError: one body may be larger than all together, or a value is negative.
    """

    body_bytes: int = 64 << 20
    all_bodies_bytes: int = 1 << 30
    waiting_rows: int = 1024
    request_seconds: float = 60.0
    body_seconds: float = 20.0
    connections: int = 2048
    head_bytes: int = 64 << 10
    silent_seconds: float = 20.0
    memory_bytes: int | None = None
    load_seconds: float = 600.0

    def __post_init__(self):
        if self.all_bodies_bytes < self.body_bytes:
            raise ValueError(
                f"all_bodies_bytes={self.all_bodies_bytes}: a body may have {self.body_bytes} "
                "bytes; the limit for all bodies must not be lower"
            )
        if (self.memory_bytes or 0) < 0 or not self.load_seconds > 0:
            raise ValueError(
                f"memory_bytes={self.memory_bytes}, load_seconds={self.load_seconds}: give a limit "
                "of memory that is not negative (0 for none), and a time above zero"
            )
