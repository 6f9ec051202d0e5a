"""Stand-in for a Kubernetes cluster with Indexed Jobs, whose pods are machines inside this one.

    with KubernetesCluster(directory) as cluster:
        os.environ.update(cluster.environment)        # for `kubectl`
        cluster.claims["runs"] = directory
        handle = kdist.launch.engines.get_engine("kubernetes").submit(job)
        cluster.evict("cats-1")

It follows the documentation of Kubernetes 1.33 for what kdist writes: completion indexes, pod
failure policies, the success policy, back-off and time limits, secrets in variables, and claims.
Images are not used: the command of a pod runs with the files of this machine.
"""

import contextlib
import datetime
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator

import yaml

from kdist.testing.clouds import kubectl
from kdist.testing.clouds.hosts import Network, child_of, write_program

_LOOK_SECONDS = 0.05
# Kubernetes waits ten seconds before it replaces a failed pod.
_BACK_OFF_SECONDS = 0.5
_RESOURCES = {"jobs.batch": "Job", "service": "Service", "secret": "Secret"}
_RESOURCES["networkpolicy"] = "NetworkPolicy"


class KubectlError(Exception):
    """An error that `kubectl` reports."""


class Pod:
    """A pod of an Indexed Job: one container, on a machine of its own.

    Args:
        cluster: Its cluster.
        job: The job, as it was applied.
        index: Its completion index.

    Attributes:
        name: Its name and host name, without the random end of Kubernetes: job and index.
        lines: Pairs of the time and the text of each line that it has written.
        exit_code: Exit code of its container; `None` while it runs.
        is_disrupted: True once it is evicted.
    """

    def __init__(self, cluster: "KubernetesCluster", job: dict, index: int):
        spec = job["spec"]["template"]["spec"]
        [container] = spec["containers"]
        self.name, self.index = f"{job['metadata']['name']}-{index}", index
        self.labels = job["spec"]["template"]["metadata"]["labels"]
        self.is_disrupted, self.exit_code, self.finished = False, None, ""
        self.lines: list[tuple[str, str]] = []
        self._grace, self._network = spec["terminationGracePeriodSeconds"], cluster.network
        self._host = self._network.add(self.name, f"{self.name}.{spec['subdomain']}")
        claims = {
            each["name"]: each.get("persistentVolumeClaim") for each in spec.get("volumes", ())
        }
        for mount in container.get("volumeMounts", ()):
            if claim := claims[mount["name"]]:
                directory = cluster.claims[claim["claimName"]]
                self._host.run(["mount", "--bind", str(directory), mount["mountPath"]])
        self._process = self._host.popen(
            container["command"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **_image_environment(),
                **cluster.variables(container),
                "JOB_COMPLETION_INDEX": str(index),
            },
        )
        threading.Thread(target=self._wait, daemon=True).start()

    def _read(self):
        """Keeps the output."""
        for line in self._process.stdout:
            self.lines.append((_now(), line.decode(errors="replace").rstrip("\n")))

    def _wait(self):
        """Keeps the exit code of the first process, whose end is that of all others."""
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        code = self._process.wait()
        self._network.remove(self._host)
        reader.join()
        self.finished, self.exit_code = _now(), code if code >= 0 else 128 - code

    def end(self):
        """Sends SIGTERM to the container, and SIGKILL when its grace period is over."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
            os.kill(child_of(self._process.pid), signal.SIGTERM)
        timer = threading.Timer(self._grace, self._host.power_off)
        timer.daemon = True
        timer.start()

    def describe(self) -> dict:
        """Returns the pod as `kubectl get` does."""
        state: dict = {"running": {}}
        if self.exit_code is not None:
            state = {"terminated": {"exitCode": self.exit_code, "finishedAt": self.finished}}
        metadata = {"name": self.name, "labels": self.labels}
        return {"metadata": metadata, "status": {"containerStatuses": [{"state": state}]}}


class IndexedJob:
    """A Job of a `KubernetesCluster`, and what its controller does.

    Attributes:
        pods: All pods so far, also those that have ended.
        num_failed: Number of failures that count against the back-off limit.
    """

    def __init__(self, cluster: "KubernetesCluster", applied: dict):
        self._cluster, self.applied = cluster, applied
        self._spec, self._began = applied["spec"], time.monotonic()
        self._started = _now()
        self._conditions: list[dict] = []
        self.pods: list[Pod] = []
        self.num_failed = 0
        self._active: dict[int, Pod] = {}
        self._done: set[int] = set()
        self._not_before = 0.0

    def look(self):
        """Creates pods that are missing, and judges those that have ended."""
        if self._conditions:
            return
        for index, pod in list(self._active.items()):
            if pod.exit_code is not None:
                del self._active[index]
                self._judge(pod)
        first = {each["succeededIndexes"] for each in self._spec["successPolicy"]["rules"]}
        if {str(index) for index in self._done} & first:
            self._end("Complete", "SuccessPolicy")
        elif time.monotonic() - self._began > self._spec.get("activeDeadlineSeconds", float("inf")):
            self._end("Failed", "DeadlineExceeded")
        elif not self._conditions and time.monotonic() > self._not_before:
            for index in set(range(self._spec["completions"])) - self._done - set(self._active):
                self._active[index] = Pod(self._cluster, self.applied, index)
                self.pods.append(self._active[index])

    def _judge(self, pod):
        if pod.exit_code == 0:
            self._done.add(pod.index)
            return
        rules = self._spec["podFailurePolicy"]["rules"]
        action = next((rule["action"] for rule in rules if _matches(rule, pod)), "Count")
        if action == "FailJob":
            self._end("Failed", "PodFailurePolicy")
        elif action == "Count":
            self.num_failed += 1
            self._not_before = time.monotonic() + _BACK_OFF_SECONDS
            if self.num_failed > self._spec["backoffLimit"]:
                self._end("Failed", "BackoffLimitExceeded")

    def _end(self, kind, reason):
        fields = {"type": kind, "status": "True", "reason": reason, "lastTransitionTime": _now()}
        self._conditions = [fields]
        self.end_pods()

    def end_pods(self):
        """Ends the pods that run."""
        for pod in self._active.values():
            pod.end()

    def describe(self) -> dict:
        """Returns the job as `kubectl get` does."""
        status = {
            "active": len(self._active),
            "ready": len(self._active),
            "failed": self.num_failed,
            "startTime": self._started,
            "conditions": self._conditions,
        }
        metadata = {"creationTimestamp": self._started, **self.applied["metadata"]}
        return {**self.applied, "metadata": metadata, "status": status}


class KubernetesCluster:
    """A cluster, as a context manager.

    Example:

        with KubernetesCluster(directory) as cluster:
            os.environ.update(cluster.environment)
            cluster.claims["runs"] = directory
            handle = kdist.launch.engines.get_engine("kubernetes").submit(job)
            cluster.evict("cats-1")
            assert handle.follow(print) == 0

    Args:
        directory: Empty directory for its files.

    Attributes:
        environment: Environment variables of programs that call `kubectl`.
        claims: Directories by names of PersistentVolumeClaims. The path at which pods see a claim
            must exist on this machine.
        jobs: The jobs by name; `jobs["cats"].num_failed` counts failures.
    """

    def __init__(self, directory: str | os.PathLike):
        self._directory = pathlib.Path(directory)
        self.claims: dict[str, str | os.PathLike] = {}
        self.jobs: dict[str, IndexedJob] = {}
        self._objects: dict[tuple[str, str], dict] = {}
        self._lock, self._stack = threading.RLock(), contextlib.ExitStack()
        self._is_over = threading.Event()

    def __enter__(self):
        self.network = self._stack.enter_context(Network(self._directory))
        handler = type("Handler", (_Handler,), {"cluster": self})
        server = self._stack.enter_context(
            http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        )
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        self._stack.callback(server.shutdown)
        controller = threading.Thread(target=self._control, daemon=True)
        controller.start()
        self._stack.callback(controller.join)
        self._stack.callback(self._is_over.set)
        programs = self._directory / "bin"
        programs.mkdir()
        write_program(programs / "kubectl", f'exec {sys.executable} -I {kubectl.__file__} "$@"')
        self.environment = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            kubectl.URL: f"http://127.0.0.1:{server.server_port}",
        }
        return self

    def __exit__(self, *_):
        self._stack.close()

    def evict(self, name: str):
        """Evicts a pod, as Kubernetes does before it removes a spot machine."""
        with self._lock:
            [pod] = [pod for pod in self._pods() if pod.name == name and pod.exit_code is None]
            pod.is_disrupted = True
            pod.end()

    def variables(self, container: dict) -> dict[str, str]:
        """Returns the environment variables of a container."""
        found = {}
        for each in container["env"]:
            if "value" in each:
                found[each["name"]] = each["value"]
            else:
                key = each["valueFrom"]["secretKeyRef"]
                secret = self._objects.get(("Secret", key["name"]), {"stringData": {}})
                if (text := secret["stringData"].get(key["key"])) is not None:
                    found[each["name"]] = text
        return found

    def _control(self):
        while not self._is_over.wait(_LOOK_SECONDS):
            with self._lock:
                for job in self.jobs.values():
                    job.look()

    def _pods(self):
        return [pod for job in self.jobs.values() for pod in job.pods]

    def answer(self, arguments: list[str], text: str) -> Iterable[str]:
        """Returns what `kubectl` prints, line by line.

        Raises:
            KubectlError: If it would fail.
        """
        verb, *names = [each for each in arguments if not each.startswith("-")]
        label = arguments[arguments.index("-l") + 1] if "-l" in arguments else ""
        labels = dict(each.split("=") for each in label.split(",") if each)
        if verb == "logs":
            since = [each for each in arguments if each.startswith("--since-time=")]
            return self._logs(labels, since[0].partition("=")[2] if since else "")
        with self._lock:
            if verb == "apply":
                return self._apply(yaml.safe_load_all(text))
            kinds, _, name = names[0].partition("/")
            if verb == "get" and kinds == "pods":
                pods = [pod.describe() for pod in self._pods() if _has(pod.labels, labels)]
                return [json.dumps({"items": pods})]
            if unknown := [each for each in kinds.split(",") if each not in _RESOURCES]:
                raise KubectlError(f'the server doesn\'t have a resource type "{unknown[0]}"')
            if verb == "get":
                return [json.dumps(self.jobs[name].describe())] if name in self.jobs else []
            return self._delete([_RESOURCES[each] for each in kinds.split(",")], name, labels)

    def _apply(self, objects):
        lines = []
        for each in objects:
            name = each["metadata"]["name"]
            if each["kind"] == "Job":
                self.jobs[name] = IndexedJob(self, each)
            self._objects[each["kind"], name] = each
            lines.append(f"{each['kind'].lower()}/{name} created\n")
        return lines

    def _delete(self, kinds, name, labels):
        for kind, found in list(self._objects):
            own = self._objects[kind, found]["metadata"]["labels"]
            if kind in kinds and name in ("", found) and _has(own, labels):
                del self._objects[kind, found]
                if kind == "Job":
                    self.jobs.pop(found).end_pods()
        return []

    def _logs(self, labels, since) -> Iterator[str]:
        """Yields the lines of the pods that run, until they end."""
        pods = [pod for pod in self._pods() if _has(pod.labels, labels)]
        positions = dict.fromkeys(pods, 0)
        while True:
            ended = all(pod.exit_code is not None for pod in pods)
            for pod in pods:
                lines = pod.lines[positions[pod] :]
                positions[pod] += len(lines)
                yield from (f"[pod/{pod.name}/task] {line}\n" for at, line in lines if at >= since)
            if ended:
                return
            time.sleep(_LOOK_SECONDS)


class _Handler(http.server.BaseHTTPRequestHandler):
    cluster: KubernetesCluster

    def log_message(self, *_):
        """Keeps the output of a test free of requests."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            code, lines = 200, self.cluster.answer(**asked)
        except KubectlError as error:
            code, lines = 400, [str(error)]
        self.send_response(code)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client has ended
            for line in lines:
                self.wfile.write(line.encode())


def _image_environment():
    """Returns the environment variables of all pods: `python` is that of the test."""
    paths = (os.path.dirname(sys.executable), os.environ["PATH"])
    return {"PATH": os.pathsep.join(paths), "HOME": os.environ.get("HOME", "/")}


def _matches(rule, pod):
    """Returns whether a rule of a pod failure policy applies."""
    if "onPodConditions" in rule:
        wanted = {each["type"] for each in rule["onPodConditions"]}
        return pod.is_disrupted and "DisruptionTarget" in wanted
    return pod.exit_code in rule["onExitCodes"]["values"]


def _has(labels, wanted):
    return wanted.items() <= labels.items()


def _now():
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
