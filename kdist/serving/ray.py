"""Model server as a Ray Serve deployment, with replicas on the nodes of a Ray cluster.

    from ray import serve
    import kdist.serving.ray

    serve.run(kdist.serving.ray.application({"fashion": "/models/fashion"}))
    # curl -d '{"instances": [[…]]}' http://127.0.0.1:8000/v1/models/fashion:predict

Each replica serves TensorFlow Serving's REST API with the batching, limits, and metrics of
`kdist serve`. Only `kdist serve` serves gRPC. Every replica loads new versions.
`/metrics` and the state of a version describe the replica that responds; `target_info` in the
metrics names it. Ray's own metrics count the requests of all replicas.

Every node of the cluster needs `pip install kdist[ray]`, and must see the models under the same
path, such as on a shared file system. `serve deploy serve.yaml` starts or updates the application:

    proxy_location: EveryNode
    http_options:
      host: 127.0.0.1  # 0.0.0.0 is open to everyone who can reach the node
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
        deployments:  # further options of Ray
          - name: kdist
            max_replicas_per_node: 1

`serve run kdist.serving.ray:build models='{"fashion": "/models/fashion"}'` does the same by hand.

Failures: requests on a node that dies, and requests sent to it until Ray notices, fail with a 5xx
status. Predictions have no side effects, so clients should retry. A node that becomes unreachable,
such as by a power failure, does not respond. Ray notices that after about a minute. Meanwhile it
sends new requests to other nodes, but those that the node had accepted wait for
`request_timeout_s` and fail with a 408.

Security: you can only choose the address of the proxies. Nodes and replicas communicate through
ports that Ray opens on all interfaces and that can run code. Start each node with
`RAY_AUTH_MODE=token` and a shared `RAY_AUTH_TOKEN`: up to Ray 2.60, a cluster has no authentication
by default. Tokens are sent unencrypted, so also isolate the network of the cluster.
https://docs.ray.io/en/latest/ray-security/token-auth.html
"""

import asyncio
import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from kdist.serving.core.model_directory import all_needed_devices
from kdist.serving.core.settings import BatchSettings, Objective, ServerLimits

try:
    import pydantic
    from ray import serve
    from ray.serve.config import BackpressureConfig
except ImportError as error:
    message = f"kdist.serving.ray needs Ray Serve: pip install kdist[ray] ({error})"
    raise ImportError(message) from error

_NAME = "kdist"
_HEALTH_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """Number of replicas, and options of each.

    Attributes:
        min_replicas: smallest number of replicas. Defaults to 1.
        max_replicas: largest number of replicas. Defaults to 4.
        num_cpus: cores of a replica, and threads that it computes with. Defaults to 1.
        num_gpus: GPUs of a replica. Defaults to 0.
        target_ongoing_requests: requests per replica above which Ray adds replicas. Defaults to
            `settings.max_batch`: batches are then half full and the device is busy.
        autoscaling: further options of `ray.serve.config.AutoscalingConfig`, such as
            `{"upscale_delay_s": 10}`.
        settings: batch settings; with an objective, only `max_batch` is used.
        objective: goal for adapting the settings to the load; None keeps them fixed.
        limits: limits of each replica; `connections` limits the requests in flight.
        newest: number of newest versions of a model to serve. Defaults to 1.
        watch_seconds: seconds between checks for new versions. Defaults to 1.
        end_seconds: seconds for requests to finish when a replica is stopped. Defaults to 30.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    target_ongoing_requests: float | None = None
    autoscaling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: BatchSettings = dataclasses.field(default_factory=BatchSettings)
    objective: Objective | None = dataclasses.field(default_factory=Objective)
    limits: ServerLimits = dataclasses.field(default_factory=ServerLimits)
    newest: int = 1
    watch_seconds: float = 1.0
    end_seconds: float = 30.0


@serve.ingress()
class Replica:
    """One replica with its own models. Imports TensorFlow, but only in its own process.

    Raises ValueError if a directory does not exist, or no model in it loads.
    """

    async def __init__(self, directories, options):
        self._options = options
        self._models = _create_models(directories, options)
        from kdist.serving.engine.in_process import prepare_interpreter

        prepare_interpreter()  # after TensorFlow is imported, before versions are loaded
        await self._models.refresh()
        self._models.check_served()

    def __serve_build_asgi_app__(self):  # called by `serve.ingress`
        from kdist.serving.protocol.rest import create_application

        return create_application(self._models, self._serving)

    @contextlib.asynccontextmanager
    async def _serving(self, _):
        watching = asyncio.create_task(self._models.watch(self._options.watch_seconds))
        try:
            yield
        finally:
            watching.cancel()
            await self._models.close(self._options.end_seconds)

    async def check_health(self):
        """Raises RuntimeError if Ray should replace this replica."""
        if not self._models.ready:
            raise RuntimeError("a model has no loaded version, or the replica is shutting down")


def _create_models(directories, options):
    # First, so that a missing directory is an error before TensorFlow is imported.
    devices = all_needed_devices(directories.values(), options.newest)
    import tensorflow as tf

    from kdist.serving.engine.in_process import InProcess
    from kdist.serving.engine.models import Models

    # By default TensorFlow uses all cores of the node, which the replicas share.
    tf.config.threading.set_intra_op_parallelism_threads(max(1, math.ceil(options.num_cpus)))
    models = Models(
        directories,
        InProcess(devices),
        settings=options.settings,
        objective=options.objective,
        limits=options.limits,
        newest=options.newest,
    )
    replica = serve.get_replica_context().replica_id.unique_id
    models.metrics.registry.set_target_info({"replica": replica})
    return models


def application(
    directories: Mapping[str, str | os.PathLike], options: RayOptions | None = None
) -> serve.Application:
    """Returns the application for `ray.serve.run`.

    Args:
        directories: {name: directory of the model's versions}, as the nodes see them.
        options: options of the replicas. Defaults to `RayOptions()`.

    Raises:
        ValueError: `min_replicas` exceeds `max_replicas`.
        RuntimeError: raised later by `ray.serve.run` if replicas fail to start, because a directory
            does not exist or no model in it loads. `serve status` and the log of the replica show
            the reason.
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
        # Far more than a batch. Further requests wait in Ray's proxies, which then reject them.
        max_ongoing_requests=options.limits.connections,
        max_queued_requests=options.limits.connections,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=options.end_seconds,
    )(Replica)
    paths = {name: os.path.abspath(directory) for name, directory in directories.items()}
    return deployment.bind(paths, options)


class BuildArguments(pydantic.BaseModel, extra="forbid"):
    """Arguments of `build`, in `serve.yaml` or on the command line of `serve run`.

    See `RayOptions` for the others.

    Attributes:
        models: {name: directory of the model's versions}; JSON on a command line.
        batch_timeout_us: microseconds that the oldest request of a batch waits for others while
            the device is free. By default it follows the load, for the lowest mean latency.
        max_batch: rows of a full batch. Defaults to 32.
        versions: number of newest versions of a model to serve. Defaults to 1.
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


def build(arguments: BuildArguments) -> serve.Application:
    """Returns the application for `import_path: kdist.serving.ray:build`."""
    own = {"models", "batch_timeout_us", "max_batch", "versions"}
    options = RayOptions(
        settings=BatchSettings((arguments.batch_timeout_us or 0) * 1e-6, arguments.max_batch),
        objective=Objective() if arguments.batch_timeout_us is None else None,
        newest=arguments.versions,
        **arguments.model_dump(exclude=own),
    )
    return application(arguments.models, options)
