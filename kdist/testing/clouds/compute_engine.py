"""Stand-in for Compute Engine, whose VMs are machines inside this one.

    with ComputeEngineStandIn(directory) as service:
        os.environ.update(service.environment)         # for `gcloud`
        handle = kdist.launch.engines.get_engine("gce").submit(job)
        service.preempt("cats-worker-1")

It answers what `gcloud compute instances` sends (REST, version 1). The startup script of a VM runs
on it as a process, with a metadata server, and what it prints is at the serial port.
"""

import contextlib
import email
import http.server
import itertools
import json
import os
import pathlib
import shutil
import socket
import sys
import threading
import time
import urllib.parse

from kdist.testing.clouds import gcloud
from kdist.testing.clouds.hosts import Network, write_program

ZONES = ("us-central1-a", "us-central1-b")
_TYPES: dict[str, list[dict]] = {
    "machineTypes": [
        {"name": f"n1-standard-{cores}", "guestCpus": cores} for cores in (4, 8, 16, 32)
    ],
    "acceleratorTypes": [{"name": f"nvidia-tesla-{gpu}"} for gpu in ("k80", "t4", "v100")],
}
_EXHAUSTED = {
    "code": "ZONE_RESOURCE_POOL_EXHAUSTED",
    "message": "The zone does not have enough resources available to fulfill the request. Try a "
    "different zone, or try again later.",
}


class Vm:
    """A virtual machine of a `ComputeEngineStandIn`.

    Attributes:
        name: Its name.
        zone: Its zone.
        status: Its status, as Compute Engine names it.
        metadata: The values of its metadata.
        log: File with the output of its startup script.
    """

    def __init__(self, service: "ComputeEngineStandIn", zone: str, body: dict):
        self._service, self.zone, self._body = service, zone, body
        self.name, self.status, self.is_preempted = body["name"], "RUNNING", False
        self.metadata = {each["key"]: each["value"] for each in body["metadata"]["items"]}
        number = next(service.numbers)
        self._home = service.directory / f"home-{self.name}-{number}"
        self._home.mkdir()
        self.log = service.directory / f"{self.name}-{number}.log"
        self._start()

    def _start(self):
        self._host = self._service.network.add(self.name)
        script = self._home / "startup-script"
        script.write_text(self.metadata["startup-script"])
        environment = {
            **os.environ,
            **self._service.environment,
            "HOME": str(self._home),
            "GCE_METADATA_HOST": f"{self._service.metadata_address}/vm/{self.name}",
        }
        with self.log.open("ab") as log:
            self._host.popen(["bash", script], stdout=log, stderr=log, env=environment)

    def reset(self):
        """Boots again, with the same disk."""
        self.power_off()
        self._start()

    def power_off(self):
        """Kills all that runs on it."""
        self._service.network.remove(self._host)

    def preempt(self, seconds: float):
        """Announces the preemption, and deletes the VM when `seconds` are over."""
        self.is_preempted, self.status = True, "STOPPING"
        timer = threading.Timer(seconds, self._service.delete, [self.name, self])
        timer.daemon = True
        timer.start()

    def serial_port(self, start: int) -> dict:
        """Returns what the VM has written, from a position."""
        lines = self.log.read_text(errors="replace").splitlines(keepends=True)
        text = "".join(f"Nov 25 10:00:00 vm google[1]: startup-script: {line}" for line in lines)
        return {"contents": text[start:], "start": str(start), "next": str(len(text))}

    def describe(self, base: str) -> dict:
        """Returns the VM as Compute Engine does; `base` is the URL of the project."""
        return {
            **{key: value for key, value in self._body.items() if key != "networkInterfaces"},
            "id": "1",
            "status": self.status,
            "zone": f"{base}/zones/{self.zone}",
            "selfLink": f"{base}/zones/{self.zone}/instances/{self.name}",
        }


