"""SkyPilot: a managed job on spot or on-demand VMs of many clouds, by the user's own `sky`.

    text = SkyPilot().text(job)        # the task, for `sky jobs launch task.yaml`

SkyPilot chooses the cheapest of the job's machines that has capacity, and recovers from preemptions
by itself. An exit code of 143, a task that has saved because it was asked to, is recovered free of
charge. The task finds its peers by SkyPilot's variables, see `kdist.Cluster.resolve`.
"""

import json
import math
import pathlib
import re
import shlex
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping

from kdist.exit_codes import SAVED, TIMED_OUT
from kdist.launch.engines.base import (
    Cost,
    Engine,
    Handle,
    Job,
    NoSuchJobError,
    Status,
    call,
    show_output,
)

# Names of GPUs that SkyPilot names otherwise than kdist's price table.
_GPUS = {"A100-40GB": "A100"}
# Environment variable of the job's tasks: the time of its submission, which recoveries keep.
_SUBMITTED = "KDIST_SUBMITTED"
_STATES = {
    "PENDING": "pending",
    "SUBMITTED": "pending",
    "STARTING": "pending",
    "RUNNING": "running",
    "WINDING_DOWN": "running",
    "RECOVERING": "running",
    "CANCELLING": "running",
    "SUCCEEDED": "done",
    "CANCELLED": "stopped",
}


class SkyPilot(Engine):
    """Managed jobs of SkyPilot."""

    name, program = "skypilot", "sky"
    clouds = ("gcp", "aws", "azure", "lambda")
    fixed_workers = "SkyPilot recovers a job with all of its machines"
    options: Mapping[str, str] = {
        "recovery": "SkyPilot's strategy: EAGER_NEXT_REGION, the default, or FAILOVER",
        "workdir": "directory that SkyPilot copies to all machines; by default the current one",
    }

    def check(self, job: Job) -> list[str]:
        """Returns everything that is wrong with a job on SkyPilot, and what to change."""
        problems = self.common_problems(job)
        machine = job.machine
        if not (machine.name or machine.device or machine.cores):
            problems.append(
                "SkyPilot needs a kind of machine; pass a --plan, a "
                "--machine_type=n1-standard-8, or "
                "GPUs of one kind (--gpu=V100 --gpus_per_machine=8)"
            )
        if not job.setup and not job.image:
            problems.append(
                "new VMs have no kdist; install it with --setup='pip install kdist', or pass an "
                "--image=docker:… that has it"
            )
        if job.max_usd is not None:
            problems.append(
                "SkyPilot has no limit of dollars; leave --max_usd out, or use --engine=gce"
            )
        if job.spot and not job.mirror and not job.run_dir.startswith("/"):
            problems.append(
                "the disk of a spot VM is lost with it, and so are checkpoints; name a bucket with "
                "--mirror=gs://…, or set --run_dir to an absolute path on a volume"
            )
        return problems

    def text(self, job: Job) -> str:
        """Returns the task as YAML; values are JSON, which YAML includes."""
        recovery = {
            "strategy": job.options.get("recovery", "EAGER_NEXT_REGION"),
            "max_restarts_on_errors": job.max_restarts,
            # Free of charge: it is not one of the restarts above.
            "recover_on_exit_codes": [SAVED],
        }
        resources: dict = {"use_spot": job.spot, "disk_size": job.disk_gb, "job_recovery": recovery}
        if job.image:
            resources["image_id"] = job.image
        lines = [
            *([f"# {job.plan}"] if job.plan else []),
            f"name: {job.name}",
            f"num_nodes: {job.num_machines}",
            f"workdir: {json.dumps(job.options.get('workdir', '.'))}",
            "resources:",
            *(f"  {key}: {json.dumps(value)}" for key, value in resources.items()),
            "  any_of:  # the cheapest first",
            *(_machine_line(job, machine) for machine in sorted(job.machines, key=_price)),
            "envs:",
            *(f"  {name}: {json.dumps(value)}" for name, value in job.variables.items()),
        ]
        if job.setup:
            lines += ["setup: |", textwrap.indent(job.setup, "  ")]
        return "\n".join([*lines, "run: |", textwrap.indent(_command(job), "  "), ""])

    def submit(self, job: Job) -> "SkyPilotJob":
        """Submits the task.

        Raises:
            RuntimeError: If a job of this name has not ended, or SkyPilot refuses the task.
        """
        if any(not _status(record).is_over for record in _records(job.name)):
            raise RuntimeError(
                f"a job {job.name} runs; end it with kdist launch --job={job.name} --stop, or "
                "choose another name"
            )
        with tempfile.TemporaryDirectory(prefix="kdist-") as directory:
            path = pathlib.Path(directory) / "task.yaml"
            path.write_text(self.text(job))
            submitted = f"--env={_SUBMITTED}={time.time():.0f}"
            command = ["sky", "jobs", "launch", "--yes", "--detach-run", f"--name={job.name}"]
            call([*command, submitted, str(path)])
        return SkyPilotJob(job.name, job.machine.usd_per_hour)

    def find(self, name: str) -> "SkyPilotJob":
        """Returns the newest job with this name.

        Raises:
            NoSuchJobError: If SkyPilot has no such job.
            RuntimeError: If SkyPilot does not answer.
        """
        handle = SkyPilotJob(name)
        handle.record()
        return handle


