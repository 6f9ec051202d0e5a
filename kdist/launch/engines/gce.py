"""Compute Engine: one VM per task, created and deleted by the user's own `gcloud`.

    handle = ComputeEngine().submit(job)
    code = handle.follow(print)        # creates preempted VMs again; from elsewhere: find("cats")

Compute Engine restarts nothing by itself. `follow` does: it creates VMs that are gone again, resets
the others, and goes to the job's next machine where there is no capacity. Without it, VMs still end
on their own: each has a time limit, which the dollars of the job shorten.

The metadata of each VM hold the job, and its serial port the output of its task.
"""

import base64
import contextlib
import dataclasses
import io
import json
import math
import pathlib
import re
import secrets
import shlex
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from kdist.cluster.nodes import PORT
from kdist.exit_codes import TIMED_OUT, Restart, restart_after
from kdist.launch.engines.base import (
    CommandError,
    Cost,
    Engine,
    Handle,
    Job,
    MachineType,
    NoSuchJobError,
    Saving,
    Status,
    call,
    newest_checkpoint_command,
)

# Values of a VM's metadata have at most 256 KB.
_MAX_CODE_BYTES = 256 * 1024
# Compute Engine accepts no shorter time limit.
_MIN_SECONDS = 60
_DEFAULT_IMAGE = "debian-cloud/debian-12"
# Number of errors of `gcloud` in a row after which a job is not followed any more.
_MAX_ERRORS = 10
# Port by which tasks wait for each other before their programs start.
_READY_PORT = PORT - 1
_JOB, _CODE, _TOKEN, _SCRIPT = "kdist-job", "kdist-code", "kdist-token", "startup-script"
# States of VMs that run or are about to, and of those that will not run any more.
_RUNNING = {"PROVISIONING", "STAGING", "RUNNING"}
_STOPPING = {"STOPPING", "SUSPENDING", "PENDING_STOP"}
# Errors of `gcloud` after which another zone or machine may work.
_NO_CAPACITY = re.compile(
    r"EXHAUSTED|STOCKOUT|resource_availability|not\s+have\s+enough\s+resources|QUOTA", re.I
)
_STARTING, _ENDED = "kdist: starting", "kdist: exit code "
_NEWEST = "kdist: newest checkpoint "

# It runs as root at each boot of a VM.
_STARTUP_SCRIPT = """\
#!/bin/bash
# Task of the kdist job {name}. It runs at each boot.
meta() {{
  curl -sf -H Metadata-Flavor:Google \\
    "http://${{GCE_METADATA_HOST:-metadata.google.internal}}/computeMetadata/v1/instance/$1"
}}
export HOME=${{HOME:-/root}}
name=$(meta name)
task=${{name#{name}-}}
own='{{"type": "'${{task%-*}}'", "index": '${{task##*-}}'}}'
export TF_CONFIG='{{"cluster": {cluster}, "task": '$own'}}'
export KDIST_JOB_TOKEN=$(meta attributes/{token})
# This script waits for the notice of a preemption, for any program.
export KDIST_METADATA_URL=
{variables}
mkdir -p ~/kdist && cd ~/kdist && rm -f stopping
meta attributes/{code} | base64 -d | tar xz
{setup}
echo "{starting} $TF_CONFIG"
# VMs boot at different times: no program starts before all of them could.
mkdir -p ready
python3 -m http.server --bind "$name" --directory ready {ready_port} &> /dev/null &
for host in {hosts}; do
  for _ in {{1..450}}; do (echo > /dev/tcp/$host/{ready_port}) 2> /dev/null && break; sleep 2; done
done
{command} &
child=$!
# A second SIGTERM would end the program before it has saved.
stop() {{ [ -e stopping ] || {{ touch stopping; kill -TERM $child; }}; }}
trap stop TERM
(meta "preempted?wait_for_change=true" | grep -q TRUE && echo "kdist: preempted" && stop) &
wait $child; code=$?
while kill -0 $child 2> /dev/null; do wait $child; code=$?; done
checkpoint=$({checkpoint})
echo "{newest}${{checkpoint##*/}}"
echo "{ended}$code"
# Time for kdist launch to read the output. A VM that is off costs only its disk.
sleep 600; poweroff
"""


