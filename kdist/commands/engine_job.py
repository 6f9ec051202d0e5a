"""Jobs of `kdist launch --engine`: from its flags and a plan to a submitted job, and back to it.

code = start(["train.py", "--epochs=3"], run_dir="runs/cats")    # --engine=slurm --workers=2
code = attend([])                                                # --job=cats --follow
"""

import dataclasses
import pathlib
import shlex
import sys

from absl import flags

from kdist import program
from kdist.launch.engines import ENGINES, Job, MachineType, NoSuchJobError, get_engine
from kdist.launch.engines.base import Saving, check_job_name, job_name_of, similar_machines
from kdist.launch.supervision import LIMIT_VARIABLE
from kdist.launch.task import PREFIX
from kdist.mirror.store import is_url, local_directory
from kdist.planner.plans import Plan, describe, duration, train_command
from kdist.planner.tables.prices import known_offers
from kdist.run_directory import RunDirectory, measured_saving, write_text

FLAGS = flags.FLAGS

_ENGINE = f"choose an --engine ({', '.join(ENGINES)}), or leave it out"
# Flags of engines that are refused on this machine, and what to do.
_ONLY_ENGINES = {
    **dict.fromkeys(
        (
            *("name", "write", "plan", "partition", "option", "image", "setup", "env", "cloud"),
            *("region", "machine_type", "gpu", "gpus_per_machine", "spot", "disk_gb", "max_usd"),
            "checkpoint_mb_per_second",
        ),
        _ENGINE,
    ),
    **dict.fromkeys(("follow", "stop", "cost"), "name a submitted job (--job)"),
    "mirror": "pass it to the program, after --",
    "time_limit_hours": "use --timeout_seconds",
    "grace_seconds": "use --end_seconds",
}
# Flags of this machine that are refused by engines.
_ONLY_LOCAL = {
    "evaluator": "evaluate in fit, by validation_data",
    "worker_check": "the engine knows its machines",
    "data_workers": "start kdist data_worker on machines of your own, and pass their addresses to "
    "the program (--data_workers)",
    "share_gpus": "each task has a machine of its own",
    "timeout_seconds": "use --time_limit_hours",
    "wait_seconds": "leave it out",
    "end_seconds": "use --grace_seconds",
}
# Flags of a plan, which may not be given as well.
_OF_PLAN = (*("workers", "ps", "chief", "machine_type", "gpu", "gpus_per_machine", "spot"),)
# What --job may be combined with.
_OF_JOB = ("job", "engine", "follow", "stop", "cost", "verbosity")


def check_local_flags():
    """Raises ValueError if a flag of engines is given for a job on this machine."""
    for name, remedy in _ONLY_ENGINES.items():
        if FLAGS[name].present:
            raise ValueError(f"--{name} does not apply to jobs on this machine; {remedy}")


def check_elastic_flags():
    """Raises ValueError if flags of a job that may run with fewer workers contradict others."""
    for name in ("wait_minutes", "worker_check"):
        if FLAGS[name].present and FLAGS.min_workers is None:
            raise ValueError(f"--{name} has no effect without --min_workers; add it")
    for name, reason in (
        ("ps", "a failed worker of parameter servers is replaced while the others continue"),
        ("chief", "a chief cannot be left out, and worker 0 has its duties"),
    ):
        if FLAGS.min_workers is not None and FLAGS[name].value:
            raise ValueError(f"--min_workers and --{name}: {reason}; leave one of them out")


def start(command, run_dir):
    """Returns the exit code, after submitting a job to --engine or writing its text."""
    for name, remedy in _ONLY_LOCAL.items():
        if FLAGS[name].present:
            raise ValueError(f"--{name} does not apply to --engine={FLAGS.engine}; {remedy}")
    if FLAGS.stop or FLAGS.cost:
        raise ValueError("--stop and --cost are for submitted jobs; name one (--job)")
    check_elastic_flags()
    engine = get_engine(FLAGS.engine)
    job = make_job(command, run_dir)
    if problems := engine.check(job):
        raise ValueError("\n  ".join([f"--engine={engine.name} would not run the job:", *problems]))
    if remark := engine.checkpoint_remark(job):
        sys.stderr.write(f"{PREFIX}{remark}\n")
    if FLAGS.write:
        return _write(engine.text(job))
    handle = engine.submit(job)
    sys.stderr.write(
        f"{PREFIX}submitted to {engine.name} as {job.name}; look at it with kdist launch "
        f"--engine={engine.name} --job={job.name}, --follow, --stop, or --cost\n"
    )
    return _follow(handle) if FLAGS.follow else 0


