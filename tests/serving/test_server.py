"""Tests of `kdist serve` as a user runs it."""

import ast
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading

import grpc
import numpy as np
import psutil
import pytest
import requests
import yaml
from tensorflow_serving.apis import prediction_service_pb2_grpc

from kdist.exit_codes import INTERRUPTED
from kdist.serving.core.model_directory import write_serving_files
from kdist.serving.core.settings import BatchSettings
from tests.serving.running import SECONDS, predict_request, save_times

PROGRAM = pathlib.Path(__file__).parents[2] / "scripts" / "serve.py"
FREE = ["--port=0", "--grpc_port=0"]
START_SECONDS = 180  # six servers that start at once on two cores take 50 s
ROW = {"instances": [[2.0]]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "m"
    save_times(path / "1", 3)
    return path


def command(*flags):
    return [sys.executable, str(PROGRAM), *flags]


def run(*flags):
    return subprocess.run(
        command(*flags), capture_output=True, text=True, timeout=SECONDS, check=False
    )


@contextlib.contextmanager
def program(*flags, stderr=subprocess.DEVNULL, **environment):
    """Yields (process, REST address, gRPC address) when the server is ready."""
    process = subprocess.Popen(
        command(*flags),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **environment},
    )
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"kdist serves .*: http://(\S+?)(?:, gRPC at (\S+))?\n", line)
        assert found, line
        yield process, *found.groups()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
        process.wait(SECONDS)
        process.stdout.close()


@pytest.mark.slow
def test_it_serves_curl_on_loopback_alone_and_answers_what_it_has_taken(directory):
    with program(f"--model_dir=any={directory}", "--max_batch=2", *FREE) as (process, rest, rpc):
        url = f"http://{rest}/v1/models/any"
        answer = subprocess.run(
            ["curl", "-sS", "-d", json.dumps(ROW), f"{url}:predict"],
            capture_output=True,
            timeout=SECONDS,
            check=True,
        )
        assert json.loads(answer.stdout) == {"predictions": [[6.0]]}
        assert requests.get(f"http://{rest}/readyz", timeout=SECONDS).text == "ready\n"
        assert rpc.startswith("127.0.0.1:")
        me = psutil.Process(process.pid)
        listening = {
            each.laddr
            for one in (me, *me.children(recursive=True))
            for each in one.net_connections()
            if each.status == psutil.CONN_LISTEN
        }
        # gRPC's sockets are of IPv6, for IPv4 addresses.
        found = {f"{each.ip.removeprefix('::ffff:')}:{each.port}" for each in listening}
        assert found == {rest, rpc}
        # A body of which one half comes after the server has been told to end.
        host, port = rest.split(":")
        body = json.dumps(ROW).encode()
        with socket.create_connection((host, int(port)), SECONDS) as client:
            head = b"POST /v1/models/any:predict HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
            client.sendall(head + body[:9])
            assert requests.get(url, timeout=SECONDS).status_code == 200
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(requests.ConnectionError):
                while True:  # until it listens no more
                    requests.get(url, timeout=SECONDS)
            client.sendall(body[9:])
            assert client.recv(9999).endswith(b'{"predictions":[[6.0]]}')
        assert process.wait(SECONDS) == 0


@pytest.mark.slow
def test_on_a_platform_and_told_twice_it_ends_at_once(directory):
    """The environment is Vertex AI's; a flag that is given comes before it."""
    platform = {
        "AIP_HTTP_PORT": "0",
        "AIP_STORAGE_URI": directory.as_uri(),
        "AIP_HEALTH_ROUTE": "/isalive",
        "AIP_PREDICT_ROUTE": "/predict",
    }
    flags = ("--host=127.0.0.1", "--max_batch=1")
    with program(*flags, stderr=subprocess.PIPE, **platform) as (process, rest, rpc):
        assert rpc is None
        assert requests.get(f"http://{rest}/isalive", timeout=SECONDS).status_code == 200
        answer = requests.post(f"http://{rest}/predict", json=ROW, timeout=SECONDS)
        assert answer.json() == {"predictions": [[6.0]]}
        large = {"instances": [[2.0]] * 400_000}
        answer = requests.post(f"http://{rest}/predict", json=large, timeout=SECONDS)
        assert (answer.status_code, "1,500,000" in answer.text) == (413, True)
        host, port = rest.split(":")
        head = b"POST /v1/models/m:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        with socket.create_connection((host, int(port)), SECONDS) as client:
            client.sendall(head)  # which it would wait for, for 20 s
            assert requests.get(f"http://{rest}/healthz", timeout=SECONDS).status_code == 200
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(requests.ConnectionError):
                while True:  # until it listens no more
                    requests.get(f"http://{rest}/healthz", timeout=SECONDS)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == INTERRUPTED
    with process.stderr:
        logged = process.stderr.read()
    assert "a second signal ends it immediately" in logged
    assert "ended by a second signal" in logged


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("models/fashion", {"fashion": "models/fashion"}),
        ("m=models/fashion", {"m": "models/fashion"}),
        ("runs/lr=0.1/export", {"export": "runs/lr=0.1/export"}),
        ("m=runs/lr=0.1/export", {"m": "runs/lr=0.1/export"}),
        ("a=1,b=2", {"a": "1", "b": "2"}),
    ],
)
def test_names_of_directories(given, found):
    code = "import sys; from kdist.commands import serve; print(serve.parse_directories("
    command = [sys.executable, "-c", f"{code}sys.argv[1].split(',')))", given]
    out = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert ast.literal_eval(out.stdout) == found