class ComputeEngine(Engine):
    """VMs of Google's Compute Engine."""

    name, program, clouds = "gce", "gcloud", ("gcp",)
    fixed_workers = "a lost VM is replaced by one of another zone or kind, and no VM stays missing"
    options: Mapping[str, str] = {
        "project": "project, by default that of gcloud",
        "zone": "zones to try, separated by commas; by default those of the region",
        "network": "network of the VMs, whose firewall must let them connect to each other",
        "service_account": "service account of the VMs, such as one that may write to the bucket",
        "shared_run_dir": "1 if all VMs mount the run directory from elsewhere, so that no "
        "checkpoint is lost with a VM",
    }

    def check(self, job: Job) -> list[str]:
        """Returns everything that is wrong with a job on Compute Engine, and what to change."""
        problems = self.common_problems(job)
        if not job.machine.name:
            problems.append(
                "VMs have a machine type; name it with --machine_type=n1-standard-8, or plan the "
                "job (kdist plan --cloud=gcp --output=plan.json) and pass --plan=plan.json"
            )
        if job.time_limit_hours is None:
            problems.append(
                "a VM without a time limit may be forgotten; set --time_limit_hours, or pass a "
                "--plan, which has hours"
            )
        if job.max_usd is not None and None in [each.usd_per_hour for each in job.machines]:
            problems.append("max_usd needs the price of each machine; pass a --plan, which has it")
        if job.machine.num_devices and not job.image:
            problems.append(
                "a VM with GPUs needs an image with NVIDIA's driver; name its project and family, "
                "such as --image=my-project/my-family (gcloud compute images list)"
            )
        if not (job.setup or job.image):
            problems.append(
                "new VMs have no kdist; install it with --setup, or name an --image that has it"
            )
        if job.image and job.image.count("/") != 1:
            problems.append(f"image {job.image!r} is not PROJECT/FAMILY, such as {_DEFAULT_IMAGE}")
        if not (job.mirror or job.options.get("shared_run_dir")) and job.spot:
            problems.append(
                "the disk of a spot VM is deleted with it, and so are checkpoints; name a bucket "
                "with --mirror=gs://…, or set --option=shared_run_dir=1 if the run directory is on "
                "another machine"
            )
        if (size := len(_code(job))) > _MAX_CODE_BYTES:
            problems.append(
                f"the Python files next to {job.command[0]} take {size / 1024:.0f} KB packed, and "
                f"metadata {_MAX_CODE_BYTES / 1024:.0f}; start the program in a directory of its "
                "own, or install it in setup"
            )
        return problems

    def text(self, job: Job) -> str:
        """Returns the commands that create the VMs, and the script that they run."""
        seconds = _seconds_left(job, job.machine, 0.0, Cost(0.0, 0.0))
        files = {key: key for key in (_SCRIPT, _JOB, _CODE, _TOKEN)}
        command = _create_command(job, job.machine, "ZONE", vm_names(job), seconds, files)
        lines = [f"# {line}" for line in _comments(job)]
        words = 4 + job.num_machines
        lines.append(" \\\n  ".join([" ".join(command[:words]), *command[words:]]))
        lines += ["", f"# {_SCRIPT}", _startup_script(job)]
        return "\n".join(lines)

    def submit(self, job: Job) -> "ComputeEngineJob":
        """Creates the VMs of a job.

        Raises:
            RuntimeError: If no zone has capacity for any of the job's machines, or `gcloud` fails.
        """
        files = {_SCRIPT: _startup_script(job), _CODE: _code(job), _TOKEN: secrets.token_hex(16)}
        handle = ComputeEngineJob(job, files, State(time.time(), time.time()))
        if handle.list_vms():
            raise RuntimeError(
                f"the job {job.name} exists; end it with kdist launch --job={job.name} --stop, or "
                "choose another name"
            )
        handle.create(print)
        return handle

    def find(self, name: str) -> "ComputeEngineJob":
        """Returns the job that the metadata of its VMs describe.

        Raises:
            NoSuchJobError: If no VM has this job; preempted VMs are deleted.
            RuntimeError: If `gcloud` fails.
        """
        found = []
        for vm in _list_vms(name, ()):
            metadata = {each["key"]: each["value"] for each in vm["metadata"]["items"]}
            fields = json.loads(metadata.pop(_JOB))
            job, state = _job_from(fields["job"]), State(**fields["state"])
            found.append(ComputeEngineJob(job, metadata, state))
        if not found:
            raise NoSuchJobError(
                f"no VM has the label kdist-job={name}; gcloud compute instances list"
            )
        # VMs that were created again know of later restarts.
        return max(found, key=lambda each: each.progress)


