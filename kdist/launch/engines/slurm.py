"""Slurm: a batch script for `sbatch`, which restarts the job, and requeues it after preemption.

    print(Slurm().text(Job("cats", ("train.py",), workers=4, options={"partition": "gpu"})))

Each task is one task of a job step, on a node of its own. `Cluster.resolve` reads the variables
that `srun` sets; KDIST_CHIEF and KDIST_PS tell the roles. The files that tasks exchange, such as
checkpoints, must be on a file system that all nodes share.
"""

import math
import os
import pathlib
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping

from kdist.exit_codes import INTERRUPTED, TIMED_OUT
from kdist.launch.engines.base import (
    Cost,
    Engine,
    Handle,
    Job,
    NoSuchJobError,
    Status,
    call,
    newest_checkpoint_command,
)

# Slurm may send the signal up to 60 seconds before the time that is asked for; the rest is for
# tasks that save quickly.
_EARLY_SECONDS = 90
_POLL_SECONDS = 2.0
# Slurm's own records of ended jobs are searched this far back.
_SINCE = "now-30days"
_FIELD = re.compile(r"(\S+?)=(.*?)(?= \S+?=|$)")
_STATES = {
    "PENDING": "pending",
    "REQUEUED": "pending",
    "REQUEUE_HOLD": "pending",
    "COMPLETED": "done",
    "CANCELLED": "stopped",
    **dict.fromkeys(
        ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"),
        "failed",
    ),
}

# A task writes the first exit code that decides: that of a failure, or of the first task. That of
# srun is the highest of all tasks, and those that it kills after a failure may end with 143. A task
# that has saved ends with 0, because srun would otherwise kill those that still save.
_TASK = """\
trap : TERM
"$@"
code=$?
if [ $code -ne 0 ] || [ "$SLURM_PROCID" = 0 ]; then
  (set -C; echo $code > "$KDIST_CODE") 2> /dev/null
fi
[ $code -eq 143 ] && exit 0
exit $code"""

_SCRIPT = """\
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
export KDIST_JOB_TOKEN="${{KDIST_JOB_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}"
export KDIST_CODE="$SLURM_SUBMIT_DIR/.$SLURM_JOB_NAME-$SLURM_JOB_ID.code"

newest() {{ {newest}; }}

restarts=0
checkpoint=$(newest)
while true; do
  # A run may have finished just before tasks were killed.
  if [ $((restarts + ${{SLURM_RESTART_COUNT:-0}})) -gt 0 ] && {finished}; then code=0; break; fi
  rm -f "$KDIST_CODE"
  srun --kill-on-bad-exit=1 --wait={grace} --label bash -c {task} task \\
    {command}
  code=$?
  # Without a record, tasks were killed: 143 is then no request to save.
  if [ -s "$KDIST_CODE" ]; then code=$(cat "$KDIST_CODE"); elif [ $code -eq 143 ]; then code=1; fi
  rm -f "$KDIST_CODE"
  echo "kdist: the tasks ended with exit code $code"
  case $code in
    0 | 124 | 130) break ;;
    143)
      {limit}# For Slurm, a job that ends by itself while it is preempted has failed: it requeues
      # itself. One that scancel ended is no longer running.
      if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        scontrol requeue "$SLURM_JOB_ID" && sleep 600
      fi
      break ;;
  esac
  latest=$(newest)
  [ "$latest" = "$checkpoint" ] || restarts=0
  checkpoint=$latest
  restarts=$((restarts + 1))
  [ $restarts -le {max_restarts} ] || break
  echo "kdist: restart $restarts of {max_restarts} since the last new checkpoint"
  sleep 5
done
exit $code
"""


