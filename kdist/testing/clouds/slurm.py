"""Slurm itself, on machines inside this one.

    with SlurmCluster(directory) as cluster:
        subprocess.run(["sbatch", "--partition=low", "job.sh"], env=cluster.environment)
        cluster.preempt()                       # what runs in the partition `low`

Debian has its programs: `apt-get install slurmctld slurmd slurm-client munge`.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import time

from kdist.testing.clouds.hosts import Network, missing_for_hosts, write_program

_PROGRAMS = ("munged", "sbatch", "slurmctld", "slurmd")
_COMMANDS = ("sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
_START_SECONDS = 60
# Schedules at once, and starts requeued jobs after ten seconds (cred_expire), not two minutes.
_CONFIGURATION = """\
ClusterName=kdist
SlurmctldHost={first}({address})
SlurmUser=root
SlurmctldPort=6817
SlurmdPort=6818
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock,cred_expire=10
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
JobRequeue=1
ReturnToService=2
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10
"""


def missing_for_slurm() -> str:
    """Returns what this machine lacks for `SlurmCluster`; "" if it lacks nothing."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return (
            f"programs that are not installed: {', '.join(missing)} "
            "(apt-get install slurmctld slurmd slurm-client munge)"
        )
    return missing_for_hosts()


class SlurmCluster:
    """A cluster of Slurm, as a context manager.

    Jobs of the partition `high` preempt those of the partition `low`, which is the default.

    Example:

        with SlurmCluster(directory, nodes=2) as cluster:
            os.environ.update(cluster.environment)
            handle = kdist.launch.engines.get_engine("slurm").submit(job)

    Args:
        directory: Empty directory for its files, which all of its nodes see.
        nodes: Number of nodes. Defaults to 2.

    Attributes:
        environment: Environment variables of programs that use the cluster's command lines.
        nodes: The machines, by name: `n1`, `n2`, ….
    """

    def __init__(self, directory: str | os.PathLike, nodes: int = 2):
        self._directory = pathlib.Path(directory).absolute()
        self._names = [f"n{number}" for number in range(1, nodes + 1)]

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self._start(stack.enter_context(Network(self._directory)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def preempt(self):
        """Submits a short job of the partition `high` that needs all nodes."""
        job = ("--partition=high", f"--nodes={len(self.nodes)}", "--exclusive", "--wrap=true")
        self._call("sbatch", "--output=/dev/null", *job).check_returncode()

    def _start(self, network):
        self.nodes = {name: network.add(name) for name in self._names}
        self._write_files()
        # `python` of the tasks is that of the test.
        paths = (self._directory / "bin", pathlib.Path(sys.executable).parent, os.environ["PATH"])
        self.environment = {
            "PATH": os.pathsep.join(map(str, paths)),
            "SLURM_CONF": str(self._directory / "slurm.conf"),
        }
        first = self.nodes[self._names[0]]
        files = [f"--{each}-file={self._directory / 'munge'}.{each}" for each in ("key", "pid")]
        files += [f"--{each}-file={self._directory / 'munge'}.{each}" for each in ("log", "seed")]
        socket = self._directory / "munge.sock"
        self._run(first, "munged", "--foreground", "--force", f"--socket={socket}", *files)
        self._wait(socket.exists, "munged")
        self._run(first, "slurmctld", "-D")
        for name, host in self.nodes.items():
            self._run(host, "slurmd", "-D", "-N", name)
        self._wait(lambda: self._num_idle() == len(self.nodes), "the nodes")

    def _write_files(self):
        key = self._directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (self._directory / "state").mkdir()
        # The plugin is not used, but loaded: that for version 2 needs systemd.
        cgroup = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
        (self._directory / "cgroup.conf").write_text(cgroup)
        lines = [
            f"NodeName={name} NodeAddr={host.address} CPUs={os.cpu_count()} RealMemory=1000"
            for name, host in self.nodes.items()
        ]
        first = self._names[0]
        text = _CONFIGURATION.format(
            first=first,
            address=self.nodes[first].address,
            directory=self._directory,
            nodes="\n".join(lines),
        )
        (self._directory / "slurm.conf").write_text(text)
        programs = self._directory / "bin"
        programs.mkdir()
        # The commands run in the network of the cluster, and in the caller's directory. Jobs find
        # Slurm's own, because sbatch passes its PATH on.
        enter = f"nsenter --target={self.nodes[first].process_id} --net --"
        for command in _COMMANDS:
            if path := shutil.which(command):
                line = f'PATH="${{PATH#{programs}:}}" exec {enter} {path} "$@"'
                write_program(programs / command, line)

    def _run(self, host, program, *arguments):
        log = (self._directory / f"{program}-{host.name}.log").open("wb")
        environment = {**os.environ, **self.environment}
        host.popen([program, *arguments], stdout=log, stderr=log, env=environment)
        log.close()

    def _num_idle(self):
        states = self._call("sinfo", "--noheader", "--partition=low", "--Node", "--format=%T")
        return states.stdout.split().count("idle")

    def _wait(self, condition, what):
        deadline = time.monotonic() + _START_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                logs = [path.read_text()[-1000:] for path in self._directory.glob("*.log")]
                raise RuntimeError(f"Slurm does not start: no answer from {what}: {logs}")
            time.sleep(0.1)

    def _call(self, *arguments):
        environment = {**os.environ, **self.environment}
        return subprocess.run(arguments, env=environment, capture_output=True, text=True)
