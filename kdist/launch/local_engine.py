"""Engine for jobs on this machine: ports, GPUs, threads, log files, and data workers.

    with local_job({"worker": 2}, ["train.py", "--epochs=1"], pathlib.Path("runs/a/logs")) as tasks:
        code = tasks.run()

The tasks that compute share GPUs and cores evenly: workers, and a chief that trains. A parameter
server, a coordinator, and an evaluator get no GPU.
"""

import contextlib
import difflib
import fcntl
import os
import pathlib
import random
import secrets
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from kdist.cluster import ROLES, Cluster
from kdist.cluster.handshake import TOKEN_VARIABLE
from kdist.data.worker_addresses import DATA_WORKERS
from kdist.hardware import CORES_VARIABLE, VISIBLE_DEVICES, count_cores, find_gpus
from kdist.launch import child_python
from kdist.launch.task import Screen, Task
from kdist.launch.task_group import TaskGroup, Timeouts
from kdist.launch.watchdog import MARKS_VARIABLE, with_mark

_INTRA_OP_THREADS = "TF_NUM_INTRAOP_THREADS"
_THREAD_VARIABLES = (_INTRA_OP_THREADS, "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")


class DataWorker(Task):
    """A process of `kdist data_worker`, which serves until the tasks that train have ended.

    If it fails, the job fails: its tasks would wait for the next batch.
    """

    only_serves = True
    trains = False

    def __init__(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path
    ):
        # It is no task of the cluster, and GPUs are for those that are.
        super().__init__(Cluster(), command, {**environment, VISIBLE_DEVICES: "-1"}, log)
        self._index = index

    @property
    def name(self) -> str:
        """The name in the output, such as "data worker 1"."""
        return f"data worker {self._index}"


@contextlib.contextmanager
def local_job(
    counts: Mapping[str, int],
    arguments: Sequence[str],
    log_dir: pathlib.Path,
    *,
    timeouts: Timeouts | None = None,
    screen: Screen | None = None,
    share_one_gpu: bool = False,
    environment: Mapping[str, str] | None = None,
    may_replace: Callable[[str], bool] = lambda name: False,
    planned_workers: int | None = None,
    data_workers: int = 0,
) -> Iterator[TaskGroup]:
    """Yields the tasks of a job, ready to run; its ports are reserved until the context ends.

    Args:
        counts: Number of tasks per role. Parameter servers add a chief.
        arguments: Command of each task: a Python script, `kdist`, or another program, and its
            arguments.
        log_dir: Directory of one log file per task, such as worker-1.log. Existing files grow.
        timeouts, screen: Time limits of the job, and the output of its tasks.
        share_one_gpu: Whether several tasks may share one GPU; a ValueError if they would have to.
        environment: Base environment of the tasks; by default that of this process.
        may_replace: See `TaskGroup`.
        planned_workers: See `Cluster`.
        data_workers: Number of processes that prepare batches for the tasks.

    Raises:
        FileNotFoundError: If the program does not exist.
        OSError: If the directory cannot be written, or not enough ports are free.
    """
    environment = os.environ if environment is None else environment
    command = command_of(arguments, environment)
    counts = {**counts, "chief": 1} if counts.get("ps") else counts
    num_tasks = sum(counts.values())
    with reserve_ports(num_tasks + 2 * data_workers) as ports:
        addresses = loopback_addresses({role: counts.get(role, 0) for role in ROLES}, ports)
        first_role = next(role for role in ROLES if addresses[role])
        clusters = Cluster(addresses, first_role, 0, planned_workers).all_tasks()
        gpus = share_gpus(clusters, find_gpus(environment), share_one_gpu)
        threads = share_threads(clusters, environment)
        mark, token = uuid.uuid4().hex, secrets.token_hex(16)
        # A port for the tasks to connect to, and one to read batches from, for each data worker.
        data_ports = list(zip(ports[num_tasks::2], ports[num_tasks + 1 :: 2], strict=True))
        if data_workers:
            addresses_of_data = ",".join(f"127.0.0.1:{port}" for port, _ in data_ports)
            environment = {**environment, DATA_WORKERS: addresses_of_data}
        _make_directory(log_dir)
        tasks: list[Task] = []
        for cluster in clusters:
            own = {**environment, **threads, TOKEN_VARIABLE: token}
            if cluster.name in gpus:
                own[VISIBLE_DEVICES] = gpus[cluster.name]
            own[MARKS_VARIABLE] = with_mark(environment, mark)
            own.setdefault("PYTHONUNBUFFERED", "1")  # for Python that a shell script starts
            cluster.publish(own)
            log = log_dir / f"{cluster.name.replace(' ', '-')}.log"
            tasks.append(Task(cluster, command, own, log))
        for index, (port, batch_port) in enumerate(data_ports):
            flags = [f"--port={port}", f"--batch_port={batch_port}"]
            serve = command_of(["kdist", "data_worker", *flags], environment)
            own = {**environment, MARKS_VARIABLE: with_mark(environment, mark)}
            tasks.append(DataWorker(index, serve, own, log_dir / f"data-worker-{index}.log"))
        yield TaskGroup(tasks, mark, screen or Screen(), timeouts, may_replace)


