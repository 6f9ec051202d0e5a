"""The server's application as a Ray Serve deployment: replicas on the machines of a Ray cluster.

    from ray import serve
    import kdist.serving.ray

    serve.run(kdist.serving.ray.application({"fashion": "/models/fashion"}))
    # curl -d '{"instances": [[…]]}' http://127.0.0.1:8000/v1/models/fashion:predict

Each replica batches, limits and counts as `scripts/serve.py` does, over TensorFlow Serving's REST
interface; gRPC is served by `scripts/serve.py` alone. New versions are picked up by every replica.
`/metrics` and the state of a version are those of the replica that answers; `target_info` in the
metrics says which one it is. Ray's own metrics count the requests of all.

On a cluster every node needs `pip install kdist[ray]` and sees the models under the same path, as
on a shared file system. `serve deploy serve.yaml` starts this, or changes it:

    proxy_location: EveryNode
    http_options:
      host: 127.0.0.1  # 0.0.0.0 is open to all who reach the node
      port: 8000
      request_timeout_s: 60
    applications:
      - name: kdist
        route_prefix: /
        import_path: kdist.serving.ray:build
        args:
          models: {fashion: /models/fashion}
          max_replicas: 8
          num_gpus: 1
        deployments:  # what else Ray can be told
          - name: kdist
            max_replicas_per_node: 1

`serve run kdist.serving.ray:build models='{"fashion": "/models/fashion"}'` is the same by hand.
What a node that dies was computing, and what is sent to it until Ray sees it, is answered with a
5xx: predictions change nothing, so clients should ask again. A node that falls silent, as without
power, answers nothing at all: Ray sees that after about a minute and sends requests to the others
until then, but what the node had taken waits for `request_timeout_s`, and gets a 408.

Only the proxies' address is yours to choose. Nodes and replicas talk to each other through ports
that Ray opens on all interfaces, where code can be run. Start each node with `RAY_AUTH_MODE=token`
and one `RAY_AUTH_TOKEN`: up to Ray 2.60 a cluster has no authentication unless it is told. Tokens
are sent in the clear, so keep the cluster in a network of its own, too.
https://docs.ray.io/en/latest/ray-security/token-auth.html
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from kdist.serving.settings import BatchSettings, Limits, Objective

try:
    import pydantic
    from ray import serve
    from ray.serve.config import BackpressureConfig

    from kdist.serving.ray_replica import Replica
except ImportError as error:
    said = f"kdist.serving.ray needs Ray Serve: pip install kdist[ray] ({error})"
    raise ImportError(said) from error

_NAME = "kdist"
_HEALTH_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """How many replicas there are, and what each does.

    Attributes:
        min_replicas: at least so many.
        max_replicas: at most so many.
        num_cpus: of a replica, which computes with so many threads.
        num_gpus: of a replica.
        target_ongoing_requests: of a replica; with more there will be more replicas. By default
            the rows of a full batch, with which batches are half full and the device is busy.
        autoscaling: more of `ray.serve.config.AutoscalingConfig`, such as
            `{"upscale_delay_s": 10}`.
        settings: of batches; where there is an objective, only the largest batch counts.
        objective: what settings are chosen for while the load changes; None for fixed ones.
        limits: of requests, for each replica; `connections` are requests that are under way.
        newest: versions of a model that are served.
        watch_seconds: between looks for new versions.
        end_seconds: that requests have to end in, once a replica is told to end.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    target_ongoing_requests: float | None = None
    autoscaling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: BatchSettings = dataclasses.field(default_factory=BatchSettings)
    objective: Objective | None = dataclasses.field(default_factory=Objective)
    limits: Limits = dataclasses.field(default_factory=Limits)
    newest: int = 1
    watch_seconds: float = 1.0
    end_seconds: float = 30.0


def application(
    directories: Mapping[str, str | os.PathLike], options: RayOptions | None = None
) -> serve.Application:
    """What `ray.serve.run` takes.

    Args:
        directories: {name: directory of a model's versions}, as the nodes see them.
        options: of replicas and of what they do.

    Raises:
        ValueError: more replicas at least than at most.
        RuntimeError: later, by `ray.serve.run`: replicas do not start, as a directory is not there
            or no model in it loads. `serve status` and the replica's log say why.
    """
    options = options or RayOptions()
    deployment = serve.deployment(
        name=_NAME,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_ongoing_requests
            or options.settings.max_batch,
            **options.autoscaling,
        },
        # Far more than a batch. What is beyond waits in Ray's proxies, then is refused there.
        max_ongoing_requests=options.limits.connections,
        max_queued_requests=options.limits.connections,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=options.end_seconds,
    )(Replica)
    paths = {name: os.path.abspath(directory) for name, directory in directories.items()}
    return deployment.bind(paths, options)


class Arguments(pydantic.BaseModel, extra="forbid"):
    """Of `build`, in `serve.yaml` or on the command line of `serve run`; see `RayOptions`.

    Attributes:
        models: {name: directory of its versions}; on a command line as JSON.
        batch_timeout_us: microseconds that the oldest request of a batch waits for others while
            the device is free; by default it follows the load, for the least mean latency.
        max_batch: rows of a batch at most.
        versions: newest versions of a model that are served.
    """

    models: dict[str, str] | pydantic.Json[dict[str, str]]
    batch_timeout_us: int | None = None
    max_batch: int = 32
    versions: int = 1
    min_replicas: int = 1
    max_replicas: int = 4
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    target_ongoing_requests: float | None = None
    autoscaling: dict[str, Any] = {}


def build(arguments: Arguments) -> serve.Application:
    """`application`, for `import_path: kdist.serving.ray:build`."""
    own = {"models", "batch_timeout_us", "max_batch", "versions"}
    options = RayOptions(
        settings=BatchSettings((arguments.batch_timeout_us or 0) * 1e-6, arguments.max_batch),
        objective=Objective() if arguments.batch_timeout_us is None else None,
        newest=arguments.versions,
        **arguments.model_dump(exclude=own),
    )
    return application(arguments.models, options)
