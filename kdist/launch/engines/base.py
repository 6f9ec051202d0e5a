"""Interface of engines: a job, four verbs, and a handle of the submitted job.

    problems = engine.check(job)       # everything that is wrong, before anything is rented
    text = engine.text(job)            # the file that would be submitted; the same for equal jobs
    handle = engine.submit(job)        # by the engine's own command line
    handle = engine.find("cats")       # again, from elsewhere

The outermost engine restarts a job, and kdist resumes from the last checkpoint. The exit code of a
task decides: 0 is done, 143 has saved because it was asked to and is restarted free of charge, 130
is a person, 124 a time limit, 75 a peer that hangs. Other codes are failures, which are counted.
"""

import abc
import dataclasses
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kdist.cluster.nodes import CHIEF_VARIABLE, PS_VARIABLE
from kdist.cluster.notices import NOTICE_SECONDS
from kdist.launch import child_python
from kdist.launch.elastic import WorkerLimits
from kdist.run_directory import CHECKPOINT_PREFIX, RUN_DIR

# A run may take this multiple of its planned hours, because predictions err and restarts cost time.
_LIMIT_PER_PLANNED_HOUR = 1.5
# Letters, digits, and hyphens are valid in names of Kubernetes objects, VMs, and Slurm jobs alike.
# Kubernetes allows 63 characters in a host name, which also has the role and the index.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Log of the libraries of kubectl: "E1125 15:09:07.364296     435 memcache.go:265] …".
_LOG_LINE = re.compile(r"[EWIF]\d{4} ")
# Part of the errors of an engine's program that reaches no cluster, or has no account -> what is
# wrong, and the remedy.
_UNREACHABLE = {
    "configuration source|contact slurm controller": (
        "no Slurm cluster answers; start kdist launch on a machine of the cluster, or write the "
        "file with --write=FILE and submit it there"
    ),
    "connection to the server|Unable to connect to the server": (
        "no Kubernetes cluster answers; choose one with kubectl config use-context, or KUBECONFIG"
    ),
    "active account": "no account of Google Cloud is active; log in with gcloud auth login",
}
# Names of the planner's machines: "gcp n1-standard-4 + 4 x K80", "aws p3.2xlarge (1x V100)".
_CLOUDS = ("gcp", "aws", "azure", "lambda")
_PLANNED_NAME = re.compile(r"(.+?)(?: \+ \d+ x (.+)| \(\d+ ?x ([^)]+)\))?")


@dataclasses.dataclass(frozen=True)
class MachineType:
    """Kind of machine that runs one task.

    Example:

        >>> MachineType("n1-standard-8", "gcp", device="V100", num_devices=1).cloud
        'gcp'

    Attributes:
        name: Name of the type in its cloud, such as `"n1-standard-8"`; `""` for any machine.
        cloud: `"gcp"`, `"aws"`, `"azure"`, …; `""` for machines that are not rented.
        region: Region, such as `"us-central1"`; `""` for the engine's default.
        device: GPU as its cloud or the user names it, such as `"V100"`; `""` for any GPU.
        num_devices: Number of GPUs per machine; 0 trains on the CPU.
        cores: Number of CPU cores or vCPUs; `None` where unknown.
        usd_per_hour: Price per hour in US dollars, of a spot VM if the job is for spot VMs; `None`
            where unknown.
    """

    name: str = ""
    cloud: str = ""
    region: str = ""
    device: str = ""
    num_devices: int = 0
    cores: int | None = None
    usd_per_hour: float | None = None

    @classmethod
    def from_planned(cls, machine: Any, **fields: Any) -> "MachineType":
        """Returns the type of a `kdist.planner.Machine`; `fields` sets further attributes.

        >>> import types
        >>> planned = types.SimpleNamespace(
        ...     name="gcp n1-standard-4 + 4 x K80", gpu="K80", gpus_per_node=4, cpu_cores=4.0
        ... )
        >>> MachineType.from_planned(planned, region="us-central1").name
        'n1-standard-4'
        """
        cloud, _, rest = machine.name.partition(" ")
        cloud, rest = (cloud, rest) if cloud in _CLOUDS else ("", machine.name)
        match = _PLANNED_NAME.fullmatch(rest)
        name, added, included = match.groups() if match else (rest, None, None)
        return cls(
            **{
                "name": name,
                "cloud": cloud,
                "device": added or included or machine.gpu,
                "num_devices": machine.gpus_per_node,
                "cores": int(machine.cpu_cores) if machine.cpu_cores else None,
                **fields,
            }
        )