class Slurm(Engine):
    """Runs jobs on a Slurm cluster, by `sbatch`, `squeue`, `scontrol`, `sacct`, and `scancel`."""

    name = "slurm"
    program = "sbatch"
    fixed_workers = (
        "a Slurm job has a fixed number of nodes, and waits in the queue for all of them"
    )
    options: Mapping[str, str] = {
        "partition": "partition of the nodes",
        "account": "account that is charged",
        "qos": "quality of service",
        "constraint": "features that the nodes must have",
        "gres": "generic resources per node; by default gpu:KIND:NUMBER",
        "cpus-per-task": "cores per task; by default all of the node",
        "mem": "memory per node",
        "reservation": "reservation to use",
        "nodelist": "nodes to use",
        "exclude": "nodes not to use",
        "output": "file of the output; by default NAME-NUMBER.log",
        "mail-type": "events that send mail",
        "mail-user": "address of that mail",
        "at_time_limit": "end (default), or requeue: save and wait for another turn",
    }

    def check(self, job: Job) -> list[str]:
        problems = self.common_problems(job)
        if job.image:
            problems.append(
                "Slurm starts no images; write the container's program before yours: -- apptainer "
                f"exec --nv {job.image} python {job.command[0]}"
            )
        if job.max_usd is not None:
            problems.append("Slurm knows no prices; use --time_limit_hours instead of --max_usd")
        if job.spot and "partition" not in job.options:
            problems.append(
                "Slurm has no spot machines; name the partition whose jobs may be preempted "
                "(--partition), or leave --spot out"
            )
        limit = job.time_limit_hours
        if limit is not None and limit * 3600 <= job.grace_seconds + _EARLY_SECONDS:
            problems.append(
                f"a time limit of {limit * 3600:.0f} s leaves no time to train, because saving "
                f"begins up to {job.grace_seconds + _EARLY_SECONDS} s before; use a larger "
                "--time_limit_hours"
            )
        if job.options.get("at_time_limit", "end") not in ("end", "requeue"):
            problems.append("the option at_time_limit is end or requeue")
        if job.command[0].endswith(".py") and not pathlib.Path(job.command[0]).is_file():
            problems.append(
                f"there is no {job.command[0]} in {os.getcwd()}, in which Slurm starts the tasks; "
                "change to its directory, or give the whole path"
            )
        return problems

    def notice_seconds(self, job: Job) -> float | None:
        """Returns the grace time of the job's partition, where Slurm is installed and has one."""
        partition = job.options.get("partition")
        if not partition or shutil.which("scontrol") is None:
            return None
        try:
            text = call(["scontrol", "show", "partition", "--oneliner", partition])
        except RuntimeError:  # `submit` reports what is wrong
            return None
        return float(dict(_FIELD.findall(text.strip())).get("GraceTime", 0)) or None

    def text(self, job: Job) -> str:
        lines = ["#!/bin/bash", f"# Job {job.name} of kdist; submit this file with sbatch."]
        if job.plan:
            lines.append(f"# Plan: {job.plan}")
        for name, value in _directives(job).items():
            lines.append(f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}")
        lines.append("")
        lines += [f"export {name}={shlex.quote(text)}" for name, text in job.variables.items()]
        if job.setup:
            lines.append(job.setup)
        run = shlex.quote(job.run_dir)
        script = _SCRIPT.format(
            newest=newest_checkpoint_command(job.run_dir),
            finished=f"[ -e {run}/summary.json ]" if job.run_dir else "false",
            grace=job.grace_seconds,
            task=shlex.quote(_TASK),
            command=shlex.join(job.arguments()),
            limit=_limit(job),
            max_restarts=job.max_restarts,
        )
        return "\n".join([*lines, script])

    def submit(self, job: Job) -> Handle:
        if active := _job_ids(job.name, "pending,running,completing,suspended"):
            raise RuntimeError(
                f"Slurm has a job {job.name} already (number {active[-1]}); choose another --name, "
                f"or end it: kdist launch --job={job.name} --stop"
            )
        number = call(["sbatch", "--parsable"], self.text(job)).strip().partition(";")[0]
        return SlurmJob(job.name, number)

    def find(self, name: str) -> Handle:
        found = _job_ids(name, "all") or _recorded_ids(name)
        if not found:
            raise NoSuchJobError(
                f"Slurm has no job {name} of yours; squeue --me lists those that it has"
            )
        return SlurmJob(name, found[-1])


