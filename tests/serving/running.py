"""A server in a thread of the tests' process, small models for it, and clients."""

import asyncio
import contextlib
import dataclasses
import json
import re
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
from kdist.serving.models import Models
from kdist.serving.rest import create_application
from kdist.serving.rpc import create_grpc_server
from kdist.serving.settings import BatchSettings, Limits

SECONDS = 60  # that anything may take before a test fails


@contextlib.contextmanager
def unharmed(ask):
    """Asks meanwhile, again and again; all has to be answered, and alike."""
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
    assert not wrong
    assert count >= 20


class Mixed(tf.Module):
    """Signatures of several inputs and types."""

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
    """Writes `Mixed` as a version."""
    module = Mixed()
    signatures = {
        "serving_default": module.default,
        **{name: getattr(module, name) for name in ("text", "pixels", "any", "halves")},
    }
    tf.saved_model.save(module, str(path), signatures=signatures)


class Times(tf.Module):
    """y = factor * x."""

    def __init__(self, factor):
        self.factor = tf.Variable(float(factor))

    @tf.function(input_signature=[tf.TensorSpec((None, 1), name="x")])
    def default(self, x):
        return {"y": self.factor * x}


def save_times(path, factor):
    """Writes `Times` as a version."""
    module = Times(factor)
    tf.saved_model.save(module, str(path), signatures={"serving_default": module.default})


@dataclasses.dataclass
class Running:
    """A server, and clients of it."""

    models: Models
    port: int = 0
    grpc_port: int = 0
    loop: asyncio.AbstractEventLoop | None = None

    def url(self, path):
        return f"http://127.0.0.1:{self.port}{path}"

    def get(self, path, **options):
        return requests.get(self.url(path), timeout=SECONDS, **options)

    def post(self, path, body, **options):
        """`body` as it is, or a document that becomes JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return requests.post(self.url(path), data, timeout=SECONDS, **options)

    def predict(self, model, document):
        """The answer, as a document; fails if there is none."""
        response = self.post(f"/v1/models/{model}:predict", document)
        assert response.status_code == 200, response.text
        return response.json()

    def channel(self):
        return grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}")

    @contextlib.contextmanager
    def stubs(self):
        """Of PredictionService and ModelService, as tensorflow-serving-api has them."""
        with self.channel() as channel:
            yield (
                prediction_service_pb2_grpc.PredictionServiceStub(channel),
                model_service_pb2_grpc.ModelServiceStub(channel),
            )

    def do(self, coroutine):
        """Runs it in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(SECONDS)

    def raw(self, data, seconds=10.0):
        """The answer, and what else comes with it, to a client that sends this."""
        with socket.create_connection(("127.0.0.1", self.port), seconds) as client:
            with contextlib.suppress(ConnectionError):  # some is answered before its end
                client.sendall(data)
            return received(client)


def received(client):
    """An answer, or what has come until the server closes or nothing comes any more."""
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
    """A PredictRequest."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    for name, array in arrays.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
    return request


@contextlib.contextmanager
def running(directories, settings=None, limits=None, computing=None, **options):
    """A server of these models, in a thread with an event loop of its own."""
    settings = settings or BatchSettings(0.0, 8)
    it = Running(Models(directories, computing, settings, limits=limits or Limits(), **options))
    started, ending = futures.Future(), asyncio.Event()
    main = _main(it, settings, limits or Limits(), started, ending)
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


async def _main(it, settings, limits, started, ending):
    it.loop = asyncio.get_running_loop()
    await it.models.refresh()
    options = server.ServerOptions({}, settings=settings, limits=limits, end_seconds=10.0)
    web = server._Web(server._uvicorn_settings(options, create_application(it.models)))
    rpc = create_grpc_server(it.models)
    it.grpc_port = rpc.add_insecure_port("127.0.0.1:0")
    await rpc.start()
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        it.port = listener.getsockname()[1]
        serving = asyncio.create_task(web.serve([listener]))
        while not web.started:
            await asyncio.sleep(0.01)
        started.set_result(None)
        await ending.wait()
        web.end(it.models)
        await serving
    await rpc.stop(10.0)
    await it.models.close(10.0)