@dataclasses.dataclass(frozen=True)
class Saving:
    """Size of a job's checkpoints and the time to save one, before anything is rented.

    Example:

        >>> Saving(bytes=13.2e9, seconds=200.0).describe()
        'a checkpoint of 13.2 GB takes 200 s to save, at 66 MB/s'

    Attributes:
        bytes: Size of a checkpoint.
        seconds: Time until it is where the loss of a machine does not matter.
        interval_seconds: Work between two checkpoints; `None` where unknown.
        preemptions_per_hour: Rate of all machines together; `None` where unknown.
    """

    bytes: float
    seconds: float
    interval_seconds: float | None = None
    preemptions_per_hour: float | None = None

    def describe(self) -> str:
        """Returns the size, the time, and the rate in words."""
        rate = self.bytes / max(self.seconds, 1e-3) / 1e6
        return (
            f"a checkpoint of {self.bytes / 1e9:.3g} GB takes {self.seconds:,.3g} s to save, at "
            f"{rate:,.3g} MB/s"
        )


@dataclasses.dataclass(frozen=True)
class EngineJob:
    """Description of a job, independent of the engine that runs it. One task runs per machine.

    Example:

        job = EngineJob("cats", ("train.py", "--run_dir=runs/cats"), workers=4)

    Args:
        name: Name of the job: lower-case letters, digits, and hyphens, at most 40 characters.
        command: Command of each task: a Python script, `kdist`, or another program, and its
            arguments.
        workers: Number of workers. Defaults to 1.
        ps: Number of parameter servers. If there are any, a chief is added, which coordinates.
            Defaults to 0.
        chief: Whether to add a chief, which trains like a worker. Defaults to `False`.
        machine: Kind of all machines. Defaults to any machine, and training on the CPU.
        alternatives: Other kinds with the same devices, in the order in which to try them.
            Defaults to none.
        spot: Whether to use machines that may be preempted. Defaults to `False`.
        hours: Planned hours of the whole run; `None`, the default, without a plan.
        time_limit_hours: Hours after which the engine ends the job. Defaults to one and a half
            times the planned hours, and to no limit without a plan.
        max_usd: Most US dollars that the job may cost; `None`, the default, for no limit.
        min_workers: Smallest number of workers with which the job continues if others do not come
            back. Defaults to `None`, all of them.
        wait_minutes: Time to wait for missing workers, with `min_workers`. Defaults to 10.
        max_restarts: Number of failures that the engine restarts. Saving because the engine asked
            is not a failure. Defaults to 3.
        grace_seconds: Time to save a checkpoint between the request to end and the end.
            Defaults to 60.
        disk_gb: Size of each machine's disk, where the engine creates one. Defaults to 100.
        run_dir: Run directory as the tasks see it. Defaults to `""`, the program's own.
        mirror: URL of a bucket to which checkpoints are copied. Defaults to `""`, none.
        image: Container or disk image. Defaults to `""`, the engine's default.
        setup: Shell command that prepares each new machine, such as `"pip install kdist"`.
            Defaults to `""`, none.
        environment: Environment variables of all tasks, in addition to the engine's own.
        options: Options of the engine, such as `{"partition": "gpu"}`.
        plan: The plan in a sentence, for comments and annotations. Defaults to `""`.
        saving: Size and time of a checkpoint. Defaults to `None`, unknown.

    Raises:
        ValueError: If a name, a number, or the command is invalid.
    """

    name: str
    command: tuple[str, ...]
    workers: int = 1
    ps: int = 0
    chief: bool = False
    machine: MachineType = MachineType()
    alternatives: tuple[MachineType, ...] = ()
    spot: bool = False
    hours: float | None = None
    time_limit_hours: float | None = None
    max_usd: float | None = None
    min_workers: int | None = None
    wait_minutes: float = 10.0
    max_restarts: int = 3
    grace_seconds: int = 60
    disk_gb: int = 100
    run_dir: str = ""
    mirror: str = ""
    image: str = ""
    setup: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    plan: str = ""
    saving: Saving | None = None

    def __post_init__(self):
        check_job_name(self.name)
        if not self.command:
            raise ValueError("the job has no command; write the program to start after --")
        if self.workers < 1:
            raise ValueError(f"workers={self.workers}; a job needs at least one")
        if self.min_workers is not None and (self.ps or self.chief):
            raise ValueError("min_workers is for jobs of workers alone; leave out ps and chief")
        if self.worker_limits and not self.max_restarts:
            raise ValueError("min_workers is for jobs that are restarted; raise max_restarts")
        if self.ps and not self.chief:
            object.__setattr__(self, "chief", True)
        if self.hours and self.time_limit_hours is None:
            object.__setattr__(self, "time_limit_hours", self.hours * _LIMIT_PER_PLANNED_HOUR)
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of an environment variable")

    @property
    def tasks(self) -> dict[str, int]:
        """Number of tasks per role, without roles that have none, in the order of their nodes."""
        counts = {"chief": int(self.chief), "worker": self.workers, "ps": self.ps}
        return {role: count for role, count in counts.items() if count}

    @property
    def worker_limits(self) -> WorkerLimits | None:
        """Limits of the number of workers; `None` if all have to run."""
        if self.min_workers is None:
            return None
        return WorkerLimits(self.workers, self.min_workers, self.wait_minutes)

    @property
    def num_machines(self) -> int:
        """Number of machines, one per task."""
        return sum(self.tasks.values())

    @property
    def machines(self) -> tuple[MachineType, ...]:
        """The kind of machine, and the alternatives to it."""
        return (self.machine, *self.alternatives)

    def arguments(self, python: str = "python") -> list[str]:
        """Returns the command to execute; a script, and kdist's own command, run in `python`."""
        program, *rest = self.command
        if program == "kdist":
            return [python, *child_python.options(), "-m", "kdist", *rest]
        return [python, program, *rest] if program.endswith(".py") else [program, *rest]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of all tasks, with those that tell `Cluster.resolve` the roles."""
        own = {
            CHIEF_VARIABLE: "1" if self.chief else "",
            PS_VARIABLE: str(self.ps) if self.ps else "",
            RUN_DIR: self.run_dir,
            "PYTHONUNBUFFERED": "1",
        }
        return {**{name: value for name, value in own.items() if value}, **self.environment}


# The short name in this package, where no `kdist.planner.Job`, a training to plan, is in sight.
Job = EngineJob


@dataclasses.dataclass(frozen=True)
class Status:
    """State of a submitted job.

    Example:

        >>> print(Status("pending", "Resources", 2))
        pending, 2 restarts: Resources

    Attributes:
        state: `"pending"`, `"running"`, `"done"`, `"failed"`, or `"stopped"`.
        detail: The engine's own words, such as why the job is pending.
        restarts: Number of restarts so far; `None` where the engine does not count them.
    """

    state: str
    detail: str = ""
    restarts: int | None = None

    @property
    def is_over(self) -> bool:
        """True if the engine will not run the job again."""
        return self.state in ("done", "failed", "stopped")

    def __str__(self):
        restarts = f", {self.restarts} restarts" if self.restarts else ""
        return self.state + restarts + (f": {self.detail}" if self.detail else "")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Machine hours of a job so far, and their price.

    Example:

        >>> Cost(machine_hours=3.0, usd_per_hour=0.5).usd
        1.5

    Attributes:
        machine_hours: Hours of all machines together.
        usd_per_hour: Price of one machine per hour in US dollars; `None` where unknown.
    """

    machine_hours: float
    usd_per_hour: float | None = None

    @property
    def usd(self) -> float | None:
        """US dollars so far; `None` without a price."""
        return None if self.usd_per_hour is None else self.machine_hours * self.usd_per_hour

    def __str__(self):
        hours = f"{self.machine_hours:,.2f} machine hours"
        if self.usd is None:
            return f"{hours}; the engine knows no price"
        return f"{hours}, ${self.usd:,.2f} (${self.usd_per_hour:,.4g} per machine and hour)"