class ComputeEngineStandIn:
    """The service, as a context manager.

    Example:

        with ComputeEngineStandIn(directory) as service:
            os.environ.update(service.environment)
            handle = kdist.launch.engines.get_engine("gce").submit(job)
            service.preempt("cats-worker-1")
            assert handle.follow(print) == 0
        assert [each["zone"] for each in service.requests] == 3 * ["us-central1-a"]

    Args:
        directory: Empty directory for the files of the VMs.
        installed: Whether to use this machine's own `gcloud` if it has one, which takes a second
            per command. Defaults to `True`. Otherwise programs call a stand-in with the commands
            that kdist uses.

    Attributes:
        environment: Environment variables of programs that call `gcloud`.
        vms: The `Vm`s that exist, by name.
        requests: The VMs that were asked for: JSON as `gcloud` sends it, and `kind` and `zone`.
        without_capacity: Pairs (machine type, zone) that cannot be rented, to be changed by tests.
    """

    def __init__(self, directory: str | os.PathLike, installed: bool = True):
        self.directory, self._installed = pathlib.Path(directory), installed
        self.vms: dict[str, Vm] = {}
        self.requests: list[dict] = []
        self.without_capacity: set[tuple[str, str]] = set()
        self.numbers = itertools.count(1)
        self._operations: dict[str, dict] = {}
        self._lock = threading.RLock()
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        self.network = self._stack.enter_context(Network(self.directory))
        self._address = self._serve(socket.create_server(("127.0.0.1", 0)))
        self.metadata_address = self._serve(self.network.switch.listen())
        programs = self.directory / "bin"
        programs.mkdir()
        # A VM's last command must not end this machine.
        write_program(programs / "poweroff", "exit 0")
        # `python3` of the VMs is that of the test.
        write_program(programs / "python3", f'exec {sys.executable} "$@"')
        if not (self._installed and shutil.which("gcloud")):
            line = f'exec {sys.executable} -I {gcloud.__file__} "$@"'
            write_program(programs / "gcloud", line)
        self.environment = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            gcloud.ENDPOINT: f"http://{self._address}/compute/v1/",
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CORE_PROJECT": "p",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
            "CLOUDSDK_CONFIG": str(self.directory / "gcloud"),
        }
        return self

    def __exit__(self, *_):
        with self._lock:
            self.vms.clear()
            self._stack.close()

    def _serve(self, listening):
        """Answers at a socket, in a thread; returns its address."""
        handler = type("Handler", (_Handler,), {"service": self})
        server = http.server.ThreadingHTTPServer(
            listening.getsockname(), handler, bind_and_activate=False
        )
        server.socket.close()
        server.socket = listening
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        self._stack.callback(server.server_close)
        self._stack.callback(server.shutdown)
        return ":".join(map(str, listening.getsockname()))

    def preempt(self, name: str, seconds: float = 30.0):
        """Announces the preemption of a VM, and deletes it when `seconds` are over."""
        self.vms[name].preempt(seconds)

    def find(self, name: str) -> Vm | None:
        """Returns the VM with this name, once it has been created; None if there is none."""
        with self._lock:
            return self.vms.get(name)

    def insert(self, zone: str, body: dict) -> tuple[int, dict]:
        """Creates a VM, and returns status and answer."""
        kind = body["machineType"].rpartition("/")[2]
        with self._lock:
            self.requests.append({"zone": zone, "kind": kind, **body})
            if (kind, zone) in self.without_capacity:
                return self._operation("insert", zone, body["name"], _EXHAUSTED)
            self.vms[body["name"]] = Vm(self, zone, body)
        return self._operation("insert", zone, body["name"])

    def delete(self, name: str, expected: Vm | None = None) -> tuple[int, dict]:
        """Deletes a VM, and returns status and answer.

        Args:
            name: Name of the VM.
            expected: The VM to delete; nothing is done if another one has its name now.
        """
        with self._lock:
            vm = self.vms.get(name)
            if vm is None or expected not in (None, vm):
                return 404, _error(404, f"The resource {name} was not found")
            del self.vms[name]
            vm.power_off()
        return self._operation("delete", vm.zone, name)

    def reset(self, name: str) -> tuple[int, dict]:
        """Boots a VM again, and returns status and answer."""
        with self._lock:
            self.vms[name].reset()
        return self._operation("reset", self.vms[name].zone, name)

    def _operation(self, kind, zone, name, error=None):
        base = f"http://{self._address}/compute/v1/projects/p"
        number = f"operation-{next(self.numbers)}"
        found = {"error": {"errors": [error]}, "httpErrorStatusCode": 503} if error else {}
        self._operations[number] = {
            "kind": "compute#operation",
            "name": number,
            "operationType": kind,
            "status": "DONE",
            "zone": f"{base}/zones/{zone}",
            "targetLink": f"{base}/zones/{zone}/instances/{name}",
            "selfLink": f"{base}/zones/{zone}/operations/{number}",
            **found,
        }
        return 200, self._operations[number]

    def answer(self, method: str, url: str, body: dict) -> tuple[int, dict]:
        """Returns the status and the answer to a request."""
        path, _, query = url.partition("?")
        base = f"http://{self._address}/compute/v1/projects/p"
        parts = path.partition("/projects/")[2].split("/")[1:]
        match method, parts:
            case "POST", ["zones", zone, "instances"]:
                return self.insert(zone, body)
            case "DELETE", ["zones", _, "instances", name]:
                return self.delete(name)
            case "POST", ["zones", _, "instances", name, "reset"]:
                return self.reset(name)
            case "GET", ["zones", _, "instances", name, "serialPort"] if name in self.vms:
                start = urllib.parse.parse_qs(query).get("start", ["0"])[0]
                return 200, self.vms[name].serial_port(int(start))
            case "GET", ["zones", _, "instances", name] if name in self.vms:
                return 200, self.vms[name].describe(base)
            case _, ["zones", _, "operations", number, *_]:
                return 200, self._operations[number]
            case "GET", ["aggregated", "instances"]:
                vms = [vm.describe(base) for vm in list(self.vms.values())]
                return 200, {"items": {f"zones/{ZONES[0]}": {"instances": vms}}}
            case "GET", ["aggregated", ("machineTypes" | "acceleratorTypes") as kind]:
                types = _TYPES[kind]
                listed = {
                    f"zones/{zone}": {kind: [{**each, "zone": zone} for each in types]}
                    for zone in ZONES
                }
                return 200, {"items": listed}
            case "GET", ["global", "images", "family", family]:
                link = f"{base}/global/images/{family}"
                return 200, {"name": family, "selfLink": link, "status": "READY"}
            case "GET", ["zones", zone]:
                region = f"{base}/regions/{zone[:-2]}"
                return 200, {"name": zone, "region": region, "status": "UP"}
            case "GET", []:
                return 200, {"name": "p", "id": "1"}
        return 404, _error(404, f"The resource {path} was not found")


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: ComputeEngineStandIn

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._handle("GET")

    def do_POST(self):
        self._handle("POST")

    def do_DELETE(self):
        self._handle("DELETE")

    def _handle(self, method):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/vm/"):
            _, _, name, _, _, _, *rest = self.path.split("/")
            return self._metadata(self.service.find(name), "/".join(rest))
        if self.path.startswith("/batch"):
            return self._batch(data)
        status, answer = self.service.answer(method, self.path, json.loads(data or b"{}"))
        return self._send(status, json.dumps(answer), "application/json")

    def _metadata(self, vm, key):
        """Answers as the metadata server of a VM; `key` follows /computeMetadata/v1/instance/."""
        if vm is None:
            return self._send(404, "", "text/plain")
        if key.startswith("preempted"):
            vms = self.service.vms
            while "wait_for_change" in key and vms.get(vm.name) is vm and not vm.is_preempted:
                time.sleep(0.05)
            return self._send(200, "TRUE" if vm.is_preempted else "FALSE", "text/plain")
        value = vm.name if key == "name" else vm.metadata.get(key.removeprefix("attributes/"))
        return self._send(200 if value is not None else 404, value or "", "text/plain")

    def _batch(self, data):
        """Answers the requests that `gcloud` sends together, as multipart/mixed."""
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        answers = []
        for part in email.message_from_bytes(head + data).get_payload():
            request, _, rest = part.get_payload().lstrip().partition("\n")
            method, path = request.split()[:2]
            body = rest[rest.index("{") : rest.rindex("}") + 1] if "{" in rest else "{}"
            status, answer = self.service.answer(method, path, json.loads(body))
            number = part["Content-ID"].strip("<>")
            answers.append(
                f"--b\r\nContent-Type: application/http\r\nContent-ID: <response-{number}>\r\n\r\n"
                f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\n\r\n"
                f"{json.dumps(answer)}\r\n"
            )
        self._send(200, "".join(answers) + "--b--", "multipart/mixed; boundary=b")

    def _send(self, status, text, kind):
        data = text.encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # a VM that was killed
            self.close_connection = True


def _error(code, message):
    reasons = [{"reason": "notFound", "message": message, "domain": "global"}]
    return {"error": {"code": code, "message": message, "errors": reasons}}
