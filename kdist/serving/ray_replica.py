"""A replica on a Ray cluster. Only in its own process is TensorFlow imported."""

import asyncio
import contextlib
import math

from ray import serve

from kdist.serving.interpreter import prepare_interpreter
from kdist.serving.model_directory import all_needed_devices


@serve.ingress()
class Replica:
    """Has models of its own; Ray calls its methods in their order.

    Args:
        directories: {name: directory of a model's versions}.
        options: `kdist.serving.ray.RayOptions`.

    Raises:
        ValueError: a directory that is not there, or in which no model loads.
    """

    async def __init__(self, directories, options):
        prepare_interpreter()
        self._options = options
        self._models = _models(directories, options)
        await self._models.refresh()
        self._models.check_served()

    def __serve_build_asgi_app__(self):  # what `serve.ingress` looks for
        from kdist.serving.rest import create_application

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
            raise RuntimeError("a model has no version any more, or the replica is ending")


def _models(directories, options):
    devices = all_needed_devices(directories.values())  # at once, if a directory is not there
    import tensorflow as tf

    from kdist.serving.computing import InProcess
    from kdist.serving.models import Models

    # By itself TensorFlow takes all cores of the machine, which other replicas have as well.
    tf.config.threading.set_intra_op_parallelism_threads(max(1, math.ceil(options.num_cpus)))
    computing = InProcess(devices)
    models = Models(
        directories,
        computing,
        settings=options.settings,
        objective=options.objective,
        limits=options.limits,
        newest=options.newest,
    )
    replica = serve.get_replica_context().replica_id.unique_id
    models.metrics.registry.set_target_info({"replica": replica})
    return models
