"""Our stack without batching: python -m benchmarks.serving.rivals.unbatched DIRECTORY PORT.

One process, uvicorn, each request computed by itself as it comes. The collector of garbage is told
to leave what was loaded alone, as our server does.
"""

import gc
import sys

import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.serving.rivals.saved_model import load


def _application(predict):
    async def answer(request: Request) -> Response:
        rows = np.asarray(orjson.loads(await request.body())["instances"], np.float32)
        body = orjson.dumps({"predictions": predict(rows)}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(body, media_type="application/json")

    async def ready(request: Request) -> Response:
        return Response()

    return Starlette(routes=[Route("/predict", answer, methods=["POST"]), Route("/readyz", ready)])


def _main(directory, port):
    application = _application(load(directory))
    gc.collect()
    gc.freeze()
    uvicorn.run(application, host="127.0.0.1", port=int(port), log_level="error")


if __name__ == "__main__":
    _main(*sys.argv[1:])
