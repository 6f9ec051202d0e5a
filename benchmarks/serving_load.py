"""Loads kdist's server and its rivals equally in one session, and prints the ratios.

  # once: environments for the rivals, some minutes and 4 GB; from the repository root
  python -m benchmarks.serving_load --prepare

  # both models, 1 and 32 clients, about a quarter of an hour; saved in results/
  python -m benchmarks.serving_load --save

  # kdist only, with a fixed timeout and Poisson arrivals of 200 requests per second
  python -m benchmarks.serving_load --contenders=kdist,unbatched --timeout_us=2000 \\
    --models=mobilenet_v2 --clients= --rates=200

Each server in turn is started, loaded by one process of clients, and ended. Each round begins with
another server. Requests are single examples, and queued requests all differ. Each response is
compared with the model's prediction; only correct responses count. If a contender has several
settings, a trial with the largest load selects the best. The tables show medians over rounds, and
medians of the ratios within each round. The contenders:

  kdist          kdist's server with --batch_timeout_us=auto
  kdist_grpc     the same over gRPC
  kdist_single   kdist's server with batches of one request
  unbatched      minimal program on the same web server that computes each request on arrival
  ray, mlserver, bentoml   rivals that batch as their guides advise, with their best settings

All load the same SavedModel with the same number of threads, and receive the same JSON. Only
MLServer has another protocol (V2). Memory is the resident memory of all processes of a server.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

from absl import flags

from benchmarks import tables as markdown
from benchmarks.serving import environments, models, tables
from benchmarks.serving.contenders import CONTENDERS, OURS, Options, this_python, with_timeout
from benchmarks.serving.loads import Limits
from benchmarks.serving.servers import ROOT
from benchmarks.serving.sessions import Load, Served, Session
from kdist import program

FLAGS = flags.FLAGS

DEFAULT_CONTENDERS = [name for name in CONTENDERS if name not in ("kdist_grpc", "kdist_single")]

# Rivals' environments.
flags.DEFINE_boolean("prepare", False, "Create the rivals' environments, and measure nothing.")
flags.DEFINE_string(
    "rivals_dir",
    str(ROOT / ".venv-rivals"),
    "Directory of the environments; rivals without one are skipped.",
)

# Models and servers.
flags.DEFINE_list("models", list(models.MODELS), f"Models: {', '.join(models.MODELS)}.")
flags.DEFINE_string(
    "models_dir",
    None,
    "Directory that keeps exported models for later sessions; temporary by default.",
)
flags.DEFINE_list("contenders", DEFAULT_CONTENDERS, f"Servers: {', '.join(CONTENDERS)}.")
flags.DEFINE_string("server", str(ROOT / "scripts" / "serve.py"), "Program of kdist's server.")
flags.DEFINE_string("timeout_us", "auto", "--batch_timeout_us of kdist's server.")
flags.DEFINE_integer("workers", 0, "--workers of kdist's server.", lower_bound=0)
flags.DEFINE_integer("max_batch", 32, "Rows of the largest batch, for all servers.", lower_bound=1)
flags.DEFINE_integer("cores", 2, "Number of threads of TensorFlow.", lower_bound=1)

# The load.
flags.DEFINE_list("clients", ["1", "32"], "Numbers of clients in closed loops; may be empty.")
flags.DEFINE_list("rates", [], "Rates of open loops, in requests per second.")
flags.DEFINE_float("seconds", 5, "Seconds of each load.", lower_bound=0.1)
flags.DEFINE_integer("count", None, "Largest number of requests of a load.", lower_bound=1)
flags.DEFINE_float(
    "warm_up_seconds", 3, "Seconds of each load that are not counted.", lower_bound=0
)
flags.DEFINE_float("trial_seconds", 3, "Seconds of the trial of a setting.", lower_bound=0.1)
flags.DEFINE_integer("rounds", 3, "Measurements of each server.", lower_bound=1)
flags.DEFINE_float(
    "timeout", 120, "Time limit for the start of a server, in seconds.", lower_bound=1
)

# Results.
flags.DEFINE_boolean("save", False, "Write the tables to --results_dir, with commit and machine.")
flags.DEFINE_string(
    "results_dir",
    str(pathlib.Path(__file__).parent / "results"),
    "Directory that --save writes to.",
)


def main(_):
    rivals = pathlib.Path(FLAGS.rivals_dir).resolve()
    if FLAGS.prepare:
        return _prepare(rivals)
    program.check_items("models", models.MODELS)
    program.check_items("contenders", CONTENDERS)
    loads = _loads()
    contenders = _possible(rivals)
    with tempfile.TemporaryDirectory() as new:
        directory = pathlib.Path(FLAGS.models_dir or new).resolve()
        texts = [_compared(name, directory, contenders, loads, rivals) for name in FLAGS.models]
    if FLAGS.save:
        _save("\n\n".join(texts))
    return 0


def _prepare(rivals):
    for name in environments.NAMES:
        print(f"{name} …", flush=True)
        environments.prepare(rivals, name)
    print(f"ready in {rivals}")
    return 0


def _loads():
    loads = [Load(clients=_positive("clients", value, int)) for value in FLAGS.clients if value]
    loads += [Load(rate=_positive("rates", value, float)) for value in FLAGS.rates if value]
    if not loads:
        raise ValueError("no load: give --clients=32, --rates=100, or both")
    return loads


def _positive(flag, text, kind):
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise ValueError(f"--{flag}: {text!r} is no number above 0")
    return value


def _possible(rivals):
    """{contender: interpreter}, without those that are not installed."""
    found = {}
    for name in FLAGS.contenders:
        contender = CONTENDERS[name]
        python = this_python()
        if contender.environment:
            python = environments.python(rivals, contender.environment)
        if not python or not _imports(python, contender.imports):
            print(f"{contender.title} is left out: not in {python or rivals} (--prepare)\n")
            continue
        if name in (OURS, "kdist_grpc"):
            contender = with_timeout(contender, FLAGS.timeout_us)
        found[contender] = python
    if not found:
        raise ValueError("nothing is left to be measured; add --contenders=kdist,unbatched")
    return found


def _imports(python, package):
    """Whether it is installed there; imports as little as can be."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def _compared(name, directory, contenders, loads, rivals):
    served = Served(name, *models.prepared(name, directory))
    limits = Limits(FLAGS.seconds, FLAGS.count, FLAGS.warm_up_seconds)
    options = Options(FLAGS.max_batch, os.path.abspath(FLAGS.server), FLAGS.workers, rivals)
    session = Session(served, options, FLAGS.cores, limits, FLAGS.timeout)

    def say(text):
        print(f"{name}: {text}", file=sys.stderr, flush=True)

    heaviest = max(loads, key=lambda load: (load.clients or 0, load.rate or 0))
    entries = session.best_settings(contenders, heaviest, FLAGS.trial_seconds, say)
    measured = session.measure(entries, loads, FLAGS.rounds, say)
    text = tables.report(name, measured)
    print(f"{text}\n", flush=True)
    return text


def _save(text):
    about = {
        "threads": FLAGS.cores,
        "rounds": f"{FLAGS.rounds} of {FLAGS.seconds:g} s",
        "batches": f"of {FLAGS.max_batch} at most",
        "asked": tables.bodies([CONTENDERS[name] for name in FLAGS.contenders]),
    }
    path = markdown.save(text, pathlib.Path(FLAGS.results_dir), ROOT, about, "Servers compared")
    print("saved", path)


if __name__ == "__main__":
    program.run(main)
