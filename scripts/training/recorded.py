"""The run directory, and the callbacks and writers that fill it."""

import dataclasses
import os
import pathlib

from absl import flags

import kdist
from kdist.run_directory import RUN_DIR, RunDirectory, new_path
from kdist.telemetry import create_writer
from training.summary import config

FLAGS = flags.FLAGS

# What an interrupted run has been asked for has to be the same in these; devices may be others, as
# long as the global batch is the same.
SAME_TO_GO_ON = (
    *("model", "examples", "minutes", "operations", "epochs", "optimizer", "learning_rate"),
    *("schedule", "ramp_epochs", "decay", "scale_learning_rate", "base_batch_size", "precision"),
    *("sync_batch_norm", "seed", "local_steps", "local_slots", "backend"),
)


@dataclasses.dataclass
class Recording:
    """What is kept while a run goes on.

    Attributes:
        run: its directory.
        writer: of metrics; one that does nothing in tasks that are not the chief.
        telemetry: the callback that measures.
        profile: the callback that --profile asks for, in a list; an empty one without.
        callbacks: all of them.
    """

    run: RunDirectory
    writer: "kdist.telemetry.Writer"  # a name: --help does without TensorFlow
    telemetry: "kdist.callbacks.Telemetry"
    profile: list
    callbacks: list


def run_directory():
    """The path of --run_dir, or what the launcher chose, or a new one that says when and what."""
    if FLAGS.run_dir:
        return FLAGS.run_dir
    if RUN_DIR in os.environ:
        return pathlib.Path(os.environ[RUN_DIR])
    return new_path(FLAGS.model)


def check_directory(path):
    """Whether an interrupted run in a directory is gone on with.

    Raises:
        FileExistsError: it holds a run that has ended, or that is not to be gone on with.
        ValueError: the run in it was asked for something else.
    """
    run = RunDirectory(path)
    goes_on = FLAGS.resume != "never" and run.holds_unfinished()
    if goes_on:
        run.check_goes_on(config(FLAGS.dataset), SAME_TO_GO_ON)
    else:
        run.check_is_free()
    return goes_on


def recording(path, asked, is_chief, goes_on):
    """Begins to record a run, or goes on with it.

    Args:
        path: of its directory.
        asked: what it is asked to do.
        is_chief: whether this task writes.
        goes_on: whether the directory holds the run already.
    """
    run = RunDirectory.create(path, asked, goes_on) if is_chief else RunDirectory(path)
    writer = create_writer(
        run,
        is_chief=is_chief,
        wandb_mode=FLAGS.wandb_mode,
        tensorboard=FLAGS.tensorboard,
        config=asked,
        project=FLAGS.wandb_project,
        group=FLAGS.wandb_group,
        job_type=FLAGS.wandb_job_type,
        name=run.path.name,
    )
    profile = profiled(run)
    telemetry = kdist.callbacks.Telemetry(
        run, device_seconds=FLAGS.device_seconds or None, profiles=not profile, writer=writer
    )
    checkpoint = kdist.callbacks.EpochCheckpoint(run.checkpoints)
    stop = kdist.callbacks.StopOnNonFiniteLoss(checkpoint)
    going_on = kdist.callbacks.Checkpoint(
        run.checkpoints,
        FLAGS.checkpoint_steps,
        FLAGS.checkpoint_minutes or None,
        resume=FLAGS.resume,
        at_resume=run.forget_after,
    )
    callbacks = [*profile, telemetry, stop, checkpoint, going_on]
    return Recording(run, writer, telemetry, profile, callbacks)


def profiled(run):
    """The callback that --profile asks for, in a list; an empty one without."""
    if FLAGS.profile is None:
        return []
    first, last = map(int, FLAGS.profile.split(":"))
    return [kdist.callbacks.Profile(run.path / "profile", first, last)]
