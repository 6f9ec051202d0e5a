"""Starts the tasks of a job, on this machine or by an engine: a program, once for each task.

  # your own script, as two workers; they share the GPUs, or the cores if there is no GPU
  kdist launch --workers=2 -- my_script.py --epochs=3

  # two workers and a parameter server, plus a chief, which coordinates them
  kdist launch --workers=2 --ps=1 -- my_script.py

  # a job that survives the death of a task: it resumes from its last checkpoint
  kdist launch --workers=2 --max_restarts=5 -- kdist train --run_dir=runs/a --checkpoint_steps=100

  # a worker whose GPU does not come back within ten minutes is left out until it works again
  kdist launch --workers=4 --min_workers=3 --worker_check='nvidia-smi -i $CUDA_VISIBLE_DEVICES' \\
    --max_restarts=5 -- kdist train --run_dir=runs/a --checkpoint_steps=100

  # any program: TF_CONFIG tells it which task it is
  kdist launch --workers=3 --timeout_seconds=60 -- sh -c 'echo $TF_CONFIG'

  # two more processes prepare the batches of a training that waits for its input
  kdist launch --data_workers=2 -- kdist train --dataset=/data/pets --model=mobilenet_v2

  # four machines of a Slurm cluster: show the script, then submit it, and look at the job
  kdist launch --engine=slurm --workers=4 --partition=gpu --write=- -- train.py --run_dir=runs/cats
  kdist launch --engine=slurm --workers=4 --partition=gpu -- train.py --run_dir=runs/cats
  kdist launch --job=cats                 # or with --follow, --stop, --cost

  # on Kubernetes; the claim is a volume that all pods share
  kdist launch --engine=kubernetes --workers=2 --image=registry/cats:1 --option=claim=runs \\
    -- kdist train --allow_remote --model=lenet

  # machines, batch, and time of a plan
  kdist plan --model=resnet50 --examples=1281167 --epochs=90 --cloud=gcp --spot --output=plan.json
  kdist launch --engine=kubernetes --plan=plan.json --write=- … -- kdist train --allow_remote

  # rent spot VMs that a plan names, by the user's own gcloud or sky
  kdist launch --engine=gce --plan=plan.json --mirror=gs://bucket/cats --max_usd=100 --follow \\
    --image=project/family -- kdist train --allow_remote --run_dir=runs/cats
  kdist launch --engine=skypilot --plan=plan.json --setup='pip install kdist' --write=task.yaml …

In a script, kdist.create_strategy() returns the strategy of the job: multi_worker, or
parameter_server if there are parameter servers.

An engine (--engine) starts one task on each of its machines, with the user's own account and by the
engine's own command line. It restarts a job that was preempted, and --max_restarts times one that
failed, and the program resumes from its last checkpoint in the run directory. A flag that an engine
does not have is refused. The guide is docs/guides/engines.md. What follows is about this machine.

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

With --min_workers, the job continues with fewer workers if some do not come back within
--wait_minutes. The others take more micro-steps per update, so that the global batch and the
result are those of all workers. The job grows again when a worker is back. On this machine,
--worker_check tells whether the place of a worker works; on Ray, a place is a node.

On a spot VM of GCE, AWS, or Azure, a preemption notice acts as SIGTERM: all tasks save, and the
launcher ends with 143.
"""

import os
import pathlib
import time

from absl import flags

from kdist import program
from kdist.commands import engine_job
from kdist.exit_codes import NO_ROOM
from kdist.hardware import find_gpus
from kdist.launch.elastic import Places, WorkerLimits
from kdist.launch.engines import ENGINES
from kdist.launch.local_engine import local_job
from kdist.launch.supervision import RestartPolicy
from kdist.launch.task import Screen
from kdist.launch.task_group import Timeouts, failure_report, stop_on_signals
from kdist.mirror.store import local_directory
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
    flags.DEFINE_integer(
        "data_workers",
        0,
        "Number of processes that prepare the batches, for a training that waits for its input "
        "and leaves cores idle, or reads slow storage. They end with the job.",
        0,
        _MAX_TASKS,
    )
    flags.DEFINE_boolean("share_gpus", False, "Allow several workers to share one GPU.")
    flags.DEFINE_string(
        "run_dir", None, "Directory of logs/, unless the program has a --run_dir of its own."
    )

