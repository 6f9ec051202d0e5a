"""Server of the report page, on loopback only, which updates the page while runs continue."""

import contextlib
import errno
import http.server
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from kdist.mirror.store import Store, file_state, is_url
from kdist.report.page import contents, fill, save
from kdist.report.runs import FILES, Prices, expand
from kdist.run_directory import RunDirectory

HOST = "127.0.0.1"
# Accepted Host headers, against web sites that resolve their name to loopback (DNS rebinding).
_OWN_NAMES = ("127.0.0.1", "localhost")
# Fraction of a core for updates of the page, as training may need the cores.
_MAX_CORE_SHARE = 0.2
# Seconds between two looks at object storage, where each look costs money.
_MIN_STORE_SECONDS = 20.0
# Each connection has a thread and carries one request. A browser uses at most six at once.
_MAX_CONNECTIONS = 32
# Includes sending the page, of up to 20 MB, perhaps through a tunnel.
_MAX_CONNECTION_SECONDS = 60.0

_logger = logging.getLogger(__name__)


def watch(
    run_directories: Sequence[str | os.PathLike],
    output: str | os.PathLike = "report.html",
    *,
    port: int = 8765,
    price_usd_per_hour: Prices = None,
    every_seconds: float = 2.0,
    on_ready: Callable[[str], object] | None = None,
):
    """Serves the page of `write` on loopback and updates it when files change, until Ctrl-C.

    It also writes the file `output`. If a run cannot be read while it is being written, the page
    stays as it is, shows the error, and the error is logged.

    Args:
        run_directories: see `write`.
        output: see `write`.
        port: port to listen on; 0 uses any free port. Defaults to 8765.
        price_usd_per_hour: see `write`.
        every_seconds: time between two checks of the files. Defaults to 2; at least 20 for URLs.
        on_ready: called with the address of the page. Logs it by default.

    Raises:
        ValueError, FileNotFoundError: see `write`, for the first page.
        OSError: see `write`, or the port is in use.
        KeyboardInterrupt: the user has pressed Ctrl-C.

    Example:

        kdist.report.watch(["runs/first"], "report.html", port=8765)
    """
    page = _LivePage(run_directories, output, price_usd_per_hour)
    page.make()
    if any(map(is_url, run_directories)):
        every_seconds = max(every_seconds, _MIN_STORE_SECONDS)
    with _server(port, page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://{HOST}:{server.server_address[1]}/"
            if on_ready is None:
                _logger.info("serving the report at %s", address)
            else:
                on_ready(address)
            while True:
                time.sleep(max(every_seconds, page.seconds / _MAX_CORE_SHARE))
                page.update()
        finally:
            server.shutdown()


class _LivePage:
    """The page as served, and its state.

    `version` is a hash of the contents, `error` why the last update failed, `made_at` its time of
    day, and `seconds` its duration.
    """

    def __init__(self, run_directories, output, prices):
        self._run_directories = run_directories
        self._output = output
        self._prices = prices
        self._files = None
        self.error = ""

    def make(self):
        """Makes the page; raises the exceptions of `write`."""
        began = time.perf_counter()
        self._files = self._state_of_files()
        parts = contents(self._run_directories, self._prices)
        save(fill(parts), self._output)
        self.text, self.version = fill(parts, live=True), parts["version"]
        self.made_at = time.strftime("%H:%M:%S")
        self.seconds = time.perf_counter() - began

    def update(self):
        """Makes the page if a file has changed; keeps and logs the error if that fails."""
        try:
            if self._state_of_files() == self._files:
                return
            self.make()
            self.error = ""
        except (OSError, ValueError) as error:
            if str(error) != self.error:
                _logger.warning("the page was not updated: %s", error)
            self.error = str(error)

    def _state_of_files(self):
        return [
            Store(os.fspath(run)).states(FILES)
            if is_url(run)
            else [file_state(RunDirectory(run).path / name) for name in FILES]
            for run in expand(self._run_directories)
        ]


def _server(port, page):
    class Handler(_Handler):
        live_page = page

    try:
        return _Server((HOST, port), Handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = f"port {port} is in use"
        else:
            problem = f"cannot listen on port {port} ({error.strerror})"
        raise OSError(f"{problem}; use another --port, or --port=0 for any free port") from error


class _Server(http.server.ThreadingHTTPServer):
    """Closes connections that stay open too long, and the oldest ones if there are too many."""

    request_queue_size = _MAX_CONNECTIONS  # the default of 5 delays bursts by a second

    def __init__(self, *arguments):
        self._accepted: dict[socket.socket, float] = {}  # connection -> time; the oldest first
        super().__init__(*arguments)

    def process_request(self, request, client_address):  # called by socketserver
        self._accepted[request] = time.monotonic()
        for oldest in list(self._accepted)[:-_MAX_CONNECTIONS]:
            self._disconnect(oldest)
        super().process_request(request, client_address)

    def service_actions(self):  # called by socketserver, at least twice per second
        expired = time.monotonic() - _MAX_CONNECTION_SECONDS
        for connection, accepted in list(self._accepted.items()):
            if accepted <= expired:
                self._disconnect(connection)

    def shutdown_request(self, request):  # called by socketserver, after each request
        self._accepted.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):  # called by socketserver
        """Logs the error for debugging, such as of a client that resets its connection."""
        _logger.debug("a request for the report failed", exc_info=True)

    def _disconnect(self, connection):
        """Ends the thread of a connection, which waits for its client."""
        self._accepted.pop(connection, None)
        with contextlib.suppress(OSError):  # it has just been closed
            connection.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers `/` with the page and `/state` with its version."""

    live_page: _LivePage

    def do_GET(self):  # called by http.server
        page = self.live_page
        if self.headers.get("Host", "").split(":")[0] not in _OWN_NAMES:
            self._answer(403, "text/plain", "open this page as http://localhost\n")
        elif self.path == "/":
            self._answer(200, "text/html; charset=utf-8", page.text)
        elif self.path == "/state":
            state = {"version": page.version, "error": page.error, "time": page.made_at}
            self._answer(200, "application/json", json.dumps(state))
        elif self.path == "/favicon.ico":
            self._answer(204, "image/x-icon", "")
        else:
            self._answer(404, "text/plain", "there is only /\n")

    def _answer(self, status, kind, text):
        body = text.encode("utf-8", "backslashreplace")
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            pass  # the client has disconnected

    def log_message(self, format, *arguments):  # called by http.server
        """Logs nothing, as the terminal may show the training."""
