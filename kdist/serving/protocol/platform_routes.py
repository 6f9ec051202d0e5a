"""Routes that hosting platforms ask for, besides those of the protocols.

SageMaker:  GET /ping, POST /invocations
Vertex AI:  GET $AIP_HEALTH_ROUTE, POST $AIP_PREDICT_ROUTE

`kdist.serving.platforms` names the contracts.
"""

import re

from starlette.routing import Route

from kdist.serving.core.errors import RequestError
from kdist.serving.engine.models import Models
from kdist.serving.platforms import Platform
from kdist.serving.protocol import json_bodies
from kdist.serving.protocol.prediction import Prediction

_JSON, _JSON_LINES = "application/json", ("application/jsonlines", "application/jsons")
_ATTRIBUTES_HEADER = b"x-amzn-sagemaker-custom-attributes"
_ATTRIBUTE = re.compile(r"(tfs-[a-z-]+)=([^,\s]+)")
_TENSORFLOW_JSON = re.compile(rb'"(?:instances|inputs)"\s*:')
_ROWS = re.compile(rb"\s*\[\s*\[")


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
