"""Split models in the server, each on its devices."""

import json
import sys
import urllib.request

import numpy as np
import pytest

from benchmarks.serving.servers import Command, Server
from kdist.serving.exporting.export import export
from tests.serving.split_models import MODELS, inputs_of, predicted, split_model


def asked(port, name, inputs):
    url = f"http://127.0.0.1:{port}/v1/models/{name}:predict"
    body = json.dumps({"inputs": {name: x.tolist() for name, x in inputs.items()}}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        return np.array(json.load(answer)["outputs"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [0, 1])
def test_split_models_are_served_where_they_lie(workers, tmp_path):
    expected = {}
    for kind in MODELS:
        model = split_model(kind)
        export(model, tmp_path / kind, placement="kept")
        expected[kind] = inputs_of(model), predicted(model, inputs_of(model))
    directories = ",".join(str(tmp_path / kind) for kind in MODELS)
    line = [sys.executable, "scripts/serve.py", f"--model_dir={directories}", "--port={port}"]
    line += ["--grpc_port={grpc_port}", f"--workers={workers}"]
    with Server(Command(line, "/readyz"), cores=2) as server:
        for kind, (inputs, outputs) in expected.items():
            found = asked(server.port, kind, inputs)
            np.testing.assert_allclose(found, outputs, atol=1e-6, rtol=1e-6)
