"""Serves the page of runs that go on, on this machine alone, and renews it as they write.

watch(["runs/first"], "report.html", port=8765)     # until Ctrl-C
"""

import errno
import http.server
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from kdist.report.costs import Prices
from kdist.report.page import contents, fill, save
from kdist.run_directory import RunDirectory

HOST = "127.0.0.1"
# Of a request for the page: another web site that gives itself this machine's address is refused.
_OWN_NAMES = ("127.0.0.1", "localhost")
# Making the page takes a core that training could use: at most this share of it.
_LARGEST_SHARE_OF_A_CORE = 0.2


def watch(
    run_directories: Sequence[str | os.PathLike],
    output: str | os.PathLike = "report.html",
    *,
    port: int = 8765,
    price_usd_per_hour: Prices = None,
    every_seconds: float = 2.0,
    on_ready: Callable[[str], object] = print,
):
    """Serves the page on loopback until interrupted; makes it anew when a run's files changed.

    The file `output` is written as well, and stays. A run that cannot be read while it writes is
    said on the page and on stderr, and the page before it stays.

    Args:
        run_directories: as in `write`.
        output: as in `write`.
        port: to listen at; 0 takes any that is free. Defaults to 8765.
        price_usd_per_hour: as in `write`.
        every_seconds: time between two looks at the files. Defaults to 2.
        on_ready: called with the page's address. Defaults to printing it.

    Raises:
        ValueError, FileNotFoundError, OSError: as in `write`, for the first page; the port is in
            use.
        KeyboardInterrupt: the end.
    """
    page = _LivePage(run_directories, output, price_usd_per_hour)
    page.make()
    with _server(port, page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            on_ready(f"http://{HOST}:{server.server_address[1]}/")
            while True:
                time.sleep(max(every_seconds, page.seconds / _LARGEST_SHARE_OF_A_CORE))
                page.renew()
        finally:
            server.shutdown()


class _LivePage:
    """The page, and whether it is as new as the files of its runs.

    Attributes:
        text: the page, as it is served.
        version: changes with its figures.
        error: why it could not be made anew; empty if it could.
        made_at: the time of day, in words.
        seconds: how long making it took.
    """

    def __init__(self, run_directories, output, prices):
        self._run_directories = run_directories
        self._output = output
        self._prices = prices
        self._files = None
        self.error = ""

    def make(self):
        """Makes the page; raises what `write` raises."""
        began = time.perf_counter()
        self._files = self._state_of_files()
        parts = contents(self._run_directories, self._prices)
        save(fill(parts), self._output)
        self.text, self.version = fill(parts, live=True), parts["version"]
        self.made_at = time.strftime("%H:%M:%S")
        self.seconds = time.perf_counter() - began

    def renew(self):
        """Makes the page if a file changed; keeps the old one, and says so, if that fails."""
        if self._state_of_files() == self._files:
            return
        try:
            self.make()
            self.error = ""
        except (OSError, ValueError) as error:
            if str(error) != self.error:
                print(f"not renewed: {error}", file=sys.stderr)
            self.error = str(error)

    def _state_of_files(self):
        runs = map(RunDirectory, self._run_directories)
        names = [
            path for run in runs for path in (run.config, run.metrics, run.devices, run.summary)
        ]
        return [_size_and_time(path) for path in names]


def _size_and_time(path):
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _server(port, page):
    class Handler(_Handler):
        live_page = page

    try:
        return http.server.ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"port {port} is in use"
        else:
            what = f"cannot listen at port {port} ({error.strerror})"
        raise OSError(
            f"{what}; give another as --port, or --port=0 for any that is free"
        ) from error


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers `/` with the page and `/state` with its version."""

    live_page: _LivePage

    def do_GET(self):  # the name that http.server calls
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
            self._answer(404, "text/plain", "there is / alone\n")

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
            pass  # the reader went away

    def log_message(self, format, *arguments):  # the names that http.server calls it with
        """Says nothing: the terminal may be the one that trains."""