def test_local_models_need_no_temporary_directory():
    """Containers of servers often have a file system that cannot be written."""
    code = """if True:
        import sys, tempfile
        from kdist.commands import serve
        del tempfile.TemporaryDirectory
        serve.FLAGS(sys.argv)
        with serve.directories_to_serve(None) as found:
            print(found)
    """
    command = [sys.executable, "-c", code, "--model_dir=models/a,b=models/c"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert out.stdout == "['models/a', 'b=models/c']\n"


def test_objects_of_kubernetes_are_named_by_the_flag(tmp_path):
    (tmp_path / "my_model" / "1").mkdir(parents=True)
    (tmp_path / "my_model" / "1" / "saved_model.pb").touch()
    write_serving_files(tmp_path / "my_model", BatchSettings())
    file = tmp_path / "shirts.yaml"
    process = run(f"--model_dir=shirts={tmp_path / 'my_model'}", f"--kubernetes={file}")
    assert process.returncode == 0, process.stderr
    objects = list(yaml.safe_load_all(file.read_text()))
    assert {each["metadata"]["name"] for each in objects} == {"shirts"}
    assert "--model_name=shirts" in file.read_text()


@pytest.mark.exhaustive
def test_workers_end_with_the_server(directory):
    with program(f"--model_dir={directory}", "--workers=2", "--max_batch=2", *FREE) as it:
        process, rest, _ = it
        url = f"http://{rest}/v1/models/m:predict"
        assert requests.post(url, json=ROW, timeout=SECONDS).json() == {"predictions": [[6.0]]}
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
        assert not psutil.wait_procs(children, SECONDS)[1]


@pytest.mark.slow
def test_workers_end_when_the_server_is_killed(directory):
    with program(f"--model_dir={directory}", "--workers=2", "--max_batch=2", *FREE) as it:
        children = psutil.Process(it[0].pid).children(recursive=True)
        it[0].kill()
        assert not psutil.wait_procs(children, SECONDS)[1]


@pytest.mark.exhaustive
def test_it_ends_before_cloud_run_kills_it(directory):
    """Cloud Run waits 10 seconds, and a client whose body never ends must not take longer."""
    platform = {"PORT": "0", "K_SERVICE": "m"}
    flags = (f"--model_dir={directory}", "--host=127.0.0.1", "--max_batch=1")
    with program(*flags, **platform) as (process, rest, _):
        host, port = rest.split(":")
        head = b"POST /v1/models/m:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        with socket.create_connection((host, int(port)), SECONDS) as client:
            client.sendall(head)
            assert requests.get(f"http://{rest}/healthz", timeout=SECONDS).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0


@pytest.mark.exhaustive
def test_no_grpc_if_so_told(directory):
    with program(f"--model_dir={directory}", "--port=0", "--grpc_port=-1", "--max_batch=1") as it:
        assert it[2] is None


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["port", "grpc_port"])
def test_a_port_in_use(directory, flag):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = [each for each in FREE if not each.startswith(f"--{flag}=")]
        process = run(f"--model_dir={directory}", f"--{flag}={port}", *flags)
    assert process.returncode == 1
    assert f"--{flag}={port} on --host=127.0.0.1" in process.stderr
    assert "give another port, or 0" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.slow
def test_an_address_of_another_machine(directory):
    process = run(f"--model_dir={directory}", "--host=192.0.2.1", "--port=8501")
    assert process.returncode == 1
    assert "give an address of this machine" in process.stderr
    assert "another port" not in process.stderr


def test_help():
    process = run("--help")
    assert "curl -d" in process.stdout
    assert "--model_dir" in process.stdout
    assert "tensorflow" not in process.stderr.lower()


@pytest.mark.slow
def test_silent_clients_keep_nobody_out_where_descriptors_are_few(directory, monkeypatch):
    """400 of them connect to each port of a server that may open 256 files."""
    few = ["prlimit", "--nofile=256:256", *command(f"--model_dir={directory}", *FREE)]
    monkeypatch.setattr(sys.modules[__name__], "command", lambda *flags: few)
    request = predict_request("m", x=np.ones((1, 1), "float32"))
    with program() as (_, rest, rpc), contextlib.ExitStack() as stack:
        for address in (rest, rpc):
            host, port = address.split(":")
            for _ in range(400):
                stack.enter_context(socket.create_connection((host, int(port)), SECONDS))
            answer = requests.post(f"http://{rest}/v1/models/m:predict", json=ROW, timeout=SECONDS)
            assert answer.json() == {"predictions": [[6.0]]}
            with grpc.insecure_channel(rpc) as channel:
                stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
                assert stub.Predict(request, timeout=SECONDS, wait_for_ready=True).outputs["y"]
