"""Serves a model on three Ray nodes on this machine, one of which is killed under load.

Run as a program: `python ray_program.py DIRECTORY`, which holds `fashion/1`, `staged/2` and
`expected.json`. The last line of its output says, as JSON, what was seen.
"""

import contextlib
import http.client
import ipaddress
import json
import os
import pathlib
import signal
import sys
import threading
import time
import urllib.error
import urllib.request

import grpc
import numpy as np
import psutil
import ray
from ray import serve
from ray._private import ray_constants
from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions

from kdist.launch.local_engine import reserve_ports
from kdist.serving.ray import BuildArguments, build

# Otherwise Ray takes this machine's address in the network, and listens there.
ray_constants.ENABLE_RAY_CLUSTER = False
HOST = "127.0.0.1"
NODE = {
    "node_ip_address": HOST,
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
    "dashboard_agent_listen_port": 0,
}
CLIENTS = 8


class Clients:
    """Clients that send requests without a pause, and retry a failed request once."""

    def __init__(self, url, rows, expected):
        self.url, self.rows = f"{url}/v1/models/fashion", rows
        self.expected = [np.array(each) for each in expected]
        self.asked, self.again, self.lost = 0, [], []
        self.worst = 0.0
        self.versions = set()
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[n]) for n in range(CLIENTS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number):
        row = number % len(self.rows)
        body = json.dumps({"instances": [self.rows[row]]}).encode()
        while not self._end.is_set():
            try:
                self._check(row, self._answer(body))
            except (OSError, http.client.HTTPException) as error:
                self.again.append(str(error))
                try:
                    self._check(row, self._answer(body))
                except Exception as error:
                    self.lost.append(repr(error))
            except Exception as error:  # an answer that is none
                self.lost.append(repr(error))
            self.asked += 1

    def _answer(self, body):
        with urllib.request.urlopen(f"{self.url}:predict", body, timeout=30) as answer:
            return json.load(answer)["predictions"]

    def _check(self, row, predictions):
        errors = [np.abs(np.array(predictions) - each[row]).max() for each in self.expected]
        self.versions.add(int(np.argmin(errors)) + 1)
        self.worst = max(self.worst, float(min(errors)))


def main(directory):
    directory = pathlib.Path(directory)
    known = json.loads((directory / "expected.json").read_text())
    with reserve_ports(1) as [port], nodes(directory, 2) as cluster:
        serve.start("HeadOnly", HTTPOptions(host=HOST, port=port))
        arguments = {
            "models": {"fashion": str(directory / "fashion")},
            "batch_timeout_us": 20_000,
            "max_replicas": 2,
            "target_ongoing_requests": 2,
            "autoscaling": {"upscale_delay_s": 1.0, "look_back_period_s": 2.0},
        }
        serve.run(build(BuildArguments.model_validate(arguments)))
        seen = {"without TensorFlow": "tensorflow" not in sys.modules}
        seen["open to a network"] = [(name, stranger(at)) for name, at in listeners()]
        seen |= story(f"http://{HOST}:{port}", directory, known, cluster)
        serve.shutdown()
    print(json.dumps(seen))


def story(url, directory, known, cluster):
    seen = {"replicas": [len(replicas())]}
    seen["refused"] = [refused(url, body) for body in ({"instances": [[1.0]]}, {"inputs": None})]
    with Clients(url, known["rows"], known["outputs"]) as clients:
        wait_until(both_run)
        seen["replicas"].append(len(replicas()))
        seen["nodes"] = len(set(replicas().values()))
        seen["asked"] = [clients.asked]
        killed = kill_a_node(cluster)
        wait_until(lambda: running() < 2)
        wait_until(both_run)
        seen["replicas"].append(len(replicas()))
        seen["killed node serves"] = killed in replicas().values()
        seen["asked"].append(clients.asked)
        (directory / "staged" / "2").rename(directory / "fashion" / "2")
        wait_until(lambda: only_answers_of(clients, 2))
        seen["asked"].append(clients.asked)
        seen["metrics"] = read(f"{url}/metrics")  # of either replica
    return seen | {"again": clients.again, "lost": clients.lost, "worst": clients.worst}


def both_run():
    return len(replicas()) == 2 and running() == 2


def kill_a_node(cluster):
    """Kills the node of a replica; returns its process id."""
    nodes = {each.all_processes["raylet"][0].process.pid: each for each in cluster.worker_nodes}
    replica, node = next(iter(replicas().items()))
    os.kill(replica, signal.SIGKILL)  # by itself it would outlive its node for a while
    cluster.remove_node(nodes[node], allow_graceful=False)
    return node


def only_answers_of(clients, version, seconds=2):
    """Checks that all responses come from a set of replicas for some seconds."""
    clients.versions.clear()
    asked = clients.asked
    time.sleep(seconds)
    return clients.versions == {version} and clients.asked > asked + 20


@contextlib.contextmanager
def nodes(directory, number, head_cpus=0):
    """Yields a cluster on loopback: a head, and a number of other nodes with two CPUs."""
    # `Cluster` writes its address there, and fails on machines where Ray has never run.
    pathlib.Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
    # Sockets lie in it, and their names may not be long.
    cluster = Cluster(
        True, head_node_args={"num_cpus": head_cpus, "temp_dir": str(directory / "r"), **NODE}
    )
    try:
        for _ in range(number):
            cluster.add_node(num_cpus=2, **NODE)
        ray.init(cluster.address, log_to_driver=False, _node_ip_address=HOST)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def replicas():
    """Returns {process id of a replica: process id of its node}."""
    found = {}
    for node in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            for process in node.children():
                with contextlib.suppress(psutil.Error):
                    if "ray::ServeReplica" in " ".join(process.cmdline()):
                        found[process.pid] = node.pid
    return found


def running():
    deployment = serve.status().applications["default"].deployments["kdist"]
    return deployment.replica_states.get("RUNNING", 0)


def listeners():
    """Returns (name, port) of processes that listen on more than loopback."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("inet"):
                address = ipaddress.ip_address(each.laddr.ip.removeprefix("::ffff:"))
                if each.status == psutil.CONN_LISTEN and not address.is_loopback:
                    yield " ".join(process.cmdline()), each.laddr.port


def stranger(port):
    """Returns the error of a client without the token; otherwise Ray would unpickle its message."""
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        try:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=10)
        except grpc.RpcError as error:
            return error.code().name


def refused(url, body):
    try:
        urllib.request.urlopen(f"{url}/v1/models/fashion:predict", json.dumps(body).encode())
    except urllib.error.HTTPError as error:
        return [error.code, json.load(error)["error"]]


def read(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def wait_until(condition, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition} did not come true: {serve.status()}")
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1])
