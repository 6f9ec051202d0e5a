"""Stand-in for the metadata server of a cloud, for tests of preemption.

with metadata_server("gce") as server:
    process = subprocess.Popen(["kdist", "train"], env={**os.environ, **server.environment})
    server.announce()                       # the process receives SIGTERM, and saves
"""

import contextlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator

from kdist.cluster.notices import URL_VARIABLE

_VM, _TOKEN = "vm-0", "token-0"


class MetadataServer(http.server.ThreadingHTTPServer):
    """Metadata server of one VM, which listens on loopback. It is as strict as the real ones.

    Args:
        cloud: `"gce"`, `"aws"`, or `"azure"`.
        port: port on loopback. Defaults to 0, any free one.

    Attributes:
        environment: environment variables of processes that act as if they ran on the VM.
        answered: number of questions about preemption that were answered.
    """

    daemon_threads = True

    def __init__(self, cloud: str, port: int = 0):
        super().__init__(("127.0.0.1", port), _HANDLERS[cloud])
        url = f"http://127.0.0.1:{self.server_address[1]}"
        self.environment = {URL_VARIABLE: f"{cloud}={url}"}
        self.answered = 0
        self._notice = threading.Event()

    @property
    def has_notice(self) -> bool:
        """True once the preemption was announced."""
        return self._notice.is_set()

    def announce(self):
        """Announces that the VM will be preempted."""
        self._notice.set()

    def wait_for_notice(self, seconds: float):
        """Blocks until the announcement, at most for some seconds."""
        self._notice.wait(seconds)


@contextlib.contextmanager
def metadata_server(cloud: str, port: int = 0) -> Iterator[MetadataServer]:
    """Returns a context with a running metadata server.

    Args:
        cloud: `"gce"`, `"aws"`, or `"azure"`.
        port: port on loopback. Defaults to 0, any free one.

    Returns:
        A context manager for the `MetadataServer`.

    Raises:
        KeyError: if the cloud is another one.
    """
    with MetadataServer(cloud, port) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: MetadataServer

    def log_message(self, *_):
        """Keeps the output of a test free of requests."""

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        code, text, headers = self.answer(url.path, dict(urllib.parse.parse_qsl(url.query)))
        self.send(code, text, headers)

    def send(self, code, text, headers=None):
        data = text.encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client has ended while it waited
            self.wfile.write(data)

    def notice(self, text, otherwise=""):
        """Returns `text` after the announcement."""
        self.server.answered += 1
        return text if self.server.has_notice else otherwise


class _GceHandler(_Handler):
    def answer(self, path, query):
        if self.headers["Metadata-Flavor"] != "Google":
            return 403, "missing the header Metadata-Flavor: Google", {}
        if path != "/computeMetadata/v1/instance/preempted":
            return 404, "", {}
        if query.get("wait_for_change") == "true" and query.get("last_etag") == self._etag():
            self.server.wait_for_notice(float(query["timeout_sec"]))
        headers = {"ETag": self._etag(), "Metadata-Flavor": "Google"}
        return 200, self.notice("TRUE", "FALSE"), headers

    def _etag(self):
        return f"etag{int(self.server.has_notice)}"


class _AwsHandler(_Handler):
    def do_PUT(self):
        accepted = self.path == "/latest/api/token"
        accepted &= int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"] or 0) > 0
        self.send(*((200, _TOKEN) if accepted else (400, "")))

    def answer(self, path, query):
        if self.headers["X-aws-ec2-metadata-token"] != _TOKEN:
            return 401, "", {}
        action = json.dumps({"action": "terminate", "time": "2026-11-25T08:22:00Z"})
        found = path == "/latest/meta-data/spot/instance-action" and self.notice(action)
        return (200, found, {}) if found else (404, "", {})


class _AzureHandler(_Handler):
    def answer(self, path, query):
        if self.headers["Metadata"] != "true" or "api-version" not in query:
            return 400, "", {}
        if path == "/metadata/instance/compute/name":
            return 200, _VM, {}
        if path != "/metadata/scheduledevents":
            return 404, "", {}
        # The event of another VM of the scale set comes before.
        events = [_azure_event("vm-1"), *self.notice([_azure_event(_VM)], [])]
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": events}), {}


def _azure_event(vm):
    return {
        "EventId": f"event of {vm}",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": [vm],
        "EventStatus": "Scheduled",
        "NotBefore": "Wed, 25 Nov 2026 08:22:00 GMT",
        "EventSource": "Platform",
    }


_HANDLERS = {"gce": _GceHandler, "aws": _AwsHandler, "azure": _AzureHandler}