@dataclasses.dataclass
class State:
    """State of a job that its VMs hold in their metadata.

    Attributes:
        submitted: Time of the first submission, in seconds since 1970.
        created: Time at which the first VMs of the current machine and zone were created.
        machine: Index of the current machine in `Job.machines`.
        zone: Zone of the VMs.
        hours_before: Machine hours on earlier machines.
        usd_before: US dollars on earlier machines.
        restarts: Number of counted restarts since the last new checkpoint.
        checkpoint: Name of the newest checkpoint at the last counted restart.
    """

    submitted: float
    created: float
    machine: int = 0
    zone: str = ""
    hours_before: float = 0.0
    usd_before: float = 0.0
    restarts: int = 0
    checkpoint: str = ""


class ComputeEngineJob(Handle):
    """The VMs of a job. `files` are their metadata, without the job itself."""

    poll_seconds = 15.0

    def __init__(self, job: Job, files: dict[str, str], state: State):
        super().__init__(job.name)
        self._job, self._files, self._state = job, files, state
        self._names = vm_names(job)
        self._offsets: dict[str, int] = {}
        self._codes: dict[str, int | None] = {}
        self._newest = state.checkpoint
        self._project = _project(job)

    @property
    def progress(self) -> tuple[str, int]:
        """Name of the newest checkpoint, and the restarts after it; it only grows."""
        return self._state.checkpoint, self._state.restarts

    def status(self) -> Status:
        """Returns the state of the job, from its VMs and their output."""
        states = self._states()
        self._read_output(states, lambda line: None)
        restarts, codes = self._state.restarts, self._codes
        if codes.get(self._names[0]) == 0:
            return Status("done", "its VMs are off or soon will be; --stop deletes them", restarts)
        if missing := self._missing(states):
            detail = f"{', '.join(missing)} not running; --follow creates them again"
            return Status("pending", detail, restarts)
        failed = [f"{name} exited with {code}" for name, code in codes.items() if code]
        detail = ", ".join(failed) or f"{self._machine.name} in {self._state.zone}"
        return Status("failed" if failed else "running", detail, restarts)

    def follow(self, show: Callable[[str], None]) -> int:
        """Shows the output of all tasks, and keeps the job running until it is over.

        Returns:
            The exit code of the chief, or worker 0 without one; 124 at the limit of hours or
            dollars. All VMs have been deleted then.
        """
        errors = 0
        while True:
            try:
                code = self._look(show)
                if code is not None:
                    self.stop()
                    return code
                errors = 0
            except RuntimeError as error:  # such as a VM that is being deleted, or no network
                errors += 1
                show(str(error))
                if errors > _MAX_ERRORS:
                    raise
            time.sleep(self.poll_seconds)

    def _look(self, show):
        """Shows new output, and restarts what has ended; returns the exit code of an ended job."""
        if self._seconds_left() < _MIN_SECONDS:
            show(f"the job has reached its limit: {self.cost()}; deleting its VMs")
            return TIMED_OUT
        states = self._states()
        self._read_output(states, show)
        if self._codes.get(self._names[0]) == 0:
            return 0
        if _STOPPING & set(states.values()):
            return None  # tasks may still save
        return self._restart(self._missing(states), show)

    def stop(self):
        """Deletes all VMs of the job."""
        self._delete([vm["name"] for vm in self.list_vms()])

    def cost(self) -> Cost:
        """Returns machine hours since the VMs were created; gaps between restarts count as well."""
        state, price = self._state, self._machine.usd_per_hour
        hours = len(self._names) * (time.time() - state.created) / 3600
        if price is None:
            return Cost(state.hours_before + hours)
        usd, hours = state.usd_before + hours * price, state.hours_before + hours
        return Cost(hours, usd / hours if hours else price)

    def create(self, show: Callable[[str], None]):
        """Creates all VMs, of the first machine from the current one on that has capacity.

        Raises:
            RuntimeError: If none has.
        """
        tried = []
        for index in range(self._state.machine, len(self._job.machines)):
            machine = self._job.machines[index]
            for zone in _zones(self._job, machine):
                self._move(index, zone)
                try:
                    return self._create(self._names)
                except CommandError as error:
                    self.stop()  # some of the VMs may exist
                    if not _NO_CAPACITY.search(error.output):
                        raise
                    tried.append(f"{machine.name} in {zone}")
                    show(f"no capacity for {self._job.num_machines} × {tried[-1]}")
        raise RuntimeError(
            f"no capacity for {', '.join(tried) or self._machine.name}; try again later, or plan "
            "with other machines"
        )

    def list_vms(self) -> list[dict]:
        """Returns the VMs of the job as Compute Engine describes them."""
        return _list_vms(self.name, self._project)

    # Limits.

    @property
    def _machine(self):
        return self._job.machines[self._state.machine]

    def _seconds_left(self):
        elapsed = time.time() - self._state.submitted
        return _seconds_left(self._job, self._machine, elapsed, self.cost())

    def _move(self, index, zone):
        """Notes another machine or zone, and the cost of those before."""
        state, cost = self._state, self.cost()
        if self._offsets:  # VMs have run
            state.hours_before, state.usd_before = cost.machine_hours, cost.usd or 0.0
        state.machine, state.zone, state.created = index, zone, time.time()
        self._offsets, self._codes = {}, {}

    # VMs.

    def _states(self):
        """Returns the states of the VMs that exist, by name."""
        return {vm["name"]: vm["status"] for vm in self.list_vms()}

    def _missing(self, states):
        """Returns the names of VMs that do not run."""
        return [name for name in self._names if states.get(name) not in _RUNNING]

    def _restart(self, missing: Collection[str], show) -> int | None:
        """Restarts the job if VMs are missing or tasks have failed.

        Returns the exit code of a job that is not restarted; None while it runs.
        """
        failed = {name: code for name, code in self._codes.items() if code}
        if not (missing or failed):
            return None
        decisions = {restart_after(code): name for name, code in failed.items()}
        if not missing and Restart.FREE not in decisions:
            name = decisions.get(Restart.NEVER) or next(iter(failed))
            state = self._state
            if self._newest != state.checkpoint:
                state.checkpoint, state.restarts = self._newest, 0
            code, is_last = failed[name], state.restarts >= self._job.max_restarts
            if Restart.NEVER in decisions or is_last:
                show(f"{name} exited with {code}; not started again")
                return code
            state.restarts += 1
        what = [*(f"{name} is gone" for name in missing)]
        what += [f"{name} exited with {code}" for name, code in failed.items()]
        show(f"{', '.join(what)}; starting the job again")
        if missing:
            # VMs that are off, whose names are needed.
            self._delete([name for name, s in self._states().items() if s not in _RUNNING])
            try:
                self._create(missing)
            except CommandError as error:
                if not _NO_CAPACITY.search(error.output):
                    raise
                self.stop()
                self.create(show)
                return None
        if others := [name for name in self._names if name not in missing]:
            self._call("reset", *others)
            self._codes.update(dict.fromkeys(others))
        return None

    def _delete(self, names):
        if names:
            self._call("delete", *names, "--quiet")

    def _create(self, names):
        described = {"job": self._job, "state": self._state}
        text = json.dumps({key: dataclasses.asdict(each) for key, each in described.items()})
        for name in names:
            self._offsets[name], self._codes[name] = 0, None
        with tempfile.TemporaryDirectory(prefix="kdist-") as directory:
            paths = {}
            for key, value in {**self._files, _JOB: text}.items():
                paths[key] = str(pathlib.Path(directory) / key)
                pathlib.Path(paths[key]).write_text(value)
            seconds = self._seconds_left()
            call(
                _create_command(
                    self._job, self._machine, self._state.zone, list(names), seconds, paths
                )
            )

    def _call(self, verb, *arguments):
        zone = f"--zone={self._state.zone}"
        return call(["gcloud", "compute", "instances", verb, *arguments, zone, *self._project])

    # Output.

    def _read_output(self, names, show):
        """Shows new output of the VMs, and notes exit codes."""
        for name in names:
            start = self._offsets.get(name, 0)
            try:
                read = self._call(
                    "get-serial-port-output", name, f"--start={start}", "--format=json"
                )
            except RuntimeError:  # it has just been deleted, or has no output yet
                continue
            found = json.loads(read)
            text, _, rest = found.get("contents", "").rpartition("\n")
            # The rest of a line is read again.
            self._offsets[name] = int(found.get("next", start)) - len(rest.encode())
            for line in text.splitlines():
                _, is_own, own = line.partition(f"{_SCRIPT}: ")
                if is_own:
                    self._note(name, own)
                    show(f"[{name.removeprefix(f'{self.name}-')}] {own}")

    def _note(self, name, line):
        if line.startswith(_STARTING):
            self._codes[name] = None
        elif line.startswith(_NEWEST):
            # Names of later checkpoints compare as greater. Tasks without any print "".
            self._newest = max(self._newest, line.removeprefix(_NEWEST))
        elif line.startswith(_ENDED):
            with contextlib.suppress(ValueError):
                self._codes[name] = int(line.removeprefix(_ENDED))