class SkyPilotJob(Handle):
    """A managed job of SkyPilot."""

    def __init__(self, name: str, usd_per_hour: float | None = None):
        super().__init__(name)
        self._usd_per_hour = usd_per_hour

    def record(self) -> dict:
        """Returns the newest job of this name in SkyPilot's queue."""
        records = _records(self.name)
        if not records:
            raise NoSuchJobError(f"SkyPilot has no job {self.name}; sky jobs queue --all lists all")
        return max(records, key=lambda record: record["job_id"])

    def status(self) -> Status:
        """Returns the state of the job."""
        return _status(self.record())

    def follow(self, show: Callable[[str], None]) -> int:
        """Shows the output of the job until it is over.

        Returns:
            0 if the job has succeeded, otherwise SkyPilot's exit code, such as 100 for a failure.
        """
        command = ["sky", "jobs", "logs", "--follow", str(self.record()["job_id"])]
        return show_output(command, show)

    def stop(self):
        """Cancels the job; SkyPilot deletes its VMs."""
        call(["sky", "jobs", "cancel", "--yes", str(self.record()["job_id"])])

    def cost(self) -> Cost:
        """Returns the machine hours; the price is that of the plan, which only `submit` knows."""
        record = self.record()
        nodes = re.match(r"(\d+)x", record.get("resources") or "")
        hours = (record.get("job_duration") or 0.0) / 3600
        return Cost(hours * int(nodes[1] if nodes else 1), self._usd_per_hour)


def _price(machine):
    return math.inf if machine.usd_per_hour is None else machine.usd_per_hour


def _machine_line(job, machine):
    """Returns one of `any_of`, with its price in a comment."""
    fields = {}
    if machine.cloud:
        region = "" if machine.region in ("", "all") else f"/{machine.region}"
        fields["infra"] = machine.cloud + region
    if machine.name:
        fields["instance_type"] = machine.name
    elif machine.cores:
        fields["cpus"] = f"{machine.cores}+"
    # Other clouds sell a VM with its GPUs, and Google both apart.
    if machine.num_devices and (machine.cloud in ("", "gcp") or not machine.name):
        gpu = _GPUS.get(machine.device, machine.device)
        fields["accelerators"] = f"{gpu}:{machine.num_devices}"
    price = machine.usd_per_hour
    comment = "" if price is None else f"  # ${price * job.num_machines:,.4f} per hour"
    return f"    - {json.dumps(fields)}{comment}"


def _command(job):
    """Returns the lines that run the program, ended at the time limit of the whole job."""
    command = shlex.join(job.arguments("python3"))
    if job.time_limit_hours is None:
        return command
    seconds = math.ceil(job.time_limit_hours * 3600)
    return (
        f"left=$((${{{_SUBMITTED}:-$(date +%s)}} + {seconds} - $(date +%s)))\n"
        f"[ $left -gt 0 ] || exit {TIMED_OUT}\n"
        f"timeout --kill-after={job.grace_seconds} $left {command}"
    )


def _records(name):
    """Returns SkyPilot's records of all jobs with a name."""
    listed = call(["sky", "jobs", "queue", "--all", "--output=json"])
    # Warnings may come before it.
    return [each for each in json.loads(listed[listed.index("[") :]) if each["job_name"] == name]


def _status(record):
    word = record["status"]
    state = _STATES.get(word, "failed")
    detail = record.get("failure_reason") or word.lower()
    return Status(state, detail, record.get("recovery_count"))
