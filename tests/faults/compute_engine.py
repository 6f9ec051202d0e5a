"""A stand-in for Compute Engine, whose VMs are processes of this machine.

    with ComputeEngine(directory, hosts) as service:
        environment = service.environment      # for `gcloud`, with or without this machine's own
        service.preempt("cats-worker-1")

It answers what `gcloud compute instances` sends (REST, version 1). The startup script of a VM runs
as a process with a metadata server of its own, and what it prints is at the serial port. Run in a
network namespace, because TensorFlow's servers listen at all addresses of a VM.

    python compute_engine.py ARGUMENTS…        # a stand-in for `gcloud`, where it is not installed
"""

import collections
import contextlib
import email
import http.server
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

ZONES = ("us-central1-a", "us-central1-b")
EXHAUSTED = {
    "code": "ZONE_RESOURCE_POOL_EXHAUSTED",
    "message": "The zone does not have enough resources available to fulfill the request. Try a "
    "different zone, or try again later.",
}
_ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"


class Vm:
    """A virtual machine; `start` and `stop` its process."""

    def __init__(self, service, zone, body):
        self._service, self.zone, self.body = service, zone, body
        self.name, self.status, self.is_preempted = body["name"], "RUNNING", False
        self.address = f"127.0.1.{next(service.numbers)}"
        self.metadata = {each["key"]: each["value"] for each in body["metadata"]["items"]}
        self.log = service.directory / f"{self.name}-{self.address}.log"
        self.start()

    def start(self):
        home = self._service.directory / f"home-{self.name}"
        home.mkdir(exist_ok=True)
        script = home / "startup-script"
        script.write_text(self.metadata["startup-script"])
        environment = {
            **self._service.environment,
            "HOME": str(home),
            "GCE_METADATA_HOST": f"127.0.0.1:{self._service.port}/vm/{self.name}",
        }
        self.process = subprocess.Popen(
            ["bash", str(script)],
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def preempt(self, seconds):
        """Announces the preemption, and deletes the VM when `seconds` are over."""
        self.is_preempted, self.status = True, "STOPPING"

        def delete():
            time.sleep(seconds)
            self._service.delete(self.name)

        threading.Thread(target=delete, daemon=True).start()

    def serial_port(self, start):
        data = self.log.read_bytes()
        lines = data.decode("utf-8", "replace").splitlines(keepends=True)
        text = "".join(f"Nov 25 10:00:00 vm google[1]: startup-script: {line}" for line in lines)
        return {"contents": text[start:], "start": str(start), "next": str(len(text))}

    def describe(self, base):
        return {
            **{key: value for key, value in self.body.items() if key != "networkInterfaces"},
            "id": "1",
            "status": self.status,
            "zone": f"{base}/zones/{self.zone}",
            "selfLink": f"{base}/zones/{self.zone}/instances/{self.name}",
        }


class ComputeEngine:
    """The service. `hosts` is the file of host names, /etc/hosts in the VMs.

    `without_capacity` has the pairs (machine type, zone) that cannot be rented.
    """

    def __init__(self, directory, hosts):
        self.directory, self._hosts = pathlib.Path(directory), pathlib.Path(hosts)
        self.vms, self.requests, self.without_capacity = {}, [], set()
        self.numbers, self._operations = itertools.count(1), {}
        self._lock = threading.RLock()

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"service": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.port = self._server.server_port
        programs = self.directory / "bin"
        programs.mkdir()
        # A VM's last command must not end this machine.
        _write_program(programs / "poweroff", "exit 0")
        if shutil.which("gcloud") is None:
            _write_program(programs / "gcloud", f'exec {sys.executable} {__file__} "$@"')
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            _ENDPOINT: f"http://127.0.0.1:{self.port}/compute/v1/",
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CORE_PROJECT": "p",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
            "CLOUDSDK_CONFIG": str(self.directory / "gcloud"),
        }
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        for name in list(self.vms):
            self.delete(name)

    def preempt(self, name, seconds=30.0):
        self.vms[name].preempt(seconds)

    def insert(self, zone, body):
        kind = body["machineType"].rpartition("/")[2]
        with self._lock:
            self.requests.append({"zone": zone, "kind": kind, **body})
            if (kind, zone) in self.without_capacity:
                return self._operation("insert", zone, body["name"], EXHAUSTED)
            vm = self.vms[body["name"]] = Vm(self, zone, body)
            with self._hosts.open("a") as file:
                file.write(f"{vm.address} {vm.name}\n")
        return self._operation("insert", zone, vm.name)

    def delete(self, name):
        with self._lock:
            vm = self.vms.pop(name, None)
            if vm is None:
                return 404, _error(404, f"The resource {name} was not found")
            vm.kill()
            # In place, because the file is mounted.
            lines = self._hosts.read_text().splitlines(keepends=True)
            self._hosts.write_text("".join(each for each in lines if vm.address not in each))
        return self._operation("delete", vm.zone, name)

    def reset(self, name):
        vm = self.vms[name]
        vm.kill()
        vm.start()
        return self._operation("reset", vm.zone, name)

    def _operation(self, kind, zone, name, error=None):
        base = f"http://127.0.0.1:{self.port}/compute/v1/projects/p"
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

    def answer(self, method, url, body):
        """Returns the status and the answer to a request."""
        path, _, query = url.partition("?")
        base = f"http://127.0.0.1:{self.port}/compute/v1/projects/p"
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
            case "GET", ["aggregated", "machineTypes"]:
                kinds = ("n1-standard-8", "n1-standard-16")
                return 200, {
                    "items": {
                        f"zones/{zone}": {
                            "machineTypes": [
                                {"name": kind, "zone": zone, "guestCpus": 8} for kind in kinds
                            ]
                        }
                        for zone in ZONES
                    }
                }
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
    service: ComputeEngine

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
            return self._metadata(self.service.vms.get(name), "/".join(rest))
        if self.path.startswith("/batch"):
            return self._batch(data)
        status, answer = self.service.answer(method, self.path, json.loads(data or b"{}"))
        return self._send(status, json.dumps(answer), "application/json")

    def _metadata(self, vm, key):
        """Answers as the metadata server of a VM; `key` follows /computeMetadata/v1/instance/."""
        if vm is None:
            return self._send(404, "", "text/plain")
        if key.startswith("preempted"):
            while "wait_for_change" in key and not vm.is_preempted:
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


