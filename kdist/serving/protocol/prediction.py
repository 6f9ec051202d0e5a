"""Prediction requests over HTTP, from the head of a request to its response.

`Prediction` is TensorFlow Serving's form. A subclass for another form changes where the name of the
model stands and how bodies are written; limits, memory, metrics, and errors are the same for all.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from starlette.exceptions import HTTPException

from kdist.serving.core.errors import RequestError, to_request_error
from kdist.serving.core.requests import bytes_of_arrays, parse_version
from kdist.serving.engine.models import Models, ServedVersion
from kdist.serving.protocol import json_bodies

# Requests that take longer check whether their client has disconnected; most are faster.
_DISCONNECT_CHECK_SECONDS = 0.05


class Prediction:
    """ASGI application for predictions. Avoids Starlette's request objects, which are slow."""

    def __init__(self, models: Models):
        self._models = models

    def target(self, scope) -> tuple[str, str | None]:
        """Returns the model's name and version, as the client wrote them.

        Raises RequestError if the head of the request is not acceptable.
        """
        parameters = scope["path_params"]
        return parameters["name"], parameters.get("version")

    def parse(self, body: bytes, version: ServedVersion) -> Any:
        """Returns the request in a body, with `arrays`, `signature_name`, and `signature`.

        Raises ValueError or RequestError if it is not valid for the version.
        """
        return json_bodies.parse_request(body, version.signature)

    def format(
        self, outputs: Mapping[str, np.ndarray], request: Any, version: ServedVersion
    ) -> bytes:
        """Returns the body of a response."""
        return json_bodies.format_response(outputs, request)

    def content_type(self, scope) -> bytes:
        """Returns the media type of a response."""
        return b"application/json"

    async def __call__(self, scope, receive, send):
        since, name, media_type = time.perf_counter(), "", b"application/json"
        headers = []
        try:
            if scope["method"] != "POST":
                raise HTTPException(405, "send predictions by POST")
            name_in_request, version = self.target(scope)
            model = self._models.model(name_in_request)
            name = model.name
            async with asyncio.timeout(self._models.limits.request_seconds):
                body = await self._predict(model, parse_version(version), scope, receive)
            status, media_type = 200, self.content_type(scope)
        except HTTPException as error:
            status, body = error.status_code, error_body(error.detail)
        except asyncio.CancelledError:
            self._models.metrics.record_request(name, "rest", "gone", since)
            return  # the client has disconnected
        except Exception as error:
            failure = to_request_error(error)
            status, body = failure.http_status, error_body(str(failure))
            headers = _retry_after(failure)
        self._models.metrics.record_request(name, "rest", str(status), since)
        await _send(send, status, [(b"content-type", media_type), *headers], body)

    async def _predict(self, model, number, scope, receive):
        # Rejects the request before its body is read, which is most of the work.
        model.version(number).batcher().check_room()
        with self._models.body_memory.request() as reserve:
            body = await self._read_body(scope, receive, reserve)
            # Looked up again, as the version may have been replaced. From here on it is drained.
            version = model.version(number)
            request = self.parse(body, version)
            reserve(max(0, bytes_of_arrays(request.arrays) - len(body)))
            del body  # not needed while the request waits
            prediction = version.predict(request.arrays, request.signature_name)
            outputs = await _while_connected(receive, prediction)
            return self.format(outputs, request, version)

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


def _retry_after(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Returns the header Retry-After of an error, if it has one."""
    after = error.retry_after
    return [] if after is None else [(b"retry-after", b"%d" % after)]


def error_body(text: str) -> bytes:
    """Returns the body of a response that reports an error."""
    return orjson.dumps({"error": text})


async def _send(send, status, headers, body):
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    with contextlib.suppress(OSError):  # the client has disconnected
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
