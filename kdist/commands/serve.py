"""Serves exported models over TensorFlow Serving's REST and gRPC APIs, with batching.

  kdist serve --model_dir=models/fashion
  curl -d '{"instances": [[…]]}' http://127.0.0.1:8501/v1/models/fashion:predict

  # several models, named after their directory or explicitly
  kdist serve --model_dir=models/fashion,digits=models/mnist

On SageMaker, Vertex AI, KServe, and Cloud Run, the environment sets ports, routes, and the model:

  kdist serve

A model directory contains versions written by kdist.serving.export: models/fashion/1 and so on.
The server serves the highest version, loads new versions while it runs, and unloads an old version
after its last request. SIGTERM or Ctrl-C ends the server after the last request; a second one ends
it immediately.
"""

import contextlib
import errno
import functools
import logging
import os
import re
import socket
import tempfile

from absl import flags

import kdist
from kdist import program
from kdist.launch import child_python
from kdist.serving.core.model_directory import versions
from kdist.serving.core.settings import TRUST_MODELS, BatchSettings, Objective, ServerLimits
from kdist.serving.platforms import PLATFORMS, find_platform, local_copies

FLAGS = flags.FLAGS
# Characters that a URL needs no escapes for. A colon would start the method.
_NAME = re.compile(r"[\w.-]+", re.ASCII)

with program.flag_group("Common"):
    flags.DEFINE_list(
        "model_dir",
        [],
        "Directories of exported models: DIR or NAME=DIR. Those at URLs, such as "
        "gs://bucket/models/m, are copied when the server starts. By default the one of the "
        "--platform.",
    )
    flags.DEFINE_enum(
        "platform",
        "auto",
        ["auto", "none", *PLATFORMS],
        "Hosting platform whose routes are served as well. It sets the defaults of --host, --port, "
        "--grpc_port, --end_seconds, and --body_mb. auto goes by the environment.",
    )
    flags.DEFINE_integer("port", 8501, "Port for REST; 0 is any free port.", 0, 65535)
    flags.DEFINE_integer(
        "grpc_port", 8500, "Port for gRPC; 0 is any free port, -1 disables gRPC.", -1, 65535
    )
    flags.DEFINE_string(
        "host", "127.0.0.1", "Address to listen at. By default only this machine can connect."
    )
    flags.DEFINE_integer(
        "workers",
        0,
        "Number of worker processes, each with a copy of the models. A worker that dies is "
        "replaced, and its requests are retried. 0: the server process itself runs the models. "
        "Workers load a new version one after the other and run no batch meanwhile, so with 1 "
        "requests wait for the load.",
        0,
        256,
    )
    flags.DEFINE_integer(
        "versions",
        1,
        "Number of versions of a model to serve, newest first. If none of them loads, an older "
        "one is served.",
        1,
    )
    flags.DEFINE_boolean(
        "trust_models",
        False,
        "Also load models that could run code or touch files of this machine: the server then "
        "does what their authors want. By default it refuses them and names the operations.",
    )

with program.flag_group("Batching"):
    flags.DEFINE_string(
        "batch_timeout_us",
        "auto",
        "Microseconds that the oldest request of a batch waits for others while the device is "
        "idle. auto measures the model and adapts to the load.",
    )
    flags.DEFINE_integer("max_batch", 32, "Maximum number of rows per batch.", 1, 65_536)
    flags.DEFINE_enum(
        "objective",
        "latency",
        ["latency", "throughput", "device_time"],
        "Objective of --batch_timeout_us=auto: minimal mean latency; maximal throughput within "
        "--p99_ms; or minimal device time, within --p99_ms if it is given.",
    )
    flags.DEFINE_float("p99_ms", None, "Upper bound on the 99th percentile of latency.", 0.001)

