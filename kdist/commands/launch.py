"""Starts the tasks of a job on this machine: a program, once for each task.

  # your own script, as two workers; they share the GPUs, or the cores if there is no GPU
  kdist launch --workers=2 -- my_script.py --epochs=3

  # two workers and a parameter server, plus a chief, which coordinates them
  kdist launch --workers=2 --ps=1 -- my_script.py

  # a job that survives the death of a task: it resumes from its last checkpoint
  kdist launch --workers=2 --max_restarts=5 -- kdist train --run_dir=runs/a --checkpoint_steps=100

  # any program: TF_CONFIG tells it which task it is
  kdist launch --workers=3 --timeout_seconds=60 -- sh -c 'echo $TF_CONFIG'

In a script, kdist.create_strategy() returns the strategy of the job: multi_worker, or
parameter_server if there are parameter servers.

The command after -- is the same for all tasks. Each line of output is shown with the name of its
task, such as [worker 1]. It is also written to logs/worker-1.log in the run directory: the
program's own --run_dir, or the launcher's, or a new one below runs/.

The job ends when the chief (worker 0 without one) has ended, or when any task fails. No process of
the job outlives it. The exit code is that of the task that failed (128 + n if signal n ended it),
130 after Ctrl-C, and 124 after --timeout_seconds. A second Ctrl-C kills all tasks at once.

A task that hangs (--hang_seconds) counts as failed. With --max_restarts, a failed job is started
again with the same flags, until that many restarts in a row have produced no new checkpoint in the
run directory. A task that saved and ended with 143, because it was asked to, is started again
without being counted. A failed worker of parameter servers is restarted alone.

On a spot VM of GCE, AWS, or Azure, a preemption notice acts as SIGTERM: all tasks save, and the
launcher ends with 143.
"""

import os
import pathlib
import time

from absl import flags

from kdist import program
from kdist.launch.local_engine import local_job
from kdist.launch.output import Screen
from kdist.launch.restarts import RestartPolicy
from kdist.launch.task_group import Timeouts, failure_report, stop_on_signals
from kdist.run_directory import RUN_DIR, RunDirectory, new_run_path

FLAGS = flags.FLAGS
_MAX_TASKS = 256  # per role: more processes fill the memory of any machine

with program.flag_group("Tasks"):
    flags.DEFINE_integer("workers", 1, "Number of workers.", 1, _MAX_TASKS)
    flags.DEFINE_integer(
        "ps", 0, "Number of parameter servers. If there are any, a chief is added.", 0, _MAX_TASKS
    )
    flags.DEFINE_boolean("chief", False, "Add a chief, which trains like a worker.")
    flags.DEFINE_boolean("evaluator", False, "Add a task that evaluates each new checkpoint.")
    flags.DEFINE_boolean("share_gpus", False, "Allow several workers to share one GPU.")
    flags.DEFINE_string(
        "run_dir", None, "Directory of logs/, unless the program has a --run_dir of its own."
    )

with program.flag_group("Restarts"):
    flags.DEFINE_integer(
        "max_restarts",
        0,
        "Maximum number of restarts in a row of a failed job without a new checkpoint.",
        lower_bound=0,
    )

with program.flag_group("Time limits"):
    flags.DEFINE_float(
        "timeout_seconds", None, "Time limit of the whole job; none by default.", lower_bound=0
    )
    flags.DEFINE_float(
        "hang_seconds",
        60.0,
        "A task is ended if a training step makes no progress, or its heartbeat stops, for this "
        "many seconds. The first step of an epoch may take ten times as long, and any step five "
        "times the longest one so far. The task prints its stack first. 0: no limit.",
        lower_bound=0,
    )
    flags.DEFINE_float(
        "wait_seconds",
        30.0,
        "Time that the other tasks have to end by themselves after the chief has ended.",
        lower_bound=0,
    )
    flags.DEFINE_float(
        "end_seconds",
        5.0,
        "Time between the signal that asks a task to end and the one that kills it.",
        lower_bound=0,
    )


def main(arguments):
    """Returns the exit code of the job."""
    command = arguments[1:]
    run_dir = run_directory(command)
    log_dir = run_dir / "logs"
    counts = {
        "chief": int(FLAGS.chief),
        "worker": FLAGS.workers,
        "ps": FLAGS.ps,
        "evaluator": int(FLAGS.evaluator),
    }
    screen = Screen()
    policy = RestartPolicy(FLAGS.max_restarts, RunDirectory(run_dir).checkpoints, screen.announce)
    began, seconds = time.monotonic(), FLAGS.timeout_seconds
    while True:
        job = local_job(
            counts,
            command,
            log_dir,
            timeouts=Timeouts(FLAGS.end_seconds, FLAGS.wait_seconds, seconds, FLAGS.hang_seconds),
            screen=screen,
            share_one_gpu=FLAGS.share_gpus,
            # Read by `kdist train`, so that all tasks use the same run directory.
            environment={RUN_DIR: str(run_dir), **os.environ},
            may_replace=policy.may_replace,
        )
        with job as tasks, stop_on_signals(tasks):
            counted = tasks.tasks[0].cluster.counts()
            screen.announce(f"{counted} on this machine; output also in {log_dir}")
            code = tasks.run()
        if not tasks.failed:
            return code
        screen.announce(failure_report(tasks.failed))  # last, after the errors of other tasks
        if not policy.wait_before_restart(tasks.failed.returncode or code):
            return code
        if FLAGS.timeout_seconds is not None:
            seconds = max(0.0, FLAGS.timeout_seconds - (time.monotonic() - began))


def run_directory(arguments):
    """Returns the run directory of the program, of the launcher, or a new one."""
    for flag, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = flag.lstrip("-").partition("=")
        if flag.startswith("-") and name == "run_dir" and (value if equals else following):
            return pathlib.Path(value if equals else following)
    if FLAGS.run_dir:
        return pathlib.Path(FLAGS.run_dir)
    named = arguments[1] if arguments[0] == "kdist" and arguments[1:] else arguments[0]
    return new_run_path(pathlib.Path(named).stem)


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    program.run(main, positional="the program to start, after --")
