"""TensorFlow Serving's REST API as an ASGI application.

    application = create_application(models)
    # POST /v1/models/NAME[/versions/N]:predict
    # GET  /v1/models/NAME[/versions/N][/metadata], /v1/models, /healthz, /readyz, /metrics

https://www.tensorflow.org/tfx/serving/api_rest
"""

import asyncio
import contextlib
import re
import time

import orjson
from google.protobuf import json_format
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from kdist.serving.core.errors import RequestError, to_request_error
from kdist.serving.core.requests import bytes_of_arrays
from kdist.serving.engine.models import Models
from kdist.serving.protocol import json_bodies

_JSON = (b"content-type", b"application/json")
# Requests that take longer check whether their client has disconnected; most are faster.
_DISCONNECT_CHECK_SECONDS = 0.05


def create_application(models: Models, lifespan=None) -> Starlette:
    """Returns the application that serves the models, with Starlette's `lifespan` context."""
    predict, info = _Predict(models), _Information(models)
    routes = []
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
    ]
    handlers = {RequestError: _handle_request_error, HTTPException: _handle_http_error}
    application = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    # The redirection would lead to whatever host the client has named.
    application.router.redirect_slashes = False
    return application


class _Predict:
    """ASGI application for predictions. Avoids Starlette's request objects, which are slow."""

    def __init__(self, models):
        self._models = models

    async def __call__(self, scope, receive, send):
        since, name = time.perf_counter(), ""
        try:
            if scope["method"] != "POST":
                raise HTTPException(405, "send predictions by POST")
            model = self._models.model(scope["path_params"]["name"])
            name = model.name
            async with asyncio.timeout(self._models.limits.request_seconds):
                body = await self._predict(model, scope, receive)
            status, headers = 200, [_JSON]
        except HTTPException as error:
            status, headers, body = error.status_code, [_JSON], _error_body(error.detail)
        except asyncio.CancelledError:
            self._models.metrics.record_request(name, "rest", "gone", since)
            return  # the client has disconnected
        except Exception as error:
            failure = to_request_error(error)
            status, body = failure.http_status, _error_body(str(failure))
            headers = [_JSON, *_retry_after(failure)]
        self._models.metrics.record_request(name, "rest", str(status), since)
        await _send(send, status, headers, body)

    async def _predict(self, model, scope, receive):
        number = _number(scope["path_params"])
        # Rejects the request before its body is read, which is most of the work.
        model.version(number).batcher().check_room()
        with self._models.body_memory.request() as reserve:
            body = await self._read_body(scope, receive, reserve)
            # Looked up again, as the version may have been replaced. From here on it is drained.
            version = model.version(number)
            request = json_bodies.parse_request(body, version.signature)
            reserve(max(0, bytes_of_arrays(request.arrays) - len(body)))
            del body  # not needed while the request waits
            prediction = version.predict(request.arrays, request.signature_name)
            outputs = await _while_connected(receive, prediction)
            return json_bodies.format_response(outputs, request)

    async def _read_body(self, scope, receive, reserve):
        limits = self._models.limits
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > limits.body_bytes:
                raise _too_large(limits)
            if name == b"content-encoding" and value != b"identity":
                raise RequestError("encoding", "send the body without a Content-Encoding")
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(limits.body_seconds):
                while more:
                    message = await receive()
                    parts.append(_body_part(message, limits, size))
                    reserve(len(parts[-1]))
                    size, more = size + len(parts[-1]), message.get("more_body")
        except TimeoutError as error:
            message = f"the body did not arrive within {limits.body_seconds:g} s"
            raise RequestError("slow", message) from error
        return b"".join(parts)


class _Information:
    """Routes that report names, states, metadata, health, and metrics."""

    def __init__(self, models):
        self._models = models

    async def names(self, request):
        return _json({"models": self._models.names})

    async def status(self, request):
        model = self._models.model(request.path_params["name"])
        states = model.states_of(_number(request.path_params))
        return _json({"model_version_status": [_state(n, *states[n]) for n in sorted(states)]})

    async def metadata(self, request):
        model = self._models.model(request.path_params["name"])
        version = model.version(_number(request.path_params))
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


def _number(parameters):
    """Returns the version number in a path; None for the highest version."""
    text = parameters.get("version")
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,19}", text):
        raise RequestError("invalid", f"the version {text!r} is not a whole number")
    return int(text)


def _state(number, state, error):
    status = {"error_code": "UNKNOWN" if error else "OK", "error_message": error}
    return {"version": str(number), "state": state, "status": status}


async def _while_connected(receive, prediction):
    """Returns the prediction, or cancels it when the client disconnects."""
    task, checks = asyncio.current_task(), []

    async def cancel_on_disconnect():
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    loop = asyncio.get_running_loop()
    timer = loop.call_later(
        _DISCONNECT_CHECK_SECONDS, lambda: checks.append(loop.create_task(cancel_on_disconnect()))
    )
    try:
        return await prediction
    finally:
        timer.cancel()
        for each in checks:
            each.cancel()


def _body_part(message, limits, before):
    if message["type"] == "http.disconnect":
        raise asyncio.CancelledError
    body = message.get("body", b"")
    if before + len(body) > limits.body_bytes:
        raise _too_large(limits)
    return body


def _too_large(limits):
    return RequestError("too_large", f"the body is larger than {limits.body_bytes:,} bytes")


def _retry_after(error):
    after = error.retry_after
    return [] if after is None else [(b"retry-after", b"%d" % after)]


def _error_body(text):
    return orjson.dumps({"error": text})


async def _send(send, status, headers, body):
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    with contextlib.suppress(OSError):  # the client has disconnected
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _json(document):
    return Response(orjson.dumps(document), media_type="application/json")


async def _handle_request_error(request, error):
    headers = dict(_retry_after(error))
    return Response(_error_body(str(error)), error.http_status, headers, "application/json")


async def _handle_http_error(request, error):
    text, path = error.detail, request.url.path[:500]
    if error.status_code == 404:
        text = f"{path} does not exist; predictions are at /v1/models/NAME[/versions/N]:predict"
    if error.status_code == 405:
        text = f"{path} does not support {request.method}; predictions are POST …:predict"
    return Response(_error_body(text), error.status_code, media_type="application/json")
