"""TensorFlow Serving's REST API as an ASGI application.

    application = create_application(models)
    # POST /v1/models/NAME[/versions/N]:predict
    # GET  /v1/models/NAME[/versions/N][/metadata], /v1/models, /healthz, /readyz, /metrics

https://www.tensorflow.org/tfx/serving/api_rest. The application also serves the Open Inference
Protocol below /v2, and what a hosting platform asks for (`kdist.serving.platforms`):

    SageMaker:  GET /ping, POST /invocations
    Vertex AI:  GET $AIP_HEALTH_ROUTE, POST $AIP_PREDICT_ROUTE
"""

import re

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
from kdist.serving.protocol import json_bodies
from kdist.serving.protocol.open_inference.routes import inference_routes
from kdist.serving.protocol.prediction import Prediction, error_body

_JSON, _JSON_LINES = "application/json", ("application/jsonlines", "application/jsons")
_ATTRIBUTES_HEADER = b"x-amzn-sagemaker-custom-attributes"
_ATTRIBUTE = re.compile(r"(tfs-[a-z-]+)=([^,\s]+)")
_TENSORFLOW_JSON = re.compile(rb'"(?:instances|inputs)"\s*:')
_ROWS = re.compile(rb"\s*\[\s*\[")


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


def platform_routes(models: Models, platform: Platform, readiness) -> list[Route]:
    """Returns the routes of a platform, of which `readiness` answers that for health checks."""
    routes = []
    if platform.health_route:  # first, since both may have the same path
        routes.append(Route(platform.health_route, readiness, methods=["GET"]))
    if platform.predict_route:
        create = _Invocations if platform.name == "sagemaker" else _VertexPrediction
        routes.append(Route(platform.predict_route, create(models), methods=None))
    return routes


class _VertexPrediction(Prediction):
    """Predictions of the first model, with "parameters" next to the "instances"."""

    def target(self, scope):
        return self._models.default, None

    def parse(self, body, version):
        return json_bodies.parse_request(body, version.signature, with_parameters=True)


class _Invocations(Prediction):
    """Predictions as SageMaker's container of TensorFlow Serving accepts them.

    The header X-Amzn-SageMaker-Custom-Attributes selects a model and a version.
    https://github.com/aws/sagemaker-tensorflow-serving-container
    """

    def target(self, scope):
        headers = dict(scope["headers"])
        kind = _media_types(headers, b"content-type")[0]
        if kind not in (_JSON, *_JSON_LINES):
            raise RequestError("encoding", f"send {_JSON} or {_JSON_LINES[0]} instead of {kind}")
        self.content_type(scope)  # raises if the client accepts no JSON
        text = headers.get(_ATTRIBUTES_HEADER, b"").decode("latin-1")
        attributes = dict(_ATTRIBUTE.findall(text))
        if (method := attributes.get("tfs-method", "predict")) != "predict":
            raise RequestError("invalid", f"tfs-method={method}: only predict is supported")
        name = attributes.get("tfs-model-name", self._models.default)
        return name, attributes.get("tfs-model-version")

    def parse(self, body, version):
        return json_bodies.parse_request(tensorflow_json(body), version.signature)

    def content_type(self, scope):
        """Returns JSON or JSON lines, whichever the client names first: a response is one line."""
        accepted = _media_types(dict(scope["headers"]), b"accept")
        for each in accepted:
            if each in ("*/*", "application/*"):
                return _JSON.encode()
            if each in (_JSON, *_JSON_LINES):
                return each.encode()
        raise RequestError("unacceptable", f"the response is {_JSON}: accept it, or */*")


def _media_types(headers, name):
    """Returns the media types in a header, without their parameters."""
    text = headers.get(name, b"").decode("latin-1").lower() or _JSON
    return [each.partition(";")[0].strip() for each in text.split(",")]


def tensorflow_json(body: bytes) -> bytes:
    """Returns a body in a form of TensorFlow Serving, made from one of SageMaker's other forms.

    These are a row (a list or an object of inputs), a list of rows, and a row in each line.

    Example:

        >>> tensorflow_json(b"[1, 2]")
        b'{"instances":[[1, 2]]}'
    """
    lines = body.split(b"\n") if b"\n" in body else []
    rows = [row for row in map(bytes.strip, lines) if row]
    # A document over several lines has one that ends in a comma or an opening bracket.
    if len(rows) > 1 and all(row[:1] in b"[{" and row[-1:] in b"]}" for row in rows):
        return b'{"instances":[%s]}' % b",".join(rows)
    if _TENSORFLOW_JSON.search(body):
        return body
    return b'{"instances":%s}' % (body if _ROWS.match(body) else b"[%s]" % body)
