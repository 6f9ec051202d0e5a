"""Serves exported models over TensorFlow Serving's REST and gRPC, batching requests.

  python scripts/serve.py --model_dir=models/fashion
  curl -d '{"instances": [[…]]}' http://127.0.0.1:8501/v1/models/fashion:predict

  # several models; what a name is, is the last part of its directory, or said
  python scripts/serve.py --model_dir=models/fashion,digits=models/mnist

A model's directory holds its versions, as kdist.serving.export writes them: models/fashion/1 and so
on. The highest is served; a new one is picked up while the server runs, and the old one ends when
its last request is answered. SIGTERM or Ctrl-C ends the server in the same way.
"""

import functools
import logging
import os

from absl import flags

from kdist import program

FLAGS = flags.FLAGS

flags.DEFINE_list("model_dir", [], "Directories of models' versions: DIR or NAME=DIR.")
flags.DEFINE_integer("port", 8501, "For REST; 0 is any free port.", 0, 65535)
flags.DEFINE_integer("grpc_port", 8500, "For gRPC; 0 is any free port, -1 none.", -1, 65535)
flags.DEFINE_string("host", "127.0.0.1", "To listen at; this machine alone unless you say so.")
flags.DEFINE_integer(
    "workers",
    0,
    "Processes that compute, each with a copy of the models; one that dies is replaced, and no "
    "request is lost by it. 0: the server's own process computes.",
    0,
)
flags.DEFINE_string(
    "batch_timeout_us",
    "auto",
    "Microseconds that the oldest request of a batch waits for others while the device is free, or "
    "auto: follows the load.",
)
flags.DEFINE_integer("max_batch", 32, "Rows of a batch at most.", 1)
flags.DEFINE_integer("versions", 1, "Newest versions of a model that are served.", 1)


def main(_):
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # Only here, as --help needs none of it.
    from kdist.serving import server
    from kdist.serving.settings import BatchSettings

    automatic = FLAGS.batch_timeout_us == "auto"
    seconds = 0.0 if automatic else int(FLAGS.batch_timeout_us) * 1e-6
    server.run(
        server.ServerOptions(
            directories(FLAGS.model_dir),
            FLAGS.port,
            None if FLAGS.grpc_port < 0 else FLAGS.grpc_port,
            FLAGS.host,
            FLAGS.workers,
            BatchSettings(seconds, FLAGS.max_batch),
            newest=FLAGS.versions,
        ),
        on_ready=functools.partial(print, flush=True),
    )


def directories(given):
    """{name: directory}, of DIR or NAME=DIR."""
    found = {}
    for each in given:
        name, _, directory = each.rpartition("=")
        name = name or os.path.basename(os.path.abspath(directory))
        if name in found:
            raise ValueError(f"two models are called {name!r}: give one as NAME=DIR")
        found[name] = directory
    if not found:
        raise ValueError("name a directory: --model_dir=models/fashion")
    return found


if __name__ == "__main__":
    program.run(main)
