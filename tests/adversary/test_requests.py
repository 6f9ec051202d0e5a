"""Random requests over REST and gRPC: each gets an answer of its kind, and others their numbers.

KDIST_FUZZ_CASES=100000 sends more of them.
"""

import concurrent.futures
import os
import re
import socket
import threading

import grpc
import numpy as np
import psutil
import pytest

from kdist.serving.core.settings import ServerLimits
from tests.adversary import fuzzed_requests
from tests.serving.conftest import export_models
from tests.serving.running import SECONDS, running, unharmed

CASES = int(os.environ.get("KDIST_FUZZ_CASES", 600))
CLIENTS = 8
# The server and the clients of this test share a process.
MEMORY_BYTES = 1 << 30

# Status 500 would be an exception that nobody expected.
STATUSES = {100, 200, 400, 404, 405, 408, 413, 415, 417, 422, 429, 431, 501, 503, 505}
CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    # A client of this test that lacks an answer has sent less than it said.
    limits = ServerLimits(body_bytes=1 << 20, body_seconds=0.2)
    with running(export_models(tmp_path_factory.mktemp("models")), limits=limits) as it:
        yield it


@pytest.fixture(autouse=True)
def neighbour(served):
    """Sends valid requests meanwhile, and watches the memory."""

    def ask():
        response = served.post("/v1/models/first:predict", {"instances": [[0.5, 1, 2, 3]]})
        return response.status_code, np.round(response.json()["predictions"], 4).tolist()

    before, most, done = psutil.Process().memory_info().rss, [0], threading.Event()

    def watch():
        while not done.wait(0.05):
            most[0] = max(most[0], psutil.Process().memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    with unharmed(ask):
        yield
    done.set()
    thread.join(SECONDS)
    assert most[0] - before < MEMORY_BYTES


def each_case(ask):
    """Calls `ask` with the number of each case, in several threads; returns {number: fault}."""
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        faults = clients.map(ask, range(CASES))
        return {number: fault for number, fault in enumerate(faults) if fault}


def test_rest(served):
    statuses = set()

    def ask(number):
        with socket.create_connection(("127.0.0.1", served.port), SECONDS) as client:
            try:
                client.sendall(fuzzed_requests.rest_request(number))
                client.shutdown(socket.SHUT_WR)
            except OSError:  # it is refused before its end
                pass
            answer = _all_of(client)
        # A request that ends in its middle has no answer.
        for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer):
            statuses.add(int(status))
            if int(status) not in STATUSES:
                return answer[:500]
        return None

    assert not each_case(ask)
    assert {200, 400, 404, 405} <= statuses


def _all_of(client):
    """Returns what arrives until the server closes the connection."""
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:  # the server closed before it had read all
        pass
    return b"".join(parts)


def test_grpc(served):
    codes = set()
    with served.channel() as channel:
        predict = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")

        def ask(number):
            try:
                predict(fuzzed_requests.grpc_request(number), timeout=SECONDS)
                code = grpc.StatusCode.OK
            except grpc.RpcError as error:
                code = error.code()
                if code not in CODES:
                    return f"{code}: {error.details()}"
            codes.add(code)
            return None

        assert not each_case(ask)
    assert codes == CODES
