"""REST routes of the Open Inference Protocol.

    POST /v2/models/NAME[/versions/N]/infer
    GET  /v2, /v2/health/live, /v2/health/ready, /v2/models/NAME[/versions/N][/ready]

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

import orjson
from starlette.responses import Response
from starlette.routing import Route

import kdist
from kdist.serving.core.errors import RequestError
from kdist.serving.core.requests import parse_version
from kdist.serving.engine.models import Models
from kdist.serving.protocol.open_inference import bodies
from kdist.serving.protocol.prediction import Prediction

# An extension of Triton, in which tensors follow the JSON as bytes.
_BINARY_HEADER = b"inference-header-content-length"


def inference_routes(models: Models) -> list[Route]:
    """Returns the routes of the protocol."""
    infer, info = _Inference(models), _Information(models)
    routes = []
    for base in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(base + "/infer", infer, methods=None),
            Route(base + "/ready", info.model_ready, methods=["GET"]),
            Route(base, info.metadata, methods=["GET"]),
        ]
    return [
        *routes,
        Route("/v2/health/live", info.live, methods=["GET"]),
        Route("/v2/health/ready", info.ready, methods=["GET"]),
        Route("/v2", info.server, methods=["GET"]),
        Route("/v2/", info.server, methods=["GET"]),
    ]


class _Inference(Prediction):
    """Predictions in the protocol's form."""

    def target(self, scope):
        if any(name == _BINARY_HEADER for name, _ in scope["headers"]):
            raise RequestError(
                "encoding", "binary tensors are not supported over REST: send JSON, or use gRPC"
            )
        return super().target(scope)

    def parse(self, body, version):
        return bodies.parse_request(body, version.signature)

    def format(self, outputs, request, version):
        return bodies.format_response(outputs, request, version.key)


class _Information:
    """Routes that report health and metadata."""

    def __init__(self, models):
        self._models = models

    async def server(self, request):
        return _json({"name": "kdist", "version": kdist.__version__, "extensions": []})

    async def live(self, request):
        return _json({"live": True})

    async def ready(self, request):
        # The specification calls the entry "live", and the documentation of KServe "ready".
        ready = self._models.ready
        return _json({"live": True, "ready": ready}, ready)

    async def model_ready(self, request):
        name = request.path_params["name"]
        ready = self._models.is_ready(name, parse_version(request.path_params.get("version")))
        return _json({"name": name, "ready": ready}, ready)

    async def metadata(self, request):
        model = self._models.model(request.path_params["name"])
        version = model.version(parse_version(request.path_params.get("version")))
        return _json(bodies.metadata(version, model.ready))


def _json(document, ready=True):
    return Response(orjson.dumps(document), 200 if ready else 503, media_type="application/json")
