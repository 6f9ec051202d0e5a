"""Prints where a training is recorded, how to continue it, and what to do next."""

import contextlib
import os
import sys

from absl import flags

import kdist
from kdist import program
from kdist.commands.training_run.compiled_model import TEXT_MODEL
from kdist.commands.training_run.recording import FIXED_FLAGS, best_model, run_config
from kdist.commands.training_run.user_code import is_reference
from kdist.data.names import TEXT_PREFIX
from kdist.mirror.store import is_url
from kdist.run_directory import RUN_DIR, RUNS, FileLock, RunDirectory

FLAGS = flags.FLAGS
# Number of the newest run directories that are searched for an interrupted one.
_SEARCHED = 20
# Role of a task -> flag of `kdist launch` with the number of such tasks.
_COUNTS = {"worker": "workers", "ps": "ps"}
# Flags that another training on the same data, on the same devices, needs.
_KEPT = ("data_dir", "operations", "sequence_length", "local_batch_size")


def command_to_continue(path):
    """Returns the command that continues the run of this process, with the flags of now.

    That of a task of `kdist launch` starts a job with the same tasks.
    """
    directories = ("--run_dir=", "-run_dir=")
    given = [word for word in sys.argv[1:] if not word.startswith(directories)]
    named = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith(directories)]
    training = ["train", *given, f"--run_dir={named[-1] if named and is_url(named[-1]) else path}"]
    if RUN_DIR not in os.environ:
        return program.command(*training)
    tasks = kdist.Cluster.resolve().tasks
    counts = [f"--{flag}={len(tasks[role])}" for role, flag in _COUNTS.items() if role in tasks]
    alone = [role for role in ("chief", "evaluator") if role in tasks]
    if "ps" in tasks:
        alone.remove("chief")  # which the launcher adds
    return program.command(
        "launch", *counts, *(f"--{role}" for role in alone), "--", "kdist", *training
    )


def print_start(path, resumes, mirror):
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


@contextlib.contextmanager
def says_how_to_export(run):
    """Returns a context manager that says how to export a trained model whose --export fails."""
    try:
        yield
    except Exception:
        if model := best_model(run) or _last_model(run):
            print(f"the training is complete, and its model is {model}; export it again:")
            print(f"  {_command_to_export(model, FLAGS.export)}", flush=True)
        raise


def _command_to_export(model, output):
    """Returns the command that exports a model, with the module of a user's function."""
    where = FLAGS.model.rpartition(":")[0] if is_reference(FLAGS.model) else None
    return program.command(
        "export", model, f"--output={output}", *([f"--code={where}"] if where else [])
    )


def check_saved(run, epochs):
    """Raises an OSError if the trained model could not be written, such as to a full disk.

    The run then counts as interrupted, so that the same command continues it from its newest
    checkpoint. `epochs` are those that this process has trained, from 0.
    """
    written = [epoch for epoch, _ in _trained_models(run)]
    if best_model(run) is not None or (written and (not epochs or epochs[-1] + 1 in written)):
        return
    run.summary.unlink(missing_ok=True)
    last = f" of epoch {epochs[-1] + 1}" if epochs else ""
    newest = f"; the newest there is of epoch {written[-1]}" if written else ""
    raise OSError(
        f"the model{last} could not be written to {run.checkpoints}{newest}. Free disk space, and "
        f"run the same command with --run_dir={run.path}: it continues from the newest checkpoint"
    )


def _last_model(run):
    """Returns the file of the newest trained model in a run directory, or None."""
    return next((file for _, file in reversed(_trained_models(run))), None)


def _trained_models(run):
    """Returns (epoch, file) of the trained models in a run directory, the oldest first."""
    written = kdist.callbacks.EpochCheckpoint(run.checkpoints).written()
    return [(epoch, file) for epoch, file in written if epoch > 0]


def print_next_steps(run, dataset):
    """Prints three commands to try after a training.

    Args:
        run: the run directory.
        dataset: name of the dataset that was used, which may be that of --fallback_dataset.
    """
    name = FLAGS.model.rpartition(":")[2].rpartition(".")[2]
    other = _other_run(run)
    commands = [
        (
            program.command("report", run.path, *other),
            "compares it with another run" if other else "a page about this run",
        ),
        (program.command("serve", f"--model_dir={FLAGS.export}"), "answers requests")
        if FLAGS.export
        else (
            _command_to_export(best_model(run) or run.path, f"models/{name}"),
            "for kdist serve",
        ),
    ]
    if FLAGS.model == "resnet18":
        commands.append(
            (program.command("plan", "--model=resnet18", "--examples=60000"), "rent GPUs")
        )
    else:
        data = [f"--dataset={dataset}"] if dataset != FLAGS["dataset"].default else []
        data += [f"--{name}={FLAGS[name].value}" for name in _KEPT if FLAGS[name].present]
        larger = ["--model=resnet18"]
        if dataset.startswith(TEXT_PREFIX):
            larger = [f"--model={TEXT_MODEL}", "--model_args=width=128,depth=4"]
        commands.append((program.command("train", *larger, *data), "a larger network"))
    width = max(len(text) for text, _ in commands)
    print("next:", *(f"  {text:{width}}  # {words}" for text, words in commands), sep="\n")


def _other_run(run):
    """Returns a list with the path of the newest finished run below runs/ but this one, if any."""
    summaries = [RunDirectory(path).summary for path in RUNS.glob("*")]
    others = [file for file in summaries if file.exists() and not file.parent.samefile(run.path)]
    return [max(others, key=lambda file: file.stat().st_mtime).parent] if others else []


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