def vm_names(job: Job) -> list[str]:
    """Returns the names of a job's VMs, the chief or worker 0 first, such as "cats-worker-0"."""
    return [
        f"{job.name}-{role}-{index}" for role, count in job.tasks.items() for index in range(count)
    ]


def _seconds_left(job, machine, elapsed, cost):
    """Returns the time until the limit of hours or dollars."""
    seconds = math.inf
    if job.time_limit_hours is not None:
        seconds = job.time_limit_hours * 3600 - elapsed
    if job.max_usd is not None and machine.usd_per_hour:
        left = job.max_usd - (cost.usd or 0.0)
        seconds = min(seconds, left / (machine.usd_per_hour * job.num_machines) * 3600)
    return seconds


def _create_command(job, machine, zone, names, seconds, files):
    """Returns the arguments of `gcloud` that create VMs; `files` are paths of metadata by key."""
    project, _, family = (job.image or _DEFAULT_IMAGE).partition("/")
    command = [
        *("gcloud", "compute", "instances", "create", *names),
        *_project(job),
        f"--zone={zone}",
        f"--machine-type={machine.name}",
        # Instead of a live migration, which VMs with GPUs do not support.
        "--maintenance-policy=TERMINATE",
        f"--provisioning-model={'SPOT' if job.spot else 'STANDARD'}",
        *([f"--max-run-duration={math.floor(seconds)}s"] if seconds < math.inf else []),
        "--instance-termination-action=DELETE",
        f"--image-project={project}",
        f"--image-family={family}",
        f"--boot-disk-size={job.disk_gb}GB",
        f"--labels=kdist-job={job.name}",
        f"--metadata-from-file={','.join(f'{key}={path}' for key, path in files.items())}",
        "--format=json",
    ]
    if kind := _accelerator(machine):
        command.append(f"--accelerator=type={kind},count={machine.num_devices}")
    if job.mirror.startswith("gs://"):
        command.append("--scopes=storage-rw,logging-write")
    for option in ("network", "service_account"):
        if value := job.options.get(option):
            command.append(f"--{option.replace('_', '-')}={value}")
    return command


