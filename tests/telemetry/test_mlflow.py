"""MLflow runs and models, on a real server with SQLite on loopback.

All of MLflow needs older packages than constraints.txt pins (setup.cfg), so that these tests run in
an environment of their own: pip install '.[test]' mlflow.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request

import numpy as np
import pytest

import kdist
from kdist.launch.local_engine import reserve_ports
from kdist.run_directory import RunDirectory
from kdist.telemetry import MlflowWriter
from tests.telemetry.waiting import wait_until

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("mlflow.server")  # which mlflow-skinny lacks

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def running(command, url, log):
    """Runs a server until the block ends; yields when it answers at `url`."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                # mlflow starts uvicorn of the same environment.
                "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
                # Without the processes that evaluate language models.
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            },
            start_new_session=True,
        )

    def answers():
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=2).close()
            return True
        return False

    try:
        wait_until(answers, 240)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Returns the URI of a server."""
    path = tmp_path_factory.mktemp("mlflow")
    with reserve_ports(1) as (port,):
        uri = f"http://127.0.0.1:{port}"
        command = ["server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
        command += [f"--backend-store-uri=sqlite:///{path}/mlflow.db"]
        command += [f"--artifacts-destination={path}/artifacts"]
        with running(command, f"{uri}/health", path / "server.log"):
            yield uri


def test_a_run_and_the_model_that_mlflow_serves(server, tmp_path):
    run = RunDirectory.create(tmp_path / "runs" / "first", {"model": "mlp"})
    config = {"model": "mlp", "batch": {"global": 32}}
    writer = MlflowWriter(run.path, server, "digits", config=config, close_seconds=240)
    for epoch in (1, 2):
        writer.write({"kind": "epoch", "epoch": epoch, "examples": 64 * epoch, "loss": 1 / epoch})
    writer.write_device(
        {"time": 1.8e9, "seconds": 3.5, "host": "a", "device": "gpu/0", "watts": 70}
    )
    writer.close()

    changed = {**config, "model": "changed"}  # the run is resumed
    writer = MlflowWriter(run.path, server, "digits", config=changed, close_seconds=240)
    writer.write({"kind": "epoch", "epoch": 3, "examples": 192, "loss": 0.25})
    writer.write_summary({"test_accuracy": 0.9, "verdict": ["fast"]})
    model = kdist.models.mlp((4, 4, 1), 3)
    version = kdist.serving.export(model, tmp_path / "models" / "digits", examples={})
    writer.write_model(version, {"test_accuracy": 0.9}, aliases=["best"])
    writer.close()

    client = mlflow.MlflowClient(server)
    (experiment,) = [e for e in client.search_experiments() if e.name == "digits"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
    assert found.data.params == {"model": "mlp", "batch.global": "32"}
    assert found.data.metrics["test_accuracy"] == 0.9
    losses = client.get_metric_history(found.info.run_id, "epoch/loss")
    assert [(each.step, each.value) for each in losses] == [(64, 1.0), (128, 0.5), (192, 0.25)]
    (watts,) = client.get_metric_history(found.info.run_id, "gpu/0/watts")
    assert (watts.step, watts.value) == (3, 70.0)
    assert "summary.json" in [file.path for file in client.list_artifacts(found.info.run_id)]

    copy = client.download_artifacts(found.info.run_id, "digits", str(tmp_path))
    images = np.random.default_rng(0).random((5, 4, 4, 1)).astype("float32")
    expected = model(images, training=False).numpy()
    with reserve_ports(1) as (port,):
        url = f"http://127.0.0.1:{port}"
        command = ["models", "serve", f"--model-uri={copy}", "--env-manager=local"]
        command += ["--host=127.0.0.1", f"--port={port}"]
        with running(command, f"{url}/ping", tmp_path / "serve.log"):
            body = json.dumps({"inputs": images.tolist()}).encode()
            request = urllib.request.Request(
                f"{url}/invocations", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                predictions = json.load(answer)["predictions"]
    np.testing.assert_allclose(predictions, expected, rtol=1e-5)


def test_a_server_that_does_not_answer_is_reported_once(tmp_path, capfd):
    with reserve_ports(1) as (port,):
        writer = MlflowWriter(tmp_path, f"http://127.0.0.1:{port}", close_seconds=120)
        for step in range(100):
            writer.write({"kind": "train", "epoch": 1, "examples": step, "loss": 0.5})
        writer.close()
    assert capfd.readouterr().err.count("MLflow: no run was created") == 1
