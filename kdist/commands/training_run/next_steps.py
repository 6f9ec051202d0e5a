"""Prints where a training is recorded, how to continue it, and what to do next."""

import contextlib
import os
import shlex
import shutil
import sys

from absl import flags

import kdist
from kdist.commands.training_run.recording import FIXED_FLAGS, best_model
from kdist.commands.training_run.summary import run_config
from kdist.mirror.store import is_url
from kdist.run_directory import RUN_DIR, RUNS, FileLock, RunDirectory

FLAGS = flags.FLAGS
# Number of the newest run directories that are searched for an interrupted one.
_SEARCHED = 20


def command(name, *arguments):
    """Returns the text of a `kdist` command, as it can be run in this directory."""
    program = ["kdist"]
    if not shutil.which("kdist"):
        program = [os.path.relpath(sys.executable), "-m", "kdist"]
    return shlex.join([*program, name, *map(str, arguments)])


def command_to_continue(path):
    """Returns the command that continues the run of this process, with the flags of now."""
    given = [word for word in sys.argv[1:] if not word.startswith(("--run_dir=", "-run_dir="))]
    return command("train", *given, f"--run_dir={FLAGS.run_dir if is_url(FLAGS.run_dir) else path}")


def print_start(path, resumes, mirror=None):
    """Prints the run directory, and the command that continues an earlier run of the same flags."""
    words = [f"run directory: {path}"]
    words += [f"copied to {mirror.url}"] if mirror else []
    words += ["which is resumed"] if resumes else []
    print(", ".join(words), flush=True)
    is_chosen = FLAGS.run_dir or RUN_DIR in os.environ
    if not is_chosen and (earlier := _interrupted_run()):
        print(f"{earlier} was interrupted; to continue it: {command_to_continue(earlier)}")


@contextlib.contextmanager
def says_how_to_continue(run):
    """Returns a context manager that says how to continue a training that a signal ends."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        saved = kdist.checkpoint.CheckpointFiles(run.checkpoints).newest()
        if saved:
            print(f"saved up to step {saved.step:,} in {run.path}")
            print(f"to continue: {command_to_continue(run.path)}", flush=True)
        raise


def print_next_steps(run):
    """Prints three commands to try after a training."""
    name = FLAGS.model.rpartition(":")[2].rpartition(".")[2]
    commands = [
        (command("report", run.path, "OTHER_RUN"), "compare it with another run"),
        (
            command("export", best_model(run) or run.path, f"--output=models/{name}"),
            "for kdist serve",
        ),
    ]
    if FLAGS.model == "resnet18":
        commands.append((command("plan", "--model=resnet18", "--examples=60000"), "rent GPUs"))
    else:
        commands.append((command("train", "--model=resnet18"), "a larger network"))
    width = max(len(text) for text, _ in commands)
    print("next:", *(f"  {text:{width}}  # {words}" for text, words in commands), sep="\n")


def _interrupted_run():
    """Returns the path of the newest interrupted run with the same flags, or None."""
    config = run_config(FLAGS.dataset)
    for path in sorted(RUNS.glob("*"), reverse=True)[:_SEARCHED]:
        run = RunDirectory(path)
        with contextlib.suppress(OSError, ValueError):  # in use, or of other flags
            if run.is_interrupted() and kdist.checkpoint.CheckpointFiles(run.checkpoints).paths():
                run.check_same_config(config, ("dataset", *FIXED_FLAGS))
                FileLock(run.config).release()
                return path
    return None
