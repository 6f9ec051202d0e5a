"""Starts the tasks of a job on this machine: a program, once for each task.

  # two workers, each with half of the GPUs, or of the cores where there are none
  python scripts/launch.py --workers=2 -- scripts/train.py --strategy=multi_worker --run_dir=runs/a

  # two workers and a parameter server; a chief, which coordinates them, is added
  python scripts/launch.py --workers=2 --ps=1 -- scripts/train.py --strategy=parameter_server

  # a job that survives what kills a task: it goes on from its last checkpoint
  python scripts/launch.py --workers=2 --max_restarts=5 -- scripts/train.py \
    --strategy=multi_worker --run_dir=runs/a --checkpoint_steps=100

  # any program: TF_CONFIG says which task it is
  python scripts/launch.py --workers=3 --timeout_seconds=60 -- sh -c 'echo $TF_CONFIG'

What stands after -- is the same for all tasks. Each line that a task writes is shown after its
name, such as [worker 1], and kept without it in logs/worker-1.log in the run directory: that of the
program's own --run_dir, else of the launcher's, else a new one under runs/.

The job ends when the deciding task (the chief, or worker 0 without one) has ended, or when any task
fails. Then it exits with that task's code (128 + n if signal n ended it); Ctrl-C is 130, a second
one kills at once; --timeout_seconds is 124. No process of the job outlives it. A task that hangs
(--hang_seconds) has failed as well. With --max_restarts a job that failed is started again, the
same program with the same flags, until so many restarts in a row have brought no new checkpoint in
the run directory; under parameter servers a worker that failed is started again alone.
"""

import os
import pathlib
import time

from absl import flags

from kdist import program
from kdist.launch import here
from kdist.launch.job import Limits, last_words, stopped_by_signals
from kdist.launch.output import Screen
from kdist.launch.restarts import Restarts
from kdist.run_directory import RUN_DIR, RunDirectory, new_path

FLAGS = flags.FLAGS

# Which tasks.
flags.DEFINE_integer("workers", 1, "How many tasks train.", lower_bound=1)
flags.DEFINE_integer("ps", 0, "Parameter servers; with any, a chief is added.", lower_bound=0)
flags.DEFINE_boolean("chief", False, "A chief beside the workers, which trains as they do.")
flags.DEFINE_boolean("evaluator", False, "A task that follows checkpoints and evaluates.")
flags.DEFINE_boolean("share_gpus", False, "Whether more workers than GPUs may share them.")

# How long.
flags.DEFINE_float("timeout_seconds", None, "For the whole job.", lower_bound=0)
flags.DEFINE_float(
    "wait_seconds",
    30.0,
    "For the others to end by themselves, when the deciding task has.",
    lower_bound=0,
)
flags.DEFINE_float(
    "end_seconds", 5.0, "For a task that is asked to end, before it is killed.", lower_bound=0
)
flags.DEFINE_float(
    "hang_seconds",
    60.0,
    "For a step of kdist's fit (ten times that for an epoch's first one, five times the longest in "
    "any case), and for a task's sign of life. Then the task that others wait for is ended, and "
    "shows where it was. 0: for ever.",
    lower_bound=0,
)

flags.DEFINE_integer(
    "max_restarts",
    0,
    "How often a job that failed is started again without getting to a new checkpoint.",
    lower_bound=0,
)
flags.DEFINE_string("run_dir", None, "Gets logs/, if the program has no --run_dir of its own.")


def main(arguments):
    program_and_flags = arguments[1:]
    run_dir = run_directory(program_and_flags)
    log_dir = run_dir / "logs"
    counts = {
        "chief": int(FLAGS.chief),
        "worker": FLAGS.workers,
        "ps": FLAGS.ps,
        "evaluator": int(FLAGS.evaluator),
    }
    screen = Screen()
    restarts = Restarts(FLAGS.max_restarts, RunDirectory(run_dir).checkpoints)
    began, seconds = time.monotonic(), FLAGS.timeout_seconds
    while True:
        job_here = here.job(
            counts,
            program_and_flags,
            log_dir,
            limits=Limits(FLAGS.end_seconds, FLAGS.wait_seconds, seconds, FLAGS.hang_seconds),
            screen=screen,
            several_on_one_gpu=FLAGS.share_gpus,
            # scripts/train.py takes it: tasks that follow each other's files mean the same ones.
            environment={RUN_DIR: str(run_dir), **os.environ},
            may_replace=lambda name: restarts.may_replace(name, screen.say),
        )
        with job_here as job, stopped_by_signals(job):
            screen.say(f"{job.tasks[0].cluster.counts()} on this machine; output also in {log_dir}")
            code = job.run()
        if not job.failed:
            return code
        screen.say(last_words(job.failed))  # last, as the others' complaints come after its own
        if not restarts.wait_for_next(screen.say):
            return code
        if FLAGS.timeout_seconds is not None:
            seconds = max(0.0, FLAGS.timeout_seconds - (time.monotonic() - began))


def run_directory(arguments):
    """The program's own, or the launcher's, or a new one."""
    for flag, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = flag.lstrip("-").partition("=")
        if flag.startswith("-") and name == "run_dir" and (value if equals else following):
            return pathlib.Path(value if equals else following)
    if FLAGS.run_dir:
        return pathlib.Path(FLAGS.run_dir)
    return new_path(pathlib.Path(arguments[0]).stem)


if __name__ == "__main__":
    program.run(main, takes="the program to start, after --")
