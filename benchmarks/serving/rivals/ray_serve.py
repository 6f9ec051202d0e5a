"""Ray Serve: python -m benchmarks.serving.rivals.ray_serve DIRECTORY PORT WAIT_SECONDS MAX_BATCH.

One replica with `@serve.batch`, as its guide to dynamic request batching has it.
"""

import signal
import sys

import numpy as np
import orjson
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.serving.rivals.saved_model import load


def _deployment(wait_seconds, max_batch):
    # With its default of 5 requests under way, batches would never be full.
    @serve.deployment(max_ongoing_requests=8 * max_batch)
    class Model:
        def __init__(self, directory):
            self._predict = load(directory)

        @serve.batch(max_batch_size=max_batch, batch_wait_timeout_s=wait_seconds)
        async def _batch(self, rows: list):
            return list(self._predict(np.stack(rows)))

        async def __call__(self, request: Request) -> Response:
            if request.method == "GET":
                return Response()
            instances = orjson.loads(await request.body())["instances"]
            row = await self._batch(np.asarray(instances[0], np.float32))
            body = orjson.dumps({"predictions": row[None]}, option=orjson.OPT_SERIALIZE_NUMPY)
            return Response(body, media_type="application/json")

    return Model


def _main(directory, port, wait_seconds, max_batch):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="error")
    options = {"host": "127.0.0.1", "port": int(port)}
    serve.start(http_options=options, logging_config={"enable_access_log": False})
    model = _deployment(float(wait_seconds), int(max_batch))
    try:
        serve.run(model.bind(directory))
        while True:
            signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    _main(*sys.argv[1:])