with program.flag_group("Engine"):
    flags.DEFINE_enum(
        "engine",
        None,
        ["local", *ENGINES],
        "Program that runs the tasks; local is this machine, the default.",
    )
    flags.DEFINE_string(
        "name", None, "Name of the job; by default that of the run directory or the program."
    )
    flags.DEFINE_string(
        "write",
        None,
        "Write what would be submitted to this file, or to standard output (-); submit nothing.",
    )
    flags.DEFINE_string(
        "plan", None, "File of `kdist plan --output`: machines, their number, time, and batch."
    )
    flags.DEFINE_string("partition", None, "Partition of a Slurm cluster.")
    flags.DEFINE_multi_string(
        "option", [], "Option of the engine, NAME=VALUE; repeat the flag for several."
    )
    flags.DEFINE_string("image", None, "Image of containers, or of the disks of VMs.")
    flags.DEFINE_string(
        "setup", None, "Shell command that prepares each machine, such as 'pip install kdist'."
    )
    flags.DEFINE_multi_string(
        "env", [], "Environment variable of all tasks, NAME=VALUE; repeat the flag for several."
    )

with program.flag_group("Machines of an engine"):
    flags.DEFINE_list(
        "cloud",
        [],
        "Cloud of the machines. With --plan, machines of these clouds with the same devices may "
        "replace the planned ones; by default those of the plan's cloud.",
    )
    flags.DEFINE_string("region", None, "Region of the cloud.")
    flags.DEFINE_string("machine_type", None, "Type of the machines, such as n1-standard-8.")
    flags.DEFINE_string("gpu", None, "Kind of the GPUs, such as V100; any by default.")
    flags.DEFINE_integer("gpus_per_machine", 0, "GPUs of each machine.", 0, 64)
    flags.DEFINE_boolean("spot", False, "Use machines that may be preempted.")
    flags.DEFINE_integer("disk_gb", 100, "Size of the disk of each VM, in gigabytes.", 10, 65536)
    flags.DEFINE_string("mirror", None, "URL of a bucket to which checkpoints are copied.")
    flags.DEFINE_float(
        "checkpoint_mb_per_second",
        None,
        "Rate at which a checkpoint reaches a place that survives its spot VM. By default that of "
        "an earlier attempt of the run, or of the plan.",
        upper_bound=1e6,
    )

with program.flag_group("A submitted job"):
    flags.DEFINE_string("job", None, "Name of a submitted job; prints its state.")
    flags.DEFINE_boolean("follow", False, "Show the output until the job is over.")
    flags.DEFINE_boolean("stop", False, "End the job for good, and delete what was rented for it.")
    flags.DEFINE_boolean("cost", False, "Print what the job has used so far.")

with program.flag_group("Restarts"):
    flags.DEFINE_integer(
        "max_restarts",
        0,
        "Maximum number of restarts in a row of a failed job without a new checkpoint.",
        lower_bound=0,
    )
    flags.DEFINE_integer(
        "min_workers",
        None,
        "Smallest number of workers with which the job continues if others do not come back; by "
        "default all of them.",
        lower_bound=1,
    )
    flags.DEFINE_float(
        "wait_minutes",
        10.0,
        "Time to wait for a worker that is missing, before the job continues without it.",
        lower_bound=0,
    )
    flags.DEFINE_string(
        "worker_check",
        None,
        "Shell command that exits with 0 if the place of a worker on this machine works. Its "
        "variables are KDIST_PLACE, a number from 0, and CUDA_VISIBLE_DEVICES, the place's GPUs.",
    )