with program.flag_group("Limits"):
    flags.DEFINE_float(
        "request_seconds", 60.0, "Time limit for a request, including its time in the queue.", 0.001
    )
    flags.DEFINE_integer(
        "waiting_rows", 1024, "Capacity of the queue, in rows; further requests get status 429.", 1
    )
    flags.DEFINE_float("body_mb", 64.0, "Maximum size of a request, in megabytes.", 0.001)
    flags.DEFINE_float(
        "all_bodies_mb",
        1024.0,
        "Maximum size of all requests in flight, in megabytes; clients of further requests are "
        "asked to retry. Over gRPC, all_bodies_mb / body_mb messages are received at a time.",
    )
    flags.DEFINE_float(
        "memory_mb",
        None,
        "Memory of the server and its workers, in megabytes, above which requests get status 503. "
        "0: no limit. By default nine tenths of the container's or machine's memory.",
        0.0,
    )
    flags.DEFINE_float(
        "load_seconds",
        600.0,
        "Time limit for loading a version; one that takes longer is reported as failed.",
        0.001,
    )
    flags.DEFINE_float(
        "end_seconds",
        30.0,
        "Grace period for requests in flight after SIGTERM; a second SIGTERM ends it.",
        0.0,
    )

with program.flag_group("Write a file instead of serving"):
    flags.DEFINE_string(
        "tune",
        None,
        "Write a page with latency by timeout, simulated and measured, and the best timeout for "
        "several request rates. Takes about a minute.",
    )
    flags.DEFINE_string(
        "kubernetes",
        None,
        "Write a Kubernetes manifest (YAML) that serves the model in TensorFlow Serving's image. "
        "--model_dir=NAME=DIR names the model and the objects.",
    )
flags.mark_flags_as_mutual_exclusive(["tune", "kubernetes"])
flags.register_validator(
    "batch_timeout_us",
    lambda text: text == "auto" or re.fullmatch("[0-9]{1,8}", text),
    "must be auto, or an integer from 0 to 99999999",
)
program.accept_urls("model_dir")
program.writes_file("tune")


def main(_):
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if FLAGS.trust_models:
        os.environ[TRUST_MODELS] = "1"  # worker processes inherit it
    os.environ.update(child_python.variables())  # for the worker processes
    platform = find_platform(FLAGS.platform)
    if platform:
        apply_defaults(platform)
    with directories_to_serve(platform) as directories:
        run_with(parse_directories(directories), platform)


def run_with(models, platform):
    """Does what the flags ask for, with {name: directory} of the models."""
    check(models)
    if platform and platform.first_model:
        program.check_name("model", platform.first_model, list(models))
        models = {platform.first_model: models[platform.first_model], **models}
    if FLAGS.kubernetes:
        name, directory = single(models)
        named = kdist.serving.KubernetesOptions(name=name, model=name)
        print(kdist.serving.write_manifests(directory, FLAGS.kubernetes, named))
    elif FLAGS.tune:
        (_, directory), aim = single(models), objective()
        from kdist.serving.tune import tune_export  # TensorFlow

        tune_export(directory, FLAGS.tune, aim, FLAGS.max_batch, report=print)
    else:
        check_ports()
        checked = options(models, platform)
        kdist.serving.run(checked, on_ready=functools.partial(print, flush=True))


def check(models):
    """Checks the directories of the models and --host, before TensorFlow is imported.

    Raises:
        ValueError: a directory does not exist or holds no version, or the address is unknown.
    """
    for directory in models.values():
        if not versions(directory):
            raise ValueError(
                f"{directory} holds no version that loads: write one with kdist.serving.export"
            )
    try:
        socket.getaddrinfo(FLAGS.host, None)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"--host={FLAGS.host}: {error}; give an address of this machine, such as 127.0.0.1, or "
            "0.0.0.0 for all"
        ) from error


