"""Cheap client connections, which leave the cores to the server under load.

    ask = await HttpConnection.open("127.0.0.1", 8501, "/v1/models/fashion:predict")
    status, body = await ask(body)
    ask.close()

httptools, the parser of uvicorn, parses the responses.
"""

import asyncio
import contextlib

import httptools


class HttpConnection(asyncio.Protocol):
    """Persistent connection that sends one request at a time.

    Attributes:
        is_open: whether the connection can send another request.
    """

    def __init__(self, host: str, port: int, path: str):
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        )
        self._answer: asyncio.Future | None = None
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self.is_open = False

    @classmethod
    async def open(cls, host: str, port: int, path: str) -> "HttpConnection":
        """Opens a connection; raises OSError if nothing listens."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(host, port, path), host, port)
        return connection

    async def __call__(self, body: bytes) -> tuple[str, bytes]:
        """Sends a request, and returns the status and body of the response.

        Raises:
            ConnectionError: the connection closed before the response.
        """
        self.send(self.message(body))
        return await self.answer()

    def message(self, body: bytes) -> bytes:
        """Returns the bytes of a request, for clients that send it in parts."""
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def send(self, part: bytes):
        """Sends a request or a part of one."""
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(part)

    async def answer(self) -> tuple[str, bytes]:
        """Waits for the response; raises the same errors as a call."""
        try:
            return await self._answer
        finally:
            self._answer = None

    def close(self):
        """Closes the connection immediately, in whatever state."""
        self.is_open = False
        if self._transport:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport):
        self._transport = transport
        self.is_open = True

    def data_received(self, data):
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def connection_lost(self, exc):
        self.is_open = False
        if self._answer and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("ended before the answer"))
            with contextlib.suppress(BaseException):  # marks it as seen; a waiter sees it as well
                self._answer.exception()

    # What httptools calls.

    def on_body(self, body):
        self._body.append(body)

    def on_message_complete(self):
        body, self._body = b"".join(self._body), []
        if not self._parser.should_keep_alive():
            self.is_open = False
        if self._answer and not self._answer.done():
            self._answer.set_result((str(self._parser.get_status_code()), body))


class GrpcConnection:
    """Channel that calls TensorFlow Serving's Predict.

    Attributes:
        is_open: always True, since channels reconnect automatically.
    """

    is_open = True

    def __init__(self, host: str, port: int):
        import grpc

        self._grpc = grpc
        # Without this option, channels to one address share a connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(f"{host}:{port}", options=options)
        self._predict = self._channel.unary_unary("/tensorflow.serving.PredictionService/Predict")

    async def __call__(self, body: bytes) -> tuple[str, bytes]:
        """Returns (status, message); the status is "200" or a gRPC code."""
        try:
            return "200", await self._predict(body)
        except self._grpc.aio.AioRpcError as error:
            return error.code().name, b""

    def close(self):
        """Closes the channel."""
        self._closing = asyncio.ensure_future(self._channel.close())