class CommandError(RuntimeError):
    """An engine's command line has failed.

    Args:
        message: The program and its last lines.
        output: All that it has written to standard error, or else to standard output.
    """

    def __init__(self, message: str, output: str):
        super().__init__(message)
        self.output = output


class NoSuchJobError(ValueError):
    """The engine has no job with this name.

    Example:

        try:
            handle = engine.find("cats")
        except NoSuchJobError:
            handle = engine.submit(job)
    """


class Handle(abc.ABC):
    """A submitted job.

    Example:

        handle = get_engine("slurm").find("cats")
        print(handle.status(), handle.cost())
        exit_code = handle.follow(print)

    Args:
        name: Name of the job, which is also an attribute.
    """

    def __init__(self, name: str):
        self.name = name

    @abc.abstractmethod
    def status(self) -> Status:
        """Returns the state of the job."""

    @abc.abstractmethod
    def follow(self, show: Callable[[str], None]) -> int:
        """Passes each line of output to `show` until the job is over, and returns its exit code."""

    @abc.abstractmethod
    def stop(self):
        """Ends the job for good, and deletes what was rented for it."""

    @abc.abstractmethod
    def cost(self) -> Cost:
        """Returns what the job has used so far."""


class Engine(abc.ABC):
    """A program that runs jobs on other machines.

    Example:

        engine = get_engine("slurm")
        job = EngineJob("cats", ("train.py",), workers=4)
        handle = None if engine.check(job) else engine.submit(job)

    Attributes:
        name: Name of the engine, the value of `kdist launch --engine`.
        program: The engine's own command line, such as `"sbatch"`.
        clouds: Clouds whose machines it can rent. A job for another cloud is refused.
        options: Names of the options that `Job.options` may have, and what they mean.
        fixed_workers: Why a job cannot continue with fewer workers; `""` if it can.
    """

    name: str
    program: str
    fixed_workers: str = ""
    clouds: tuple[str, ...] = ()
    options: Mapping[str, str] = {}

    @abc.abstractmethod
    def check(self, job: Job) -> list[str]:
        """Returns everything that is wrong with a job on this engine, and what to change.

        Nothing is submitted or rented. An implementation extends `common_problems(job)`.
        """

    @abc.abstractmethod
    def text(self, job: Job) -> str:
        """Returns the file that would be submitted: a pure function of the job."""

    @abc.abstractmethod
    def submit(self, job: Job) -> Handle:
        """Submits a job that `check` accepts.

        Raises:
            RuntimeError: If the engine refuses the job.
        """

    @abc.abstractmethod
    def find(self, name: str) -> Handle:
        """Returns the job with this name, wherever it was submitted.

        Raises:
            NoSuchJobError: If the engine has no such job.
            RuntimeError: If the engine does not answer.
        """

    def notice_seconds(self, job: Job) -> float | None:
        """Returns the time to save before a machine is taken away.

        An engine whose machines are not those of `Job.machines` overrides it.

        Returns:
            The shortest time of the job's clouds; `None` if it is unknown, or no machine is.
        """
        clouds = {machine.cloud for machine in job.machines} if job.spot else set()
        return min(map(NOTICE_SECONDS.__getitem__, clouds & NOTICE_SECONDS.keys()), default=None)

    def checkpoint_remark(self, job: Job) -> str:
        """Returns whether a checkpoint fits into the notice of a preemption; "" if unknown."""
        saving, notice = job.saving, self.notice_seconds(job)
        if saving is None or notice is None:
            return ""
        if saving.seconds <= notice:
            return f"{saving.describe()}, and fits into the notice of {notice:g} s"
        lost = ""
        if saving.interval_seconds:
            lost = f", up to {saving.interval_seconds / 60:,.3g} min"
        return (
            f"warning: {saving.describe()}, which is longer than the notice of {notice:g} s; each "
            f"preemption loses the work since the last checkpoint{lost}. State a faster store with "
            "--checkpoint_mb_per_second, or save more often with --checkpoint_minutes"
        )

    def is_installed(self) -> bool:
        """Returns whether the engine's own command line is on the PATH."""
        return shutil.which(self.program) is not None

    def common_problems(self, job: Job) -> list[str]:
        """Returns problems that all engines have in common, such as the cloud and its options."""
        problems = []
        for cloud in sorted({each.cloud for each in job.machines} - {"", *self.clouds}):
            own = (
                f"machines of {', '.join(self.clouds)}" if self.clouds else "its own machines only"
            )
            problems.append(
                f"the plan is for machines of {cloud}, and {self.name} has {own}; make another "
                f"plan (kdist plan --cloud=…), or use an engine for {cloud} (--engine)"
            )
        if job.num_machines > 1 and job.command[:2] == ("kdist", "train"):
            flags = {flag.lstrip("-").partition("=")[0] for flag in job.command}
            if "allow_remote" not in flags:
                problems.append(
                    "the tasks are on several machines: add --allow_remote to kdist train, and let "
                    "only these machines connect to each other"
                )
        saving = job.saving
        if job.spot and saving and saving.seconds * (saving.preemptions_per_hour or 0.0) >= 3600:
            problems.append(
                f"{saving.describe()}, and a preemption is expected every "
                f"{3600 / (saving.preemptions_per_hour or 1.0):,.3g} s, so the job would hardly "
                "progress; use machines on demand, or fewer of them, or state a faster store "
                "(--checkpoint_mb_per_second)"
            )
        if job.min_workers is not None and self.fixed_workers:
            problems.append(
                f"{self.fixed_workers}: leave min_workers out, or use Ray (--engine=ray)"
            )
        unknown = [name for name in job.options if name not in self.options]
        if unknown:
            known = ", ".join(self.options) or "none"
            problems.append(f"{self.name} has no option {', '.join(unknown)}; it has {known}")
        return problems