def check_ports():
    """Raises a ValueError if the server will not be able to listen, before TensorFlow is imported.

    The server itself reports a port that another program takes after this.
    """
    for name in ("port", "grpc_port"):
        if FLAGS[name].value <= 0:
            continue
        where = FLAGS.host, FLAGS[name].value
        family, *_, address = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                remedy = "give another port, or 0 for any free one"
                if error.errno == errno.EADDRNOTAVAIL:
                    remedy = "give an address of this machine, or 0.0.0.0 for all of them"
                elif error.errno == errno.EACCES:
                    remedy = "give a port above 1023, or 0 for any free one"
                raise ValueError(
                    f"--{name}={FLAGS[name].value} on --host={FLAGS.host}: {error.strerror}; "
                    f"{remedy}"
                ) from error


def single(models):
    """Returns (name, directory) of the only model."""
    if len(models) != 1:
        raise ValueError(f"pass one model instead of {', '.join(models)}")
    return next(iter(models.items()))


def apply_defaults(platform):
    """Makes what a platform asks for the default of flags."""
    logging.info("serving for --platform=%s", platform.name)
    given = platform.options()
    FLAGS.set_default("host", given["host"])
    FLAGS.set_default("port", platform.port)
    FLAGS.set_default("grpc_port", -1 if platform.grpc_port is None else platform.grpc_port)
    FLAGS.set_default("end_seconds", platform.end_seconds)
    if platform.body_bytes is not None:
        FLAGS.set_default("body_mb", platform.body_bytes * 1e-6)


@contextlib.contextmanager
def directories_to_serve(platform):
    """Yields the value of --model_dir, or the directories in which the platform keeps models.

    Models at URLs are copied to a temporary directory, which is removed in the end.
    """
    given = FLAGS.model_dir
    if platform and not given:
        url = platform.model_url
        given = [f"model={url}"] if url else platform.model_directories
    if not any("://" in each for each in given):  # no disk is needed, as in read-only containers
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="kdist-") as directory:
        yield local_copies(given, directory)


def options(models, platform=None):
    """Returns the options of the server."""
    automatic = FLAGS.batch_timeout_us == "auto"
    seconds = 0.0 if automatic else int(FLAGS.batch_timeout_us) * 1e-6
    settings = {
        "settings": BatchSettings(seconds, FLAGS.max_batch),
        "objective": objective() if automatic else None,
        "limits": ServerLimits(
            body_bytes=int(FLAGS.body_mb * 1e6),
            all_bodies_bytes=int(FLAGS.all_bodies_mb * 1e6),
            waiting_rows=FLAGS.waiting_rows,
            request_seconds=FLAGS.request_seconds,
            memory_bytes=None if FLAGS.memory_mb is None else int(FLAGS.memory_mb * 1e6),
            load_seconds=FLAGS.load_seconds,
        ),
    }
    return kdist.serving.ServerOptions(  # imports TensorFlow, so the settings are checked before
        models,
        port=FLAGS.port,
        grpc_port=None if FLAGS.grpc_port < 0 else FLAGS.grpc_port,
        host=FLAGS.host,
        workers=FLAGS.workers,
        newest=FLAGS.versions,
        end_seconds=FLAGS.end_seconds,
        platform=platform,
        **settings,
    )


def objective():
    """Returns the objective of the batch settings."""
    bound = None if FLAGS.p99_ms is None else FLAGS.p99_ms * 1e-3
    return Objective(FLAGS.objective, bound)


def parse_directories(texts):
    """Returns {name: directory} from DIR or NAME=DIR."""
    found = {}
    for each in texts:
        name, _, directory = each.partition("=")
        if not (directory and _NAME.fullmatch(name)):  # the "=" is part of the directory
            name, directory = os.path.basename(os.path.abspath(each)), each
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"the name {name!r} is not valid in a URL; pass another one as NAME=DIR"
            )
        if name in found:
            raise ValueError(f"two models are named {name!r}; name one by NAME=DIR")
        found[name] = directory
    if not found:
        raise ValueError("no model; pass its directory, such as --model_dir=models/fashion")
    return found


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    program.run(main)