with program.flag_group("Limits"):
    flags.DEFINE_float(
        "time_limit_hours",
        None,
        "Time limit of a job of an engine; by default one and a half times the planned hours.",
        lower_bound=0,
    )
    flags.DEFINE_float("max_usd", None, "Maximum cost of a job of an engine.", lower_bound=0)
    flags.DEFINE_integer(
        "grace_seconds",
        60,
        "Time that the tasks of an engine have to save a checkpoint when they are asked to end.",
        1,
        3600,
    )
    flags.DEFINE_float(
        "timeout_seconds",
        None,
        "Time limit of the whole job on this machine; none by default.",
        lower_bound=0,
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

program.reads_file("plan", "create it with kdist plan --output")
program.writes_file("write", unless=["-"])
program.accept_urls("mirror", "env", "option", "setup", "worker_check", is_checked=False)
flags.mark_bool_flags_as_mutual_exclusive(["follow", "stop", "cost"])
_POSITIONAL = "the program to start, after --"


def main(arguments):
    """Returns the exit code of the job."""
    command = arguments[1:]
    if FLAGS.job is not None:
        return engine_job.attend(command)
    if not command and not FLAGS.plan:
        raise ValueError(program.missing_argument(_POSITIONAL))
    if FLAGS.engine not in (None, "local"):
        return engine_job.start(command, command_run_directory(command))
    engine_job.check_local_flags()
    return run_here(command)


def run_here(command):
    """Returns the exit code of the job, after running its tasks on this machine."""
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
    places = worker_places(screen.announce)
    planned = FLAGS.workers if FLAGS.min_workers else None
    began, code = time.monotonic(), NO_ROOM
    while True:
        chosen = places.choose(_seconds_left(began))
        if not chosen:
            return code
        job = local_job(
            {**counts, "worker": len(chosen)},
            command,
            log_dir,
            timeouts=Timeouts(
                FLAGS.end_seconds, FLAGS.wait_seconds, _seconds_left(began), FLAGS.hang_seconds
            ),
            screen=screen,
            share_one_gpu=FLAGS.share_gpus,
            # Read by `kdist train`, so that all tasks use the same run directory.
            environment={RUN_DIR: str(run_dir), **os.environ, **places.variables(chosen)},
            may_replace=policy.may_replace,
            planned_workers=planned,
            data_workers=FLAGS.data_workers,
        )
        with job as tasks, stop_on_signals(tasks), places.watch(tasks):
            counted = tasks.tasks[0].cluster.counts()
            screen.announce(f"{counted} on this machine; output also in {log_dir}")
            code = tasks.run()
        if tasks.is_restarting:
            continue
        if not tasks.failed:
            return code
        screen.announce(failure_report(tasks.failed))  # last, after the errors of other tasks
        if not policy.wait_before_restart(tasks.failed.returncode or code):
            return code


def _seconds_left(began):
    """Returns the rest of --timeout_seconds of a job that began at this time, or None."""
    if FLAGS.timeout_seconds is None:
        return None
    return max(0.0, FLAGS.timeout_seconds - (time.monotonic() - began))


def worker_places(announce):
    """Returns the places of the workers; without --min_workers, no place is ever missing.

    Raises:
        ValueError: Flags contradict each other.
    """
    engine_job.check_elastic_flags()
    if FLAGS.min_workers is None:
        return Places(WorkerLimits(FLAGS.workers, FLAGS.workers, 0.0), announce)
    limits = WorkerLimits(FLAGS.workers, FLAGS.min_workers, FLAGS.wait_minutes)
    if not FLAGS.max_restarts:
        raise ValueError(
            "--min_workers is for jobs that are restarted; add --max_restarts, such as 5"
        )
    if FLAGS.worker_check is None:
        raise ValueError(
            "--min_workers: on this machine a command has to tell whether the place of a worker "
            "works; add one, such as --worker_check='nvidia-smi -i $CUDA_VISIBLE_DEVICES'"
        )
    gpus = find_gpus(os.environ)
    each = len(gpus) // FLAGS.workers
    shares = [",".join(gpus[n * each : (n + 1) * each]) for n in range(FLAGS.workers)]
    return Places(limits, announce, FLAGS.worker_check, shares)


def run_directory(arguments):
    """Returns the run directory of the program, of the launcher, or a new one."""
    if given := command_run_directory(arguments):
        return local_directory(given)
    named = arguments[1] if arguments[0] == "kdist" and arguments[1:] else arguments[0]
    return new_run_path(pathlib.Path(named).stem)


def command_run_directory(arguments):
    """Returns the run directory of the program, or of the launcher; "" if neither has one."""
    for flag, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = flag.lstrip("-").partition("=")
        if flag.startswith("-") and name == "run_dir" and (value if equals else following):
            return value if equals else following
    return FLAGS.run_dir or ""


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    program.run(main, positional=_POSITIONAL, is_required=False)