class SlurmJob(Handle):
    """A job of Slurm, by its number."""

    def __init__(self, name: str, number: str):
        super().__init__(name)
        self.number = number

    def status(self) -> Status:
        return _status(self._fields())

    def follow(self, show: Callable[[str], None]) -> int:
        position, rest, announced = 0, b"", ""
        while True:
            fields = self._fields()
            status = _status(fields)
            data = _read_from(fields.get("StdOut", ""), position)
            position += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                show(line.decode("utf-8", "replace"))
            if status.is_over:
                if rest:
                    show(rest.decode("utf-8", "replace"))
                return _exit_code(status, fields)
            if str(status) != announced:
                announced = str(status)
                show(f"kdist: job {self.number} is {announced}")
            time.sleep(_POLL_SECONDS)

    def stop(self):
        call(["scancel", self.number])

    def cost(self) -> Cost:
        fields = self._fields()
        seconds = _seconds(fields.get("RunTime", "0:00")) * int(fields.get("NumNodes", "1"))
        price = re.search(r"usd_per_hour=([\d.]+)", fields.get("Comment", ""))
        return Cost(seconds / 3600, float(price[1]) if price else None)

    def _fields(self):
        """Returns the fields of `scontrol show job`, or of accounting for an older job."""
        try:
            text = call(["scontrol", "show", "job", "--oneliner", self.number])
        except RuntimeError as error:
            if "Invalid job id" not in str(error):
                raise
            return self._recorded_fields()
        return dict(_FIELD.findall(text.strip()))

    def _recorded_fields(self):
        names = {"State": "JobState", "ExitCode": "ExitCode", "Elapsed": "RunTime"}
        names |= {"NNodes": "NumNodes", "Comment": "Comment"}
        columns = ",".join(names)
        text = call(["sacct", "-X", "-n", "-P", f"--jobs={self.number}", f"--format={columns}"])
        if not text.strip():
            raise NoSuchJobError(f"Slurm no longer knows the job {self.number}")
        return dict(zip(names.values(), text.strip().splitlines()[-1].split("|"), strict=False))


def _directives(job):
    """Returns the options of sbatch, "" for those without a value."""
    options = dict(job.options)
    options.pop("at_time_limit", None)
    found = {
        "job-name": job.name,
        "nodes": str(job.num_machines),
        "ntasks-per-node": "1",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.log",
        "signal": f"TERM@{job.grace_seconds}",
    }
    if job.time_limit_hours is not None:
        found["time"] = _duration(job.time_limit_hours)
    if job.machine.num_devices:
        kind = re.split(r"[\s(]", job.machine.device.lower())[0]
        found["gres"] = ":".join(filter(None, ["gpu", kind, str(job.machine.num_devices)]))
    if job.machine.usd_per_hour is not None:
        found["comment"] = f"usd_per_hour={job.machine.usd_per_hour:.6g}"
    # By default Slurm gives a task one core.
    cores = {"cpus-per-task": str(job.machine.cores)} if job.machine.cores else {"exclusive": ""}
    return {**found, **({} if "cpus-per-task" in options else cores), **options}


def _duration(hours):
    """Returns hours as Slurm writes them, in whole minutes.

    >>> _duration(30.5)
    '1-06:30:00'
    """
    hours, minutes = divmod(math.ceil(hours * 60), 60)
    return f"{hours // 24}-{hours % 24:02}:{minutes:02}:00"


def _limit(job):
    """Returns the lines of the script that end the job at its time limit."""
    if job.time_limit_hours is None or job.options.get("at_time_limit") == "requeue":
        return ""
    seconds = 60 * math.ceil(job.time_limit_hours * 60) - job.grace_seconds - _EARLY_SECONDS
    return f"[ $SECONDS -lt {seconds} ] || {{ code=124; break; }}  # the time limit\n      "


def _job_ids(name, states):
    lines = call(["squeue", "--me", "-h", f"--name={name}", f"--states={states}", "--format=%i"])
    return lines.split()


def _recorded_ids(name):
    """Returns numbers of ended jobs; none where Slurm keeps no accounts."""
    try:
        text = call(["sacct", "-X", "-n", "-P", "-S", _SINCE, f"--name={name}", "--format=JobID"])
    except RuntimeError:
        return []
    return text.split()


def _status(fields):
    state = fields.get("JobState", "").split()[0]  # "CANCELLED by 1000" in accounts
    reason = fields.get("Reason", "None")
    words = [state, *([reason] if reason not in ("None", "") else [])]
    restarts = int(fields["Restarts"]) if "Restarts" in fields else None
    return Status(_STATES.get(state, "running"), " ".join(words), restarts)


def _exit_code(status, fields):
    """Returns the exit code of the script; 130 after scancel, 124 at the time limit."""
    if status.state == "stopped":
        return INTERRUPTED
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    if "TIMEOUT" in status.detail:
        return TIMED_OUT
    return int(code) or (128 + int(number) if int(number or 0) else int(status.state != "done"))


def _read_from(path, position):
    """Returns what a file has after a position; nothing if it does not exist yet."""
    try:
        with open(path, "rb") as file:
            file.seek(position)
            return file.read()
    except OSError:
        return b""


def _seconds(text):
    """Returns the seconds of Slurm's [days-]hours:minutes:seconds.

    >>> _seconds("1-00:01:30")
    86490
    """
    days, _, clock = text.rpartition("-")
    total = 0
    for part in clock.split(":"):
        total = total * 60 + int(part)
    return total + 86400 * int(days or 0)