def attend(command):
    """Returns the exit code, after following or stopping --job, or printing its state or cost."""
    if command:
        raise ValueError(f"--job is a submitted job; leave {shlex.join(command)!r} out")
    for name, flag in program.own_flags().items():
        if flag.present and name not in _OF_JOB:
            raise ValueError(f"--{name} does not apply to a submitted job (--job); leave it out")
    handle = find(FLAGS.job)
    if FLAGS.follow:
        return _follow(handle)
    if FLAGS.stop:
        handle.stop()
        print(f"{handle.name}: stopped")
    else:
        print(f"{handle.name}: {handle.cost() if FLAGS.cost else handle.status()}")
    return 0


def find(name):
    """Returns the handle of a submitted job, on --engine or on any that is installed here.

    Raises:
        ValueError: If no engine has it, or several have.
    """
    check_job_name(name)
    if FLAGS.engine == "local":
        raise ValueError("jobs on this machine end with kdist launch; there is none to look at")
    engines = [get_engine(each) for each in ([FLAGS.engine] if FLAGS.engine else ENGINES)]
    installed = [engine for engine in engines if FLAGS.engine or engine.is_installed()]
    found, reasons = {}, []
    for engine in installed:
        try:
            found[engine.name] = engine.find(name)
        except (NoSuchJobError, RuntimeError) as error:
            reasons.append(str(error))
    if len(found) > 1:
        raise ValueError(
            f"{' and '.join(found)} have a job {name}; add --engine={next(iter(found))}"
        )
    if not found:
        programs = ", ".join(engine.program for engine in engines)
        raise ValueError("; ".join(reasons) or f"none of {programs} is installed here")
    return next(iter(found.values()))


def make_job(command, run_dir):
    """Returns the job that the flags and --plan describe.

    Raises:
        ValueError: If flags are invalid, or contradict the plan.
    """
    name = FLAGS.name or default_name(command or ["kdist", "train"], run_dir)
    mirror = FLAGS.mirror or ""
    options = {**_pairs("option"), **({"partition": FLAGS.partition} if FLAGS.partition else {})}
    mount = options.get("mount", "/runs") if "claim" in options else "runs"
    if is_url(run_dir):  # the program's own: kdist train then has a mirror
        mirror = mirror or run_dir
        run_dir = "" if "claim" in options else str(local_directory(run_dir))
    # Each restart must find the checkpoints of the last one.
    run_dir = run_dir or f"{mount}/{name}"
    plan = Plan.load(FLAGS.plan) if FLAGS.plan else None
    size, seconds = _size_and_seconds(plan, run_dir)
    if plan is not None:
        if size and seconds is not None:
            plan = plan.with_saving(size, seconds)
        command = planned_command(plan, command)
    if FLAGS.mirror and command[:2] == ["kdist", "train"]:
        command = [*command, f"--mirror={FLAGS.mirror}"]
    common = {
        "name": name,
        "command": tuple(command),
        "time_limit_hours": FLAGS.time_limit_hours,
        "max_usd": FLAGS.max_usd,
        "grace_seconds": FLAGS.grace_seconds,
        "min_workers": FLAGS.min_workers,
        "wait_minutes": FLAGS.wait_minutes,
        "disk_gb": FLAGS.disk_gb,
        "run_dir": run_dir,
        "mirror": mirror,
        "image": FLAGS.image or "",
        "setup": FLAGS.setup or "",
        "environment": _pairs("env"),
        "options": options,
    }
    if size and seconds is not None:
        common["saving"] = _saving(plan, command, size, seconds)
    if FLAGS["hang_seconds"].present:
        common["environment"][LIMIT_VARIABLE] = f"{FLAGS.hang_seconds:g}"
    if FLAGS["max_restarts"].present:
        common["max_restarts"] = FLAGS.max_restarts
    return Job(**common, **(_of_plan(plan) if plan else _of_flags()))


def _size_and_seconds(plan, run_dir):
    """Returns the bytes of a checkpoint, and the seconds to save it; None where unknown.

    They are those of an earlier attempt of the run, where this machine sees its directory, or else
    of the plan. --checkpoint_mb_per_second replaces the rate.
    """
    found = measured_saving(RunDirectory(run_dir).checkpoints)
    if found is None and plan is not None:
        found = plan.prediction.checkpoint_bytes, plan.prediction.save_seconds
    size, seconds = found or (None, None)
    rate = program.read_rate("checkpoint_mb_per_second")
    return size, size / (rate * 1e6) if size and rate else seconds


def _saving(plan, command, size, seconds):
    """Returns the `Saving` of the job, with the interval in its command, if there is one."""
    predicted = plan.prediction if plan is not None else None
    minutes = [
        part.partition("=")[2] for part in command if part.startswith("--checkpoint_minutes=")
    ]
    return Saving(
        bytes=size,
        seconds=seconds,
        interval_seconds=60 * float(minutes[-1]) if minutes else None,
        preemptions_per_hour=predicted.preemptions_per_hour if predicted else None,
    )


