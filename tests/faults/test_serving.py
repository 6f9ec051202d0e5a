"""A server under load while workers are killed, versions change, and clients misbehave."""

import asyncio
import shutil
import sys

import pytest

from benchmarks.serving.dialects import dialect
from benchmarks.serving.examples import Examples, Requests
from benchmarks.serving.models import prepared
from benchmarks.serving.outcomes import RIGHT
from benchmarks.serving.servers import Command, Server
from benchmarks.serving.soak import Plan, soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
RIGHT_OR_REJECTED = {RIGHT, "429"}


def test_no_response_is_wrong_and_no_accepted_request_is_lost(tmp_path):
    kept, examples = prepared("small_resnet", tmp_path / "kept")
    served = tmp_path / "small_resnet"
    shutil.copytree(kept, served)
    line = [sys.executable, "scripts/serve.py", f"--model_dir={served}", "--port={port}"]
    command = Command([*line, "--grpc_port={grpc_port}", "--workers=2"], "/readyz")
    requests = Requests(Examples.load(examples), dialect("rest"))
    plan = Plan(count=12_000, clients=16, pause_seconds=1.0, flood_size=400)
    with Server(command, cores=2) as server:
        story = asyncio.run(asyncio.wait_for(soak(server, served, requests, plan), 300))
    assert set(story.steady.answers) <= RIGHT_OR_REJECTED
    assert story.steady.answers[RIGHT] >= plan.count
    assert set(story.events) == set(plan.events)
    assert not any(answers["wrong"] for answers in story.others.values())
    assert set(story.others["flood"]) <= RIGHT_OR_REJECTED
    assert set(story.others["slow"]) <= {RIGHT}