def _write_program(path, line):
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


# A stand-in for `gcloud`, for the commands and flags that kdist uses.


def gcloud(arguments):
    """Returns what `gcloud` would print; exits as it does."""
    names = [each for each in arguments if not each.startswith("--")]
    flags = collections.defaultdict(str)
    flags |= dict(each[2:].partition("=")[::2] for each in arguments if each.startswith("--"))
    _, group, verb, *names = names
    zone = f"zones/{flags['zone']}/instances"
    if group == "machine-types":
        found = _ask("GET", "aggregated/machineTypes")["items"]
        return "\n".join(each.removeprefix("zones/") for each in found)
    if verb == "list":
        condition = flags["filter"].removeprefix("labels.kdist-job=")
        lists = _ask("GET", "aggregated/instances")["items"].values()
        vms = [vm for each in lists for vm in each["instances"]]
        return json.dumps([vm for vm in vms if vm["labels"]["kdist-job"] == condition])
    if verb == "get-serial-port-output":
        return json.dumps(_ask("GET", f"{zone}/{names[0]}/serialPort?start={flags['start']}"))
    for name in names:
        if verb == "create":
            _ask("POST", zone, _instance(name, flags))
        else:
            suffix = {"delete": "", "reset": "/reset"}[verb]
            _ask("DELETE" if verb == "delete" else "POST", f"{zone}/{name}{suffix}", {})
    return "[]"


def _instance(name, flags):
    files = (each.partition("=")[::2] for each in flags["metadata-from-file"].split(","))
    items = [{"key": key, "value": pathlib.Path(path).read_text()} for key, path in files]
    labels = dict([flags["labels"].split("=")])
    return {
        "name": name,
        "machineType": flags["machine-type"],
        "labels": labels,
        "metadata": {"items": items},
        "scheduling": {
            "provisioningModel": flags["provisioning-model"],
            "instanceTerminationAction": flags["instance-termination-action"],
            "maxRunDuration": {"seconds": flags["max-run-duration"].rstrip("s")},
        },
    }


def _ask(method, path, body=None):
    url = f"{os.environ[_ENDPOINT]}projects/p/{path}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method)) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"ERROR: {error.read().decode()}")
    if "error" in found:
        sys.exit(f"ERROR: (gcloud) Could not fetch resource: {found['error']}")
    return found


if __name__ == "__main__":
    assert re.fullmatch("compute", sys.argv[1])
    print(gcloud(sys.argv[1:]))
