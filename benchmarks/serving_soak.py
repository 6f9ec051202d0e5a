"""Soak test of the server while versions change, workers die, and clients misbehave.

  python -m benchmarks.serving_soak                  # 200,000 requests, a few minutes
  python -m benchmarks.serving_soak --count=20000 --workers=1

Prints the responses to steady and misbehaving clients, and the memory of the server. Exits with 1
if a response was wrong, or an accepted request was lost.
"""

import asyncio
import pathlib
import shutil
import sys
import tempfile

import numpy as np
from absl import flags

from benchmarks.serving.dialects import dialect
from benchmarks.serving.examples import Examples, Requests
from benchmarks.serving.models import MODELS, prepared
from benchmarks.serving.outcomes import RIGHT
from benchmarks.serving.servers import Command, Server
from benchmarks.serving.soak import Plan, soak
from kdist import program

FLAGS = flags.FLAGS

flags.DEFINE_integer("count", 200_000, "Number of correct responses to reach.", 1)
flags.DEFINE_integer("clients", 48, "Number of steady clients in a closed loop.", 1)
flags.DEFINE_integer("workers", 2, "Number of worker processes.", 1)
flags.DEFINE_float("pause_seconds", 3.0, "Seconds between events.", 0.1)
flags.DEFINE_enum("model", "small_resnet", sorted(MODELS), "Model to serve.")
flags.DEFINE_string(
    "models_dir", None, "Directory that keeps exported models; temporary by default."
)

# Statuses of requests that were rejected, not lost.
_REJECTED = {"429", "503"}


def main(_):
    with tempfile.TemporaryDirectory() as directory:
        kept, examples = prepared(FLAGS.model, FLAGS.models_dir or f"{directory}/kept")
        models = pathlib.Path(directory, "served", FLAGS.model)
        shutil.copytree(kept, models)
        requests = Requests(Examples.load(examples), dialect("rest"))
        plan = Plan(FLAGS.count, FLAGS.clients, FLAGS.pause_seconds)
        with Server(_command(models), cores=2) as server:
            story = asyncio.run(soak(server, models, requests, plan))
    return _report(story)


def _command(models):
    line = [sys.executable, "scripts/serve.py", f"--model_dir={models}", "--port={port}"]
    line += ["--grpc_port={grpc_port}", f"--workers={FLAGS.workers}"]
    return Command(line, "/readyz")


def _report(story):
    steady = story.steady
    print(f"{steady.answers[RIGHT]:,} correct responses in {steady.seconds:.0f} s", end=": ")
    print(f"{steady.per_second:,.0f} per second, p50 {steady.percentile_ms(50):.1f} ms", end=", ")
    print(f"p99 {steady.percentile_ms(99):.1f} ms")
    print(f"other responses to the steady clients: {steady.errors or 'none'}")
    for kind, number in sorted(story.events.items()):
        print(f"{number} x {kind}: {dict(story.others[kind])}")
    print(f"memory of all processes, MB, by tenths of the load: {_tenths(story.memory)}")
    lost = {kind: n for kind, n in steady.errors.items() if kind not in _REJECTED}
    wrong = sum(answers["wrong"] for answers in story.others.values())
    if lost or wrong:
        print(f"lost or wrong: {lost}, {wrong} wrong to others", file=sys.stderr)
        return 1
    return 0


def _tenths(memory):
    """Returns the median megabytes in each tenth of the requests."""
    answers, size = np.array(memory).T
    parts = np.minimum((answers * 10) // (answers.max() + 1), 9)
    return [round(float(np.median(size[parts == n])) / 1e6) for n in range(10) if n in parts]


if __name__ == "__main__":
    program.run(main)
