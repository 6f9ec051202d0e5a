"""TensorFlow Serving's REST API as an ASGI application.

    application = create_application(models)
    # POST /v1/models/NAME[/versions/N]:predict
    # GET  /v1/models/NAME[/versions/N][/metadata], /v1/models, /healthz, /readyz, /metrics

https://www.tensorflow.org/tfx/serving/api_rest. The application also serves the Open Inference
Protocol below /v2, and what a hosting platform asks for.
"""

import orjson
from google.protobuf import json_format
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from kdist.serving.core.errors import RequestError
from kdist.serving.core.requests import parse_version
from kdist.serving.engine.models import Models
from kdist.serving.platforms import Platform
from kdist.serving.protocol.open_inference.routes import inference_routes
from kdist.serving.protocol.platform_routes import platform_routes
from kdist.serving.protocol.prediction import Prediction, error_body


def create_application(
    models: Models, lifespan=None, platform: Platform | None = None
) -> Starlette:
    """Returns the application that serves the models, with Starlette's `lifespan` context.

    It has the routes of the `platform` as well.
    """
    predict, info = Prediction(models), _Information(models, platform)
    # First, since Vertex AI may be told to send predictions to a path of TensorFlow Serving.
    routes = platform_routes(models, platform, info.readiness) if platform else []
    for base in ("/v1/models/{name}", "/v1/models/{name}/versions/{version}"):
        routes += [
            Route(base + ":predict", predict, methods=None),
            Route(base + "/metadata", info.metadata, methods=["GET"]),
            Route(base, info.status, methods=["GET"]),
        ]
    routes += [
        Route("/v1/models", info.names, methods=["GET"]),
        Route("/healthz", info.health, methods=["GET"]),
        Route("/readyz", info.readiness, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        *inference_routes(models),
    ]
    handlers = {RequestError: _handle_request_error, HTTPException: _handle_http_error}
    application = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    # The redirection would lead to whatever host the client has named.
    application.router.redirect_slashes = False
    return application


class _Information:
    """Routes that report names, states, metadata, health, and metrics."""

    def __init__(self, models, platform):
        self._models = models
        self._is_kserve = platform is not None and platform.name == "kserve"

    async def names(self, request):
        return _json({"models": self._models.names})

    async def status(self, request):
        model = self._models.model(request.path_params["name"])
        states = model.states_of(parse_version(request.path_params.get("version")))
        status = [_state(n, *states[n]) for n in sorted(states)]
        document = {"model_version_status": status}
        if self._is_kserve:  # clients of TensorFlow Serving may not accept further entries
            document |= {"name": model.name, "ready": self._models.is_ready(model.name)}
        return _json(document)

    async def metadata(self, request):
        model = self._models.model(request.path_params["name"])
        version = model.version(parse_version(request.path_params.get("version")))
        spec = {"name": model.name, "signature_name": "", "version": str(version.key.version)}
        signatures = json_format.MessageToDict(
            version.signature_map(),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        return _json({"model_spec": spec, "metadata": {"signature_def": signatures}})

    async def health(self, request):
        return Response("ok\n", media_type="text/plain")

    async def readiness(self, request):
        ready = self._models.ready
        return Response("ready\n" if ready else "not ready\n", 200 if ready else 503)

    async def metrics(self, request):
        return Response(self._models.metrics.text(), media_type="text/plain; version=0.0.4")


def _state(number, state, error):
    status = {"error_code": "UNKNOWN" if error else "OK", "error_message": error}
    return {"version": str(number), "state": state, "status": status}


def _json(document):
    return Response(orjson.dumps(document), media_type="application/json")


async def _handle_request_error(request, error):
    return Response(error_body(str(error)), error.http_status, media_type="application/json")


async def _handle_http_error(request, error):
    text, path = error.detail, request.url.path[:500]
    if error.status_code == 404:
        text = f"{path} does not exist; predictions are at /v1/models/NAME[/versions/N]:predict"
    if error.status_code == 405:
        text = f"{path} does not support {request.method}; predictions are POST …:predict"
    return Response(error_body(text), error.status_code, media_type="application/json")
