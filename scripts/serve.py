"""Serves exported models over TensorFlow Serving's REST and gRPC, batching requests.

  python scripts/serve.py --model_dir=models/fashion
  curl -d '{"instances": [[…]]}' http://127.0.0.1:8501/v1/models/fashion:predict

  # several models; what a name is, is the last part of its directory, or said
  python scripts/serve.py --model_dir=models/fashion,digits=models/mnist

A model's directory holds its versions, as kdist.serving.export writes them: models/fashion/1 and so
on. The highest is served; a new one is picked up while the server runs, and the old one ends when
its last request is answered. SIGTERM or Ctrl-C ends the server in the same way, a second one at
once.
"""

import functools
import logging
import os
import re

from absl import flags

import kdist
from kdist import program
from kdist.serving.settings import BatchSettings, Objective

FLAGS = flags.FLAGS
# What stands for itself in a URL; a colon would begin what is asked of the model.
_NAME = re.compile(r"[\w.-]+", re.ASCII)

flags.DEFINE_list("model_dir", [], "Directories of models' versions: DIR or NAME=DIR.")
flags.DEFINE_integer("port", 8501, "For REST; 0 is any free port.", 0, 65535)
flags.DEFINE_integer("grpc_port", 8500, "For gRPC; 0 is any free port, -1 none.", -1, 65535)
flags.DEFINE_string("host", "127.0.0.1", "To listen at; this machine alone unless you say so.")
flags.DEFINE_integer(
    "workers",
    0,
    "Processes that compute, each with a copy of the models; one that dies is replaced, and no "
    "request is lost by it. 0: the server's own process computes. Each in turn loads a new "
    "version, and computes nothing meanwhile: with 1, requests wait for that.",
    0,
)
flags.DEFINE_string(
    "batch_timeout_us",
    "auto",
    "Microseconds that the oldest request of a batch waits for others while the device is free; "
    "auto measures the model and follows the load.",
)
flags.DEFINE_integer("max_batch", 32, "Rows of a batch at most.", 1)
flags.DEFINE_enum(
    "objective",
    "latency",
    ["latency", "throughput", "device_time"],
    "--batch_timeout_us=auto: the least mean latency; the most requests within --p99_ms; or the "
    "least time of the device, within --p99_ms if it is given.",
)
flags.DEFINE_float("p99_ms", None, "Milliseconds that 99 of 100 requests may take.", 0.001)
flags.DEFINE_integer(
    "versions", 1, "Newest versions of a model that are served; an older one if none loads.", 1
)
flags.DEFINE_float("request_seconds", 60.0, "That a request may take, waiting included.", 0.001)
flags.DEFINE_integer("waiting_rows", 1024, "Rows that may wait; then requests get 429.", 1)
flags.DEFINE_float("body_mb", 64.0, "Megabytes of a request at most.", 0.001)
flags.DEFINE_float(
    "all_bodies_mb", 1024.0, "Megabytes of all requests under way; more are told to come again."
)
flags.DEFINE_float(
    "end_seconds", 30.0, "For requests to end in, on SIGTERM; a second one ends all at once.", 0.0
)
flags.DEFINE_string(
    "tune",
    None,
    "Write this page instead of serving: latency by timeout, simulated and measured, with the "
    "choice for several rates. Takes about a minute.",
)
flags.DEFINE_string(
    "kubernetes",
    None,
    "Write this YAML file instead of serving: the model in TensorFlow Serving's image.",
)


def main(_):
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    models = directories(FLAGS.model_dir)
    if FLAGS.kubernetes:
        print(kdist.serving.write_manifests(only(models), FLAGS.kubernetes))
    elif FLAGS.tune:
        from kdist.serving.tuning_exports import tune_export  # TensorFlow

        tune_export(only(models), FLAGS.tune, objective(), FLAGS.max_batch)
    else:
        kdist.serving.run(options(models), on_ready=functools.partial(print, flush=True))


def only(models):
    """The directory, of one model."""
    if len(models) != 1:
        raise ValueError(f"name one model: there are {', '.join(models)}")
    (directory,) = models.values()
    return directory


def options(models):
    """What the flags say."""
    automatic = FLAGS.batch_timeout_us == "auto"
    return kdist.serving.ServerOptions(
        models,
        port=FLAGS.port,
        grpc_port=None if FLAGS.grpc_port < 0 else FLAGS.grpc_port,
        host=FLAGS.host,
        workers=FLAGS.workers,
        settings=BatchSettings(0.0 if automatic else timeout_seconds(), FLAGS.max_batch),
        objective=objective() if automatic else None,
        limits=kdist.serving.Limits(
            body_bytes=int(FLAGS.body_mb * 1e6),
            all_bodies_bytes=int(FLAGS.all_bodies_mb * 1e6),
            waiting_rows=FLAGS.waiting_rows,
            request_seconds=FLAGS.request_seconds,
        ),
        newest=FLAGS.versions,
        end_seconds=FLAGS.end_seconds,
    )


def objective():
    """What settings are chosen for."""
    bound = None if FLAGS.p99_ms is None else FLAGS.p99_ms * 1e-3
    return Objective(FLAGS.objective, bound)


def timeout_seconds():
    """Of a fixed timeout."""
    try:
        return int(FLAGS.batch_timeout_us) * 1e-6
    except ValueError as error:
        raise ValueError(
            f"--batch_timeout_us={FLAGS.batch_timeout_us}: a whole number, or auto"
        ) from error


def directories(given):
    """{name: directory}, of DIR or NAME=DIR."""
    found = {}
    for each in given:
        name, _, directory = each.partition("=")
        if not (directory and _NAME.fullmatch(name)):  # the "=" is one of the directory's
            name, directory = os.path.basename(os.path.abspath(each)), each
        if not _NAME.fullmatch(name):
            raise ValueError(f"a model called {name!r} has no URL: give another name, as NAME=DIR")
        if name in found:
            raise ValueError(f"two models are called {name!r}: give one as NAME=DIR")
        found[name] = directory
    if not found:
        raise ValueError("name a directory: --model_dir=models/fashion")
    return found


if __name__ == "__main__":
    program.run(main)