def share_gpus(
    tasks: Sequence[Cluster], gpus: Sequence[str], share_one: bool = False
) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES by task name.

    All tasks that compute get the same number, so some GPUs may stay idle. Without GPUs, these
    tasks are left out. Raises ValueError if there are more tasks than GPUs, unless they share one.
    """
    names = [task.name for task in tasks if _computes(task)]
    shares = {task.name: "" for task in tasks if not _computes(task)}
    each = len(gpus) // len(names)
    if gpus and not each and not share_one:
        raise ValueError(
            f"{len(names)} tasks compute, and there are {len(gpus)} GPUs ({', '.join(gpus)}); use "
            "fewer --workers, --share_gpus to let several tasks use one, or hide the GPUs to "
            f"compute on the CPU ({VISIBLE_DEVICES}=-1)"
        )
    for index, name in enumerate(names if gpus else ()):
        own = gpus[index * each : (index + 1) * each] or [gpus[index % len(gpus)]]
        shares[name] = ",".join(own)
    return shares


def share_threads(tasks: Sequence[Cluster], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that limit each task to its share of the cores, at least one.

    Variables that the user has set are left out.
    """
    computing = [task for task in tasks if _computes(task) or task.role == "evaluator"]
    each = str(max(1, count_cores(environment) // max(1, len(computing))))
    # A task that launches a job divides its own share, which a launcher has set.
    from_launcher = CORES_VARIABLE in environment
    shares = {name: each for name in _THREAD_VARIABLES if from_launcher or name not in environment}
    # CORES_VARIABLE also marks the number of threads as not chosen by the user.
    return {**shares, CORES_VARIABLE: each} if _INTRA_OP_THREADS in shares else shares


def _computes(task):
    """Returns whether a task computes gradients: a worker, or a chief without servers."""
    return task.role == "worker" or (task.role == "chief" and "ps" not in task.tasks)


def _make_directory(directory):
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot create the directory {directory} for the tasks' output ({error.strerror}); "
            "use another run directory (--run_dir)"
        ) from error


def command_of(arguments, environment):
    """Returns the command to execute.

    A script, and kdist's own command, run in this Python, with unbuffered output.
    """
    program, *rest = arguments
    if program == "kdist":  # the package of this process, wherever the PATH leads
        return [sys.executable, "-u", *child_python.options(), "-m", "kdist", *rest]
    if program.endswith(".py"):
        if not pathlib.Path(program).is_file():
            raise FileNotFoundError(_missing_script(program))
        return [sys.executable, "-u", program, *rest]
    path = shutil.which(program, path=environment.get("PATH"))
    if path is None:
        raise FileNotFoundError(
            f"cannot find an executable program {program!r}; name a Python script (.py), a program "
            "on the PATH, or its path"
        )
    return [path, *rest]


def _missing_script(program):
    path = pathlib.Path(program)
    scripts = [str(other) for other in path.parent.glob("*.py")]
    close = difflib.get_close_matches(str(path), scripts, n=1)
    hint = f"did you mean {close[0]}?" if close else "name one that exists"
    return f"no script {program} in {pathlib.Path.cwd()}; {hint}"


_FIRST_PORT, _LAST_PORT = 12000, 19999


@contextlib.contextmanager
def reserve_ports(number: int) -> Iterator[list[int]]:
    """Yields `number` free ports that no other launcher of this user gets at the same time.

    Raises OSError if fewer ports are free.
    """
    candidates = list(range(_FIRST_PORT, _LAST_PORT + 1))
    random.SystemRandom().shuffle(candidates)  # independent of the user's seed
    with contextlib.ExitStack() as locks:
        ports: list[int] = []
        for port in candidates:
            if len(ports) == number:
                break
            if _is_free(port) and _lock(port, locks):
                ports.append(port)
        if len(ports) < number:
            raise OSError(
                f"{number} free ports between {_FIRST_PORT} and {_LAST_PORT}: only {len(ports)}"
            )
        yield ports


def loopback_addresses(counts: Mapping[str, int], ports: Sequence[int]) -> dict[str, list[str]]:
    """Returns loopback addresses per role, one port for each task."""
    rest = iter(ports)
    return {role: [f"127.0.0.1:{next(rest)}" for _ in range(n)] for role, n in counts.items()}


def _is_free(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _lock(port, locks):
    directory = pathlib.Path(tempfile.gettempdir()) / f"kdist-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    file = open(directory / str(port), "w")  # noqa: SIM115 (open as long as the lock)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    locks.enter_context(file)
    return True
