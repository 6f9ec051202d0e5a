"""Connections: an answer's head and body leave together."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Protocol(HttpToolsProtocol):
    """Writes at once what a step of the event loop gives: one call of the system an answer."""

    def connection_made(self, transport):
        """A client has connected."""
        super().connection_made(_Gathered(transport, self.loop))


class _Gathered:
    """A transport whose writes wait for the end of the event loop's step."""

    def __init__(self, transport, loop):
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def write(self, data):
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def close(self):
        self._flush()
        self._transport.close()

    def _flush(self):
        if self._held:
            data, self._held = b"".join(self._held), []
            self._transport.write(data)
