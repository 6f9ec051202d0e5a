"""TensorFlow Serving's REST interface, as an ASGI application.

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

from kdist.serving import json_bodies
from kdist.serving.models import Models
from kdist.serving.refusals import Refusal, refusal_of

_JSON = (b"content-type", b"application/json")
# A client that has gone is looked for only when its request waits for so long: most do not.
_LOOK_AFTER_SECONDS = 0.05


def create_application(models: Models, lifespan=None) -> Starlette:
    """The application for these models.

    Args:
        models: that are served.
        lifespan: of Starlette: a context that the server enters and leaves.
    """
    predict, shown = _Predict(models), _Shown(models)
    routes = []
    for base in ("/v1/models/{name}", "/v1/models/{name}/versions/{version}"):
        routes += [
            Route(base + ":predict", predict, methods=None),
            Route(base + "/metadata", shown.metadata, methods=["GET"]),
            Route(base, shown.status, methods=["GET"]),
        ]
    routes += [
        Route("/v1/models", shown.names, methods=["GET"]),
        Route("/healthz", shown.health, methods=["GET"]),
        Route("/readyz", shown.readiness, methods=["GET"]),
        Route("/metrics", shown.metrics, methods=["GET"]),
    ]
    handlers = {Refusal: _refused, HTTPException: _http_error}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


class _Predict:
    """An ASGI application, without Starlette's requests: it is what time is spent on."""

    def __init__(self, models):
        self._models = models

    async def __call__(self, scope, receive, send):
        since, name = time.perf_counter(), ""
        try:
            if scope["method"] != "POST":
                raise HTTPException(405, "predictions are asked for by POST")
            model = self._models.model(scope["path_params"]["name"])
            name = model.name
            async with asyncio.timeout(self._models.limits.request_seconds):
                body = await self._answer(model, scope, receive)
            status, headers = 200, [_JSON]
        except HTTPException as error:
            status, headers, body = error.status_code, [_JSON], _message(error.detail)
        except asyncio.CancelledError:
            self._models.metrics.answered(name, "rest", "gone", since)
            return  # the client has gone
        except Exception as error:
            refusal = refusal_of(error)
            status, body = refusal.http_status, _message(str(refusal))
            headers = [_JSON, *_retry_after(refusal)]
        self._models.metrics.answered(name, "rest", str(status), since)
        await _send(send, status, headers, body)

    async def _answer(self, model, scope, receive):
        number = _number(scope["path_params"])
        # Refused before its body is read, which is most of the work of a request.
        model.version(number).batcher().check_room()
        with self._models.bodies.of_request() as hold:
            body = await self._body(scope, receive, hold)
            # Only now, as the version may have been replaced since; from here on it is drained.
            version = model.version(number)
            request = json_bodies.read(body, version.signature)
            prediction = version.predict(request.arrays, request.signature_name)
            return json_bodies.answer(await _while_connected(receive, prediction), request)

    async def _body(self, scope, receive, hold):
        limits = self._models.limits
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > limits.body_bytes:
                raise _too_large(limits)
            if name == b"content-encoding" and value != b"identity":
                raise Refusal("encoding", "the body has to be sent without a Content-Encoding")
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(limits.body_seconds):
                while more:
                    message = await receive()
                    parts.append(_part(message, limits, size))
                    hold(len(parts[-1]))
                    size, more = size + len(parts[-1]), message.get("more_body")
        except TimeoutError as error:
            said = f"the body did not come within {limits.body_seconds:g} s"
            raise Refusal("slow", said) from error
        return b"".join(parts)


class _Shown:
    """What there is to look at."""

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
        shown = json_format.MessageToDict(
            version.signature_map(),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        return _json({"model_spec": spec, "metadata": {"signature_def": shown}})

    async def health(self, request):
        return Response("ok\n", media_type="text/plain")

    async def readiness(self, request):
        ready = self._models.ready
        return Response("ready\n" if ready else "not ready\n", 200 if ready else 503)

    async def metrics(self, request):
        return Response(self._models.metrics.text(), media_type="text/plain; version=0.0.4")


def _number(parameters):
    """The version that a path asks for; None for the highest."""
    text = parameters.get("version")
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,19}", text):
        raise Refusal("invalid", f"the version {text!r} is no version: give a whole number")
    return int(text)


def _state(number, state, error):
    status = {"error_code": "UNKNOWN" if error else "OK", "error_message": error}
    return {"version": str(number), "state": state, "status": status}


async def _while_connected(receive, prediction):
    """The prediction; if the client goes, it is cancelled, and so left out of a batch to come."""
    task, waiting = asyncio.current_task(), []

    async def look():
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    loop = asyncio.get_running_loop()
    timer = loop.call_later(_LOOK_AFTER_SECONDS, lambda: waiting.append(loop.create_task(look())))
    try:
        return await prediction
    finally:
        timer.cancel()
        for each in waiting:
            each.cancel()


def _part(message, limits, before):
    if message["type"] == "http.disconnect":
        raise asyncio.CancelledError
    body = message.get("body", b"")
    if before + len(body) > limits.body_bytes:
        raise _too_large(limits)
    return body


def _too_large(limits):
    return Refusal("too_large", f"the body is larger than {limits.body_bytes:,} bytes")


def _retry_after(refusal):
    after = refusal.retry_after
    return [] if after is None else [(b"retry-after", b"%d" % after)]


def _message(text):
    return orjson.dumps({"error": text})


async def _send(send, status, headers, body):
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    with contextlib.suppress(OSError):  # the client has gone
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _json(document):
    return Response(orjson.dumps(document), media_type="application/json")


async def _refused(request, refusal):
    headers = dict(_retry_after(refusal))
    return Response(_message(str(refusal)), refusal.http_status, headers, "application/json")


async def _http_error(request, error):
    text, path = error.detail, request.url.path[:500]
    if error.status_code == 404:
        text = f"there is no {path}; ask for /v1/models/NAME[/versions/N]:predict"
    if error.status_code == 405:
        text = f"{path} takes no {request.method}; predictions are POST …:predict"
    return Response(_message(text), error.status_code, media_type="application/json")