def job_name_of(text: str) -> str:
    """Returns a text in the letters of a job's name; it may begin with a digit, or be too long.

    >>> job_name_of("Cats_2")
    'cats-2'
    """
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def check_job_name(name: str):
    """Raises ValueError unless all engines accept the name of a job."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be the name of a job; use at most 40 lower-case letters, digits, "
            "and hyphens, such as cats-2"
        )


def similar_machines(planned: Any, offers: Iterable[Any], spot: bool) -> list[MachineType]:
    """Returns machines that can replace a planned one, the cheapest first.

    They have the same devices, and at least the same cores and network.

    Args:
        planned: `kdist.planner.Machine`, which is included if it is among the offers.
        offers: `kdist.planner.Offer`s. Those without a price are left out.
        spot: Whether to use the prices of spot VMs.
    """
    found = []
    for offer in offers:
        machine, usd = offer.machine, offer.spot_usd_per_hour if spot else offer.usd_per_hour
        if (
            usd is not None
            and (machine.gpu, machine.gpus_per_node) == (planned.gpu, planned.gpus_per_node)
            and machine.cores >= planned.cores
            and machine.network_bytes_per_s >= planned.network_bytes_per_s
        ):
            found.append(MachineType.from_planned(machine, region=offer.region, usd_per_hour=usd))
    return sorted(found, key=lambda each: each.usd_per_hour or 0.0)


def newest_checkpoint_command(run_dir: str) -> str:
    """Returns a shell command that prints the path of a run's newest checkpoint, if there is one.

    >>> newest_checkpoint_command("runs/a")
    'ls -d runs/a/checkpoints/step-* 2> /dev/null | sort | tail -n 1'
    """
    checkpoints = f"{shlex.quote(run_dir)}/checkpoints/{CHECKPOINT_PREFIX}*"
    return f"ls -d {checkpoints} 2> /dev/null | sort | tail -n 1" if run_dir else "true"


def show_output(
    arguments: Sequence[str], show: Callable[[str], None], stderr: int = subprocess.STDOUT
) -> int:
    """Runs an engine's command line, and passes each line of its output to a function.

    Args:
        arguments: The program and its arguments.
        show: Function of a line.
        stderr: What to do with standard error, as for `subprocess.Popen`. Defaults to showing it.

    Returns:
        The exit code.
    """
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            show(line.rstrip("\n"))
    return process.returncode


def call(arguments: Sequence[str], text: str | None = None) -> str:
    """Runs an engine's command line.

    Args:
        arguments: The program and its arguments.
        text: Standard input.

    Returns:
        What it prints.

    Raises:
        RuntimeError: If the program is missing.
        CommandError: If it fails, which is a RuntimeError.
    """
    try:
        done = subprocess.run(list(arguments), input=text, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(
            f"{arguments[0]} is not installed on this machine; start kdist launch where it is, or "
            "write the file with --write=FILE and submit it there"
        ) from error
    if done.returncode:
        output = done.stderr or done.stdout
        lines = [line for line in output.splitlines() if line.strip()]
        told = [line for line in lines if not _LOG_LINE.match(line)] or lines
        reasons = (text for pattern, text in _UNREACHABLE.items() if re.search(pattern, output))
        reason = next(reasons, " ".join(told[-3:]))
        raise CommandError(f"{arguments[0]} failed ({done.returncode}): {reason}", output)
    return done.stdout