def _accelerator(machine):
    """Returns Google's name of the GPUs that are added to a VM; "" if its type includes them."""
    is_added = machine.name.startswith("n1-") and machine.num_devices
    return f"nvidia-tesla-{machine.device.lower()}" if is_added else ""


def _startup_script(job):
    hosts = vm_names(job)
    cluster: dict[str, list[str]] = {}
    for number, host in enumerate(hosts):
        role = host.removeprefix(f"{job.name}-").rpartition("-")[0]
        # A port of its own for each task, which also suits stand-ins whose VMs share a machine.
        cluster.setdefault(role, []).append(f"{host}:{PORT + number}")
    variables = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    if job.command[0].endswith(".py"):  # it is in the working directory, see `_code`
        script = pathlib.Path(job.command[0]).name
        job = dataclasses.replace(job, command=(script, *job.command[1:]))
    return _STARTUP_SCRIPT.format(
        name=job.name,
        cluster=json.dumps(cluster),
        token=_TOKEN,
        code=_CODE,
        variables="\n".join(variables),
        setup=job.setup,
        starting=_STARTING,
        ended=_ENDED,
        newest=_NEWEST,
        checkpoint=newest_checkpoint_command(job.run_dir),
        ready_port=_READY_PORT,
        hosts=" ".join(hosts),
        command=shlex.join(job.arguments("python3")),
    )


