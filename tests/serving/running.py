"""Server in a thread of the test process, with small models and clients."""

import asyncio
import contextlib
import dataclasses
import json
import re
import signal
import socket
import threading
import time
from concurrent import futures

import grpc
import requests
import tensorflow as tf
from tensorflow_serving.apis import (
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from kdist.serving import server
from kdist.serving.core.settings import BatchSettings, ServerLimits
from kdist.serving.engine.models import Models
from kdist.serving.protocol.rpc import create_grpc_server

SECONDS = 60  # that anything may take before a test fails


@contextlib.contextmanager
def unharmed(ask):
    """Sends requests during the block; all must have the same response.

    `ask` rounds: in a batch with requests of others, sums are taken in another order.
    """
    wanted, wrong, count = ask(), [], 0
    done = threading.Event()

    def repeat():
        nonlocal count
        while not wrong and (not done.is_set() or count < 20):
            try:
                found = ask()
                count += 1
                if found != wanted:
                    wrong.append(found)
            except Exception as error:
                wrong.append(error)
            time.sleep(0.002)

    thread = threading.Thread(target=repeat)
    thread.start()
    yield
    done.set()
    thread.join(SECONDS)
    assert not wrong, wrong
    assert count >= 20


class Mixed(tf.Module):
    """Module with signatures of several inputs and types."""

    def __init__(self):
        self.w = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    @tf.function(
        input_signature=[tf.TensorSpec((None, 2), name="a"), tf.TensorSpec((None,), tf.int32, "n")]
    )
    def default(self, a, n):
        return {"product": a @ self.w, "twice": 2 * n}

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, "s")])
    def text(self, s):
        return {"raw_bytes": s, "upper": tf.strings.upper(s)}

    @tf.function(input_signature=[tf.TensorSpec((None, 2, 2), tf.uint8, "p")])
    def pixels(self, p):
        return {"mean": tf.reduce_mean(tf.cast(p, tf.float32), [1, 2])}

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32, "x")])
    def any(self, x):
        return {"y": x + 1.0}

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.float32, "x")])
    def halves(self, x):
        return {"y": tf.cast(x, tf.half)}


def save_mixed(path):
    """Writes a version of `Mixed`."""
    module = Mixed()
    signatures = {
        "serving_default": module.default,
        **{name: getattr(module, name) for name in ("text", "pixels", "any", "halves")},
    }
    tf.saved_model.save(module, str(path), signatures=signatures)


class Times(tf.Module):
    """Module that computes y = factor * x."""

    def __init__(self, factor):
        self.factor = tf.Variable(float(factor))

    @tf.function(input_signature=[tf.TensorSpec((None, 1), name="x")])
    def default(self, x):
        return {"y": self.factor * x}


def save_times(path, factor):
    """Writes a version of `Times`."""
    module = Times(factor)
    tf.saved_model.save(module, str(path), signatures={"serving_default": module.default})


@dataclasses.dataclass
class Running:
    """Running server with client functions."""

    models: Models
    port: int = 0
    grpc_port: int = 0
    loop: asyncio.AbstractEventLoop | None = None

    def url(self, path):
        return f"http://127.0.0.1:{self.port}{path}"

    def get(self, path, **options):
        return requests.get(self.url(path), timeout=SECONDS, **options)

    def post(self, path, body, **options):
        """Posts bytes, or a document as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return requests.post(self.url(path), data, timeout=SECONDS, **options)

    def predict(self, model, document):
        """Returns the response as a document; fails without one."""
        response = self.post(f"/v1/models/{model}:predict", document)
        assert response.status_code == 200, response.text
        return response.json()

    def channel(self):
        return grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}")

    @contextlib.contextmanager
    def stubs(self):
        """Returns stubs of PredictionService and ModelService."""
        with self.channel() as channel:
            yield (
                prediction_service_pb2_grpc.PredictionServiceStub(channel),
                model_service_pb2_grpc.ModelServiceStub(channel),
            )

    @contextlib.contextmanager
    def on(self, platform):
        """Yields clients of one more HTTP server of these models, with the routes of a platform."""
        options = server.ServerOptions({}, platform=platform, end_seconds=10.0)
        web, listener, serving = self.do(_start_web(options, self.models))
        try:
            yield dataclasses.replace(self, port=listener.getsockname()[1])
        finally:
            web.should_exit = True
            self.do(asyncio.wait_for(serving, SECONDS))
            listener.close()

    def do(self, coroutine):
        """Runs a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(SECONDS)

    def raw(self, data, seconds=10.0):
        """Returns all bytes that a client receives after sending raw bytes."""
        with socket.create_connection(("127.0.0.1", self.port), seconds) as client:
            with contextlib.suppress(ConnectionError):  # some is answered before its end
                client.sendall(data)
            return received(client)


def received(client):
    """Returns a response, or all bytes until the server closes or stops sending."""
    data = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while not _is_whole(data) and (part := client.recv(1 << 16)):
            data += part
    return data


def _is_whole(data):
    head, end, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return bool(end and length and len(body) >= int(length[1]))


def predict_request(model, signature="", **arrays):
    """Returns a PredictRequest."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    for name, array in arrays.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
    return request


@contextlib.contextmanager
def running(directories, settings=None, limits=None, compute_engine=None, **options):
    """Yields a server of these models, in a thread with its own event loop."""
    settings = settings or BatchSettings(0.0, 8)
    it = Running(
        Models(directories, compute_engine, settings, limits=limits or ServerLimits(), **options)
    )
    started, ending = futures.Future(), asyncio.Event()
    main = _main(it, settings, limits or ServerLimits(), started, ending)
    thread = threading.Thread(target=_guarded, args=[main, started], daemon=True)
    thread.start()
    started.result(SECONDS)
    try:
        yield it
    finally:
        it.loop.call_soon_threadsafe(ending.set)
        thread.join(SECONDS)
        assert not thread.is_alive(), "the server does not end"


def _guarded(main, started):
    try:
        asyncio.run(main)
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)


async def _start_web(options, models):
    web = server._Web(server._uvicorn_settings(options, models))
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    serving = asyncio.create_task(web.serve([listener]))
    while not web.started:
        await asyncio.sleep(0.01)
    return web, listener, serving


async def _main(it, settings, limits, started, ending):
    it.loop = asyncio.get_running_loop()
    await it.models.refresh()
    options = server.ServerOptions({}, settings=settings, limits=limits, end_seconds=10.0)
    rpc = create_grpc_server(it.models)
    it.grpc_port = rpc.add_insecure_port("127.0.0.1:0")
    await rpc.start()
    web, listener, serving = await _start_web(options, it.models)
    with listener:
        it.port = listener.getsockname()[1]
        started.set_result(None)
        await ending.wait()
        web.stop(it.models, signal.SIGTERM)
        await serving
    await rpc.stop(10.0)
    await it.models.close(10.0)
