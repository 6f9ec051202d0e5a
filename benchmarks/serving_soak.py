"""An hour's worth of requests, while versions change, workers die and clients misbehave.

  python -m benchmarks.serving_soak                  # 200,000 requests, a few minutes
  python -m benchmarks.serving_soak --count=20000 --workers=1

Prints what the steady clients and the misbehaving ones were answered, and the server's memory. Ends
with 1 if an answer was wrong, or a request that was taken was lost.
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

flags.DEFINE_integer("count", 200_000, "Requests to be answered rightly.", 1)
flags.DEFINE_integer("clients", 48, "Steady clients, each of which waits for its answer.", 1)
flags.DEFINE_integer("workers", 2, "Processes that compute.", 1)
flags.DEFINE_float("pause_seconds", 3.0, "Between events.", 0.1)
flags.DEFINE_enum("model", "small_resnet", sorted(MODELS), "What is served.")
flags.DEFINE_string("models_dir", None, "Where models are kept; by default they are made anew.")

# What a client may be told: that it was not taken.
_REFUSED = {"429", "503"}


def main(_):
    with tempfile.TemporaryDirectory() as directory:
        kept, examples = prepared(FLAGS.model, FLAGS.models_dir or f"{directory}/kept")
        models = pathlib.Path(directory, "served", FLAGS.model)
        shutil.copytree(kept, models)
        requests = Requests(Examples.load(examples), dialect("rest"))
        plan = Plan(FLAGS.count, FLAGS.clients, FLAGS.pause_seconds)
        with Server(_command(models), cores=2) as server:
            story = asyncio.run(soak(server, models, requests, plan))
    return _tell(story)


def _command(models):
    line = [sys.executable, "scripts/serve.py", f"--model_dir={models}", "--port={port}"]
    line += ["--grpc_port={grpc_port}", f"--workers={FLAGS.workers}"]
    return Command(line, "/readyz")


def _tell(story):
    steady = story.steady
    print(f"{steady.answers[RIGHT]:,} right answers in {steady.seconds:.0f} s", end=": ")
    print(f"{steady.per_second:,.0f} a second, p50 {steady.percentile_ms(50):.1f} ms", end=", ")
    print(f"p99 {steady.percentile_ms(99):.1f} ms")
    print(f"other answers to the steady clients: {steady.errors or 'none'}")
    for kind, number in sorted(story.events.items()):
        print(f"{number} x {kind}: {dict(story.others[kind])}")
    print(f"memory of all processes, MB, by tenths of the load: {_tenths(story.memory)}")
    lost = {kind: n for kind, n in steady.errors.items() if kind not in _REFUSED}
    wrong = sum(answers["wrong"] for answers in story.others.values())
    if lost or wrong:
        print(f"lost or wrong: {lost}, {wrong} wrong to others", file=sys.stderr)
        return 1
    return 0


def _tenths(memory):
    """Median megabytes in each tenth of the requests."""
    answers, size = np.array(memory).T
    parts = np.minimum((answers * 10) // (answers.max() + 1), 9)
    return [round(float(np.median(size[parts == n])) / 1e6) for n in range(10) if n in parts]


if __name__ == "__main__":
    program.run(main)