def _code(job):
    """Returns a Python script, the modules and packages next to it, packed for metadata."""
    script = pathlib.Path(job.command[0])
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        if script.suffix == ".py" and script.is_file():
            packages = [path.parent for path in script.parent.glob("*/__init__.py")]
            files = [*script.parent.glob("*.py"), *(f for p in packages for f in p.rglob("*.py"))]
            for path in sorted(files):
                archive.add(path, path.relative_to(script.parent))
    return base64.encodebytes(data.getvalue()).decode()


def _comments(job) -> list[str]:
    """Returns the plan, the price, and the machines without capacity for which others are tried."""
    lines = [job.plan] if job.plan else []
    for number, machine in enumerate(job.machines):
        price = machine.usd_per_hour
        cost = "" if price is None else f", ${price * job.num_machines:,.4g} per hour"
        devices = f" with {machine.num_devices} × {machine.device}" if machine.num_devices else ""
        start = "Without capacity for it: " if number else ""
        where = f" in {machine.region}" if machine.region else ""
        lines.append(f"{start}{job.num_machines} × {machine.name}{devices}{where}{cost}")
    return lines


def _zones(job, machine: MachineType) -> Sequence[str]:
    """Returns the zones to try: the user's, or those of the region that have the machine."""
    if job.options.get("zone"):
        return job.options["zone"].split(",")
    kind, name = "machine-types", machine.name
    if accelerator := _accelerator(machine):
        kind, name = "accelerator-types", accelerator
    condition = f"name={name}" + (f" AND zone~/?{machine.region}-" if machine.region else "")
    form = "--format=value(zone.basename())"
    found = call(
        ["gcloud", "compute", kind, "list", f"--filter={condition}", form, *_project(job)]
    ).split()
    return sorted(set(found))


def _list_vms(name, project):
    condition = f"--filter=labels.kdist-job={name}"
    listed = call(["gcloud", "compute", "instances", "list", condition, "--format=json", *project])
    return json.loads(listed)


def _project(job) -> tuple[str, ...]:
    project = job.options.get("project")
    return (f"--project={project}",) if project else ()


def _job_from(fields):
    machines = {
        "machine": MachineType(**fields["machine"]),
        "alternatives": tuple(MachineType(**each) for each in fields["alternatives"]),
    }
    saving = fields.get("saving")
    others = {"command": tuple(fields["command"]), "saving": saving and Saving(**saving)}
    return Job(**{**fields, **machines, **others})
