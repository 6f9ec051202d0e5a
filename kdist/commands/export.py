"""Exports a trained model to a directory that `kdist serve` or TensorFlow Serving reads.

  # the newest model of a run, as the next version of models/fashion
  kdist export runs/a --output=models/fashion
  kdist serve --model_dir=models/fashion

  # to a bucket, from which servers on other machines read it; also from a bucket
  kdist export runs/a --output=gs://bucket/models/fashion
  kdist export gs://bucket/cats/a --output=models/fashion

  # any model that Keras has saved, with names of its outputs
  kdist export best.keras --output=models/pets --classes=cat,dog

  # a model with layers of your own, which are in my_code.py
  kdist export runs/mine --output=models/mine --code=my_code.py

The newest model of a run is that after its last complete epoch. Of a run in a bucket it is the best
one, which --save_best keeps. The directory contains one folder per version; a server that runs
loads the new one, except from a bucket. It prints the directory of the version.
"""

import contextlib
import pathlib
import re

from absl import flags

from kdist import program
from kdist.commands.training_run.user_code import check_module, custom_objects
from kdist.mirror.store import fetched, is_url
from kdist.run_directory import BEST, RunDirectory, check_writable
from kdist.serving.core.model_directory import versions
from kdist.serving.core.settings import BatchSettings
from kdist.serving.exporting.bucket import check_version, next_version

FLAGS = flags.FLAGS
# Files of `kdist.callbacks.EpochCheckpoint`, which imports Keras. Number 0 is not trained.
_EPOCH = re.compile(r"epoch-([0-9]+)\.keras")

with program.flag_group("Export"):
    flags.DEFINE_string(
        "output",
        None,
        "Directory or URL of all versions of the model, such as models/fashion or "
        "gs://bucket/models/fashion. Its last part is the model's name.",
    )
    flags.DEFINE_integer(
        "version",
        None,
        "Version to write; by default one more than the highest that exists.",
        lower_bound=1,
    )
    flags.DEFINE_list("classes", None, "Names of the model's outputs, in order.")
    flags.DEFINE_string(
        "code",
        None,
        "Python file or module with the layers and functions of the model that are not Keras's, "
        "such as my_code.py. It is imported.",
    )
    flags.DEFINE_integer(
        "max_batch", 32, "Maximum number of rows per batch, for TensorFlow Serving.", 1, 65_536
    )
    flags.DEFINE_boolean(
        "warm_up", True, "Add requests with which a server warms up (needs kdist[serve])."
    )


program.accept_urls("output")


def main(arguments):
    with model_file(arguments[1:]) as source:
        check_output()
        program.check_backend()
        if FLAGS.code is not None:
            check_module(FLAGS.code)
        from kdist.serving.exporting.export import export  # after all checks, as it takes seconds

        version = export(
            load_model(source),
            FLAGS.output,
            FLAGS.version,
            classes=FLAGS.classes,
            settings=BatchSettings(0.002, FLAGS.max_batch),
            examples=None if FLAGS.warm_up else {},
        )
    given = arguments[1] if is_url(arguments[1]) else source
    serve = program.command("serve", f"--model_dir={FLAGS.output}")
    print(f"{given} is exported to {version}; serve it: {serve}")


def load_model(source):
    """Returns the model of a file.

    Raises:
        ValueError: the file names a class or function that is not Keras's, without --code.
    """
    import keras

    known = {} if FLAGS.code is None else custom_objects(FLAGS.code)
    try:
        return keras.saving.load_model(source, known, compile=False)
    except (TypeError, ValueError) as error:
        if "safe_mode" in str(error):
            raise ValueError(
                f"{source} contains a lambda, which Keras does not load from files, as it may be "
                "any program; give the function a name and pass --code, or export the model in "
                "its training: kdist train --export"
            ) from error
        found = re.search("Could not locate [a-z]+ '([^']*)'", str(error))
        if found is None:
            raise
        raise ValueError(
            f"{source} contains {found[1]}, which is not Keras's and "
            + (f"not in {FLAGS.code}" if FLAGS.code else "unknown here")
            + "; pass the Python file or module that defines it: --code=my_code.py"
        ) from error


@contextlib.contextmanager
def model_file(arguments):
    """Yields the `.keras` file to export: the one that is given, or the newest of a run.

    That of a URL is copied to a temporary directory, which is removed in the end.

    Raises:
        ValueError: there are several arguments, or no model.
        OSError: the URL cannot be read.
    """
    if len(arguments) > 1:
        raise ValueError(f"pass one run directory or .keras file instead of {len(arguments)}")
    if not is_url(arguments[0]):
        yield _local_model(pathlib.Path(arguments[0]))
        return
    url = arguments[0].rstrip("/")
    parent, _, name = url.rpartition("/") if url.endswith(".keras") else (url, "", BEST)
    with fetched(parent, [name]) as directory:
        if not (directory / name).exists():
            raise ValueError(
                f"{parent} has no {name}; runs with --save_best have one. Pass the URL of a .keras "
                "file, or the run directory on its own disk"
            )
        yield directory / name


def _local_model(path):
    if path.suffix == ".keras" and path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"{path} is neither a run directory nor a .keras file")
    files = RunDirectory(path).checkpoints.glob("epoch-*.keras")
    epochs = {int(number[1]): file for file in files if (number := _EPOCH.fullmatch(file.name))}
    if not any(epochs):
        raise ValueError(
            f"{path} has no model in checkpoints/ after an epoch of training; pass the directory "
            "of a run of `kdist train`, or a .keras file"
        )
    return epochs[max(epochs)]


def check_output():
    """Checks --output and --version, before TensorFlow is imported.

    Raises:
        ValueError: there is no --output, or the version exists.
        OSError: the directory cannot be written, or the URL cannot be read.
    """
    if not FLAGS.output:
        raise ValueError("pass a directory for the model: --output=models/fashion")
    if is_url(FLAGS.output):
        next_version(FLAGS.output)
        if FLAGS.version is not None:
            check_version(FLAGS.output, FLAGS.version)
        return
    output = pathlib.Path(FLAGS.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output={output} is a file; give a directory")
    check_writable(output / "1")
    if FLAGS.version is not None and output.is_dir() and FLAGS.version in versions(output):
        raise ValueError(f"{output / str(FLAGS.version)} exists; give another --version, or none")


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    program.run(main, positional="a run directory, a .keras file, or the URL of one")
