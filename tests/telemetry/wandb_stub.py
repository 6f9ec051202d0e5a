"""A stand-in for the W&B server on loopback: as much as wandb 0.31 needs to send a run.

with Stub() as stub:
    os.environ |= {"WANDB_BASE_URL": stub.url, "WANDB_API_KEY": "k" * 40}
    ...
    stub.runs["1a2b3c4d"].history   # rows, as they came
    stub.mode = "frozen"            # from now on no answer

It shows what the client sends, and is no proof that the real server would take it. As a program it
prints its address and takes modes as lines on its standard input, until that ends.
"""

import base64
import collections
import dataclasses
import gzip
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODES = (
    "healthy",
    "frozen",  # takes requests and never answers
    "dead",  # as if nobody were there: connections end at once
    "refusing",  # 503
    "expired",  # 401: the key is not accepted
)


@dataclasses.dataclass
class Run:
    """Data that the server received of one run."""

    history: list[dict] = dataclasses.field(default_factory=list)
    summary: dict = dataclasses.field(default_factory=dict)
    config: dict = dataclasses.field(default_factory=dict)
    variables: dict = dataclasses.field(default_factory=dict)
    exit_code: int | None = None


class Stub(ThreadingHTTPServer):
    """The server; it listens from the start and ends with its `with`.

    Attributes:
        mode: one of MODES; may be changed at any time.
        runs: by their id.
        uploads: bytes of files by name.
        artifacts: types of those that were asked for.
        keys: API keys that came.
        operations: how often each GraphQL operation came.
        sweep: text of the file of a sweep, for an agent.
        trials: parameters of the runs to start, by the id of the run. An agent takes the next one
            when it runs none.
        takers: the agent that took each run.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, mode="healthy"):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode = mode
        self.runs = collections.defaultdict(Run)
        self.uploads = {}
        self.artifacts = []
        self.keys = set()
        self.operations = collections.Counter()
        self.sweep = ""
        self.trials = {}
        self.takers = {}
        self.closing = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client that went away is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self._is_up():
            self._answer({})

    def do_PUT(self):
        body = self._body()
        if self._is_up():
            self.server.uploads[self.path.removeprefix("/storage/")] = body
            self._answer({})

    def do_POST(self):
        body = self._body()
        if not self._is_up():
            return
        if self.path.endswith("/file_stream"):
            run = self.server.runs[self.path.split("/")[-2]]
            _take_stream(run, json.loads(body))
            self._answer({"exitcode": None, "limits": {}})
        elif self.path.endswith("/graphql"):
            asked = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"]).group(1)
            self.server.operations[operation] += 1
            self._answer({"data": self._graphql(operation, asked.get("variables") or {})})
        else:
            self._answer({})

    def _body(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        zipped = self.headers.get("Content-Encoding") == "gzip"
        return gzip.decompress(body) if zipped else body

    def _is_up(self):
        """Returns whether to answer normally; otherwise the answer has been sent."""
        kind, _, login = (self.headers.get("Authorization") or "").partition(" ")
        if kind == "Basic":
            self.server.keys.add(base64.b64decode(login).decode().partition(":")[2])
        mode = self.server.mode
        if mode == "frozen":
            self.server.closing.wait()
        if mode in ("dead", "frozen"):
            self.close_connection = True
        elif mode == "refusing":
            self._answer({"error": "down"}, 503)
        elif mode == "expired":
            self._answer({"errors": [{"message": "user is not logged in"}]}, 401)
        return mode == "healthy"

    def _answer(self, content, code=200):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _graphql(self, operation, given):
        if operation == "Viewer":
            teams = {"edges": []}
            return {"viewer": {"id": "V", "entity": "me", "username": "me", "teams": teams}}
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": self._bucket(given), "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": self._storage(name)} for name in given["files"]]
            made = {"runID": "R", "uploadHeaders": [], "files": files}
            return {"createRunFiles": made}
        if operation == "ArtifactType":
            return {"project": None}  # an unknown type, which is made with its first artifact
        if operation == "CreateArtifact":
            kind = given.get("artifactTypeName") or given.get("input", {}).get("artifactTypeName")
            self.server.artifacts.append(kind)
            artifact = {"id": "A", "state": "PENDING", "artifactSequence": {"id": "S"}}
            return {"createArtifact": {"artifact": artifact}}
        if operation == "CreateArtifactManifest":
            manifest = {"id": "M", "file": self._file("manifest")}
            return {"createArtifactManifest": {"artifactManifest": manifest}}
        if operation == "CreateArtifactFiles":
            specs = given.get("artifactFiles") or given["input"]["artifactFiles"]
            edges = [{"node": self._artifact_file(spec)} for spec in specs]
            return {"createArtifactFiles": {"files": {"edges": edges}}}
        if operation == "UpdateArtifactManifest":
            manifest = {"id": "M", "file": self._file("manifest")}
            return {"updateArtifactManifest": {"artifactManifest": manifest}}
        if operation == "CommitArtifact":
            return {"commitArtifact": {"artifact": {"id": "A", "digest": ""}}}
        if operation == "SweepWithRuns":
            sweep = {"id": "S", "config": self.server.sweep, "runs": {"edges": []}}
            return {"project": {"sweep": sweep}}
        if operation == "CreateAgent":
            number = self.server.operations[operation]
            return {"createAgent": {"agent": {"id": f"agent-{number}"}}}
        if operation == "Heartbeat":
            commands = json.dumps(self._next_trial(given))
            return {"agentHeartbeat": {"agent": {"id": given["id"]}, "commands": commands}}
        return {}

    def _next_trial(self, given):
        """Returns the command to start the next run of the sweep, if the agent runs none."""
        if json.loads(given.get("runState") or "{}") or not self.server.trials:
            return []
        name = next(iter(self.server.trials))
        values = self.server.trials.pop(name)
        self.server.takers[name] = given["id"]
        return [{"type": "run", "run_id": name, "program": "", "args": _parameters(values)}]

    def _bucket(self, given):
        name = given.get("name") or given.get("id")
        run = self.server.runs[name]
        run.variables.update({key: value for key, value in given.items() if value is not None})
        if given.get("config"):
            run.config.update(json.loads(given["config"]))
        project = {"id": "P", "name": given.get("project"), "entity": {"id": "E", "name": "me"}}
        return {
            "id": f"ID-{name}",
            "name": name,
            "displayName": given.get("displayName") or name,
            "config": given.get("config") or "{}",
            "historyLineCount": 0,
            "project": project,
        }

    def _storage(self, name):
        return f"{self.server.url}/storage/{name}"

    def _file(self, name):
        return {
            "id": "F",
            "name": name,
            "displayName": name,
            "uploadUrl": self._storage(name),
            "uploadHeaders": [],
        }

    def _artifact_file(self, spec):
        file = self._file(spec["name"])
        return {**file, "artifact": {"id": "A"}, "storagePath": None, "uploadMultipartUrls": None}


def _parameters(values):
    return {name: {"value": value} for name, value in values.items()}


def _take_stream(run, sent):
    for name, file in (sent.get("files") or {}).items():
        if name == "wandb-history.jsonl":
            run.history += map(json.loads, file["content"])
        elif name == "wandb-summary.json":
            run.summary = json.loads(file["content"][-1])
    if sent.get("complete"):
        run.exit_code = sent.get("exitcode")


if __name__ == "__main__":
    with Stub() as server:
        print(server.url, flush=True)
        for line in sys.stdin:
            server.mode = line.strip()
            print(server.mode, flush=True)