def _of_flags():
    if len(FLAGS.cloud) > 1:
        raise ValueError(f"--cloud={','.join(FLAGS.cloud)}: without a --plan, name one cloud")
    machine = MachineType(
        name=FLAGS.machine_type or "",
        cloud=FLAGS.cloud[0] if FLAGS.cloud else "",
        region=FLAGS.region or "",
        device=FLAGS.gpu or "",
        num_devices=FLAGS.gpus_per_machine or int(bool(FLAGS.gpu)),
    )
    return {
        "workers": FLAGS.workers,
        "ps": FLAGS.ps,
        "chief": FLAGS.chief,
        "machine": machine,
        "spot": FLAGS.spot,
    }


def _of_plan(plan):
    for name in _OF_PLAN:
        if FLAGS[name].present:
            raise ValueError(f"--{name} contradicts --plan; leave it out, or make another plan")
    if plan.layout.asynchronous:
        raise ValueError(
            "the plan has parameter servers on the machines of the workers, and engines start one "
            "task per machine; plan another strategy (kdist plan --strategies)"
        )
    machines = plan.layout.machines
    # A cluster of Kubernetes stays where it is, wherever prices are from.
    has_region = FLAGS.engine != "kubernetes"
    machine = MachineType.from_planned(
        plan.machine,
        region=FLAGS.region or (plan.region if has_region else ""),
        usd_per_hour=plan.usd / plan.hours / machines if plan.usd and plan.hours else None,
    )
    clouds = FLAGS.cloud or [machine.cloud]
    if machine.cloud not in clouds:
        raise ValueError(
            f"the plan is for machines of {machine.cloud or 'your own'}, and not for "
            f"--cloud={','.join(FLAGS.cloud)}; make another plan (kdist plan --cloud)"
        )
    others = similar_machines(plan.machine, known_offers(), plan.spot)
    kind = "spot machines" if plan.spot else "machines on demand"
    return {
        "workers": machines,
        "machine": machine,
        "alternatives": tuple(
            dataclasses.replace(each, region=FLAGS.region or (each.region if has_region else ""))
            for each in others
            if each.cloud in clouds and each.cloud and each.name != machine.name
        ),
        "spot": plan.spot,
        "hours": plan.hours,
        "plan": (
            f"{describe(plan.layout, plan.local_batch, plan.machine)}, global batch "
            f"{plan.batch.global_size}; {duration(plan.hours)}, ${plan.usd:,.2f} on {kind}"
        ),
    }


def planned_command(plan, command):
    """Returns the command with the planned batch and strategy, if it is `kdist train`.

    Another program must apply them itself; a message says how.
    """
    command = command or ["kdist", "train"]
    if command[:2] != ["kdist", "train"]:
        if not any(pathlib.Path(FLAGS.plan).name in part for part in command):
            minutes = plan.checkpoint_minutes
            saving = f" and a checkpoint every {minutes:g} minutes" if minutes else ""
            sys.stderr.write(
                f"{PREFIX}{command[0]} has to train as planned, with a local batch of "
                f"{plan.local_batch}{saving}: kdist.planner.Plan.load, or flags of its own\n"
            )
        return command
    given = {part.lstrip("-").partition("=")[0] for part in command[2:]}
    if "checkpoint_steps" in given:  # an interval as well
        given.add("checkpoint_minutes")
    planned = shlex.split(train_command(plan))[2:]
    return command + [flag for flag in planned if flag.lstrip("-").partition("=")[0] not in given]


def default_name(command, run_dir):
    """Returns a name for the job: that of its run directory, or of its program.

    >>> default_name(["train.py"], "runs/Cats_2")
    'cats-2'
    """
    named = command[1] if command[0] == "kdist" and command[1:] else command[0]
    stem = pathlib.PurePath(run_dir).name or pathlib.PurePath(named).stem
    name = job_name_of(stem)[:40].strip("-")
    return name if name[:1].isalpha() else f"job-{name}"[:40].strip("-")


def _pairs(name):
    """Returns the items of a flag with NAME=VALUE, which may be repeated."""
    pairs = [item.partition("=") for item in FLAGS[name].value]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise ValueError(f"--{name}={key}: write it as NAME=VALUE")
    return {key: value for key, _, value in pairs}


def _write(text):
    if FLAGS.write == "-":
        sys.stdout.write(text)
    else:
        write_text(FLAGS.write, text)
        sys.stderr.write(f"{PREFIX}wrote {FLAGS.write}; nothing is submitted\n")
    return 0


def _follow(handle):
    def show(line):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    try:
        return handle.follow(show)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"\n{PREFIX}the job continues; kdist launch --job={handle.name} --stop ends it\n"
        )
        raise
