"""Joining a job: the only place that performs the handshake, sets TF_CONFIG, and guards ports.

    strategy = join_job(spec, devices=("CPU:0",), create=create_tensorflow_strategy)

It runs before anything else uses TensorFlow in this process.

Jobs with parameter servers or split models have a coordinator. All tasks run the same program. When
it creates the strategy, the first task becomes the coordinator and continues. The program of every
other task ends there: the process computes or stores variables until the coordinator ends.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf
from absl import logging as absl_logging

from kdist import __version__
from kdist.cluster import Cluster, heartbeat
from kdist.cluster.handshake import JobAlreadyRunningError, run_handshake
from kdist.cluster.heartbeat import LivenessProbe
from kdist.cluster.remote_access import restrict_to_loopback
from kdist.compat.tensorflow import has_started
from kdist.exit_codes import PEER_HANGS
from kdist.launch.supervision import LIMIT_VARIABLE, SupervisedTask, Supervision, limit_seconds
from kdist.strategy_spec import StrategySpec
from kdist.telemetry.devices.collector import Collector, attend, note_collector, task_name
from kdist.training.evaluator import mark_evaluated_elsewhere, mark_evaluator
from kdist.training.strategy_setup import abort_steps, random_state

_logger = logging.getLogger(__name__)

# With a single thread, training deadlocked.
_MIN_INTER_OP_THREADS = 4
_POLL_SECONDS = 1.0
# Time to release files and copies after the steps have been aborted, and that of the task that
# hangs, which rarely gets to it.
_SECONDS_TO_END, _SECONDS_TO_END_HUNG = 30.0, 5.0


def join_job(
    spec: StrategySpec,
    devices: Sequence[str],
    create: Callable[[], tf.distribute.Strategy],
    settings: Mapping[str, str] | None = None,
) -> tf.distribute.Strategy:
    """Returns this task's strategy, after all tasks of the job have started and agreed.

    The strategy is created by `create`, which starts TensorFlow's server. A parameter server has no
    `devices`. The other `settings` must be equal on all tasks. Under a coordinator
    (`parameter_server`, a layout), the other tasks never return from here: they serve until the
    first task ends, and exit.

    Afterwards all tasks draw the same random numbers, because each shuffles the same data and takes
    its share. Equal seeds that the user has set on all tasks remain.

    Raises ValueError if settings differ between tasks, TimeoutError if a task does not start, and
    RuntimeError if TensorFlow has already started.
    """
    cluster = spec.cluster
    collector = _agree(spec, settings or {})
    coordinated = spec.kind in ("parameter_server", "layout")
    if coordinated and cluster.role != "evaluator" and cluster != cluster.first_task:
        serve(cluster, devices)
    with restrict_to_loopback(cluster), _keeping_termination_handler():
        strategy = create()
    note_collector(strategy, collector)
    if cluster.role == "evaluator":
        mark_evaluator(strategy, cluster.first_task.address)
        return strategy
    if "evaluator" in cluster.tasks:
        mark_evaluated_elsewhere(strategy)
    return strategy


@contextlib.contextmanager
def _keeping_termination_handler():
    """Keeps what SIGTERM does to this process: by default, it ends.

    TensorFlow's coordination service replaces the handler, for TPUs of Google. The signal would be
    lost until training begins, and without a callback that handles it, in training as well.
    """
    handler = signal.getsignal(signal.SIGTERM)
    yield
    # None: set by a library in C. Python sets handlers in the main thread only.
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _agree(spec, settings):
    """Runs the handshake, sets TF_CONFIG and seeds; returns the collector of device samples."""
    cluster, strategy = spec.cluster, spec.job_name
    if has_started():
        raise RuntimeError(
            f"{cluster.name}: TensorFlow has already started and can no longer join a job; set "
            f"TF_CONFIG and create the strategy {strategy!r} before anything else uses TensorFlow"
        )
    settings = {
        "kdist": __version__,
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "the command line": " ".join(sys.argv[1:]),
        "the strategy": strategy,
        **settings,
    }
    is_supervised, hang_seconds = heartbeat.has_launcher(), limit_seconds(os.environ)
    token = secrets.token_hex(16)
    collector = _collector(cluster, token)
    own = {
        "state": random_state(),
        "seed": secrets.randbits(31),
        "port": collector.port,
        "token": token,
    }
    try:
        payloads = run_handshake(cluster, settings, spec.cluster_timeout_seconds, own)
    except JobAlreadyRunningError as error:
        _check_can_join_late(cluster, strategy, error)
        payloads = {cluster.name: own}
    except BaseException:
        collector.close()
        raise
    first = cluster.first_task
    if len({payload["state"] for payload in payloads.values()}) > 1:
        keras.utils.set_random_seed(payloads[first.name]["seed"])
    # A task that joins late has no payload of the first task.
    if cluster != first and first.name in payloads:
        end = None if is_supervised else functools.partial(end_process, cluster)
        attend(cluster, payloads[first.name]["port"], payloads[first.name]["token"], end)
    elif cluster == first and not is_supervised:
        watch_for_hangs(cluster, collector, hang_seconds)
    _training_cluster(cluster).publish()
    return collector


def _collector(cluster, token):
    """Returns a collector; on the first task of several, one that listens to the others."""
    if cluster.is_alone or cluster != cluster.first_task:
        return Collector(task_name(cluster))
    return Collector.listening(cluster, token)


def _training_cluster(cluster):
    """Returns the cluster for TensorFlow, without the evaluator, which does not train."""
    if cluster.role == "evaluator":
        return cluster
    tasks = {role: addresses for role, addresses in cluster.tasks.items() if role != "evaluator"}
    return dataclasses.replace(cluster, tasks=tasks)


def _check_can_join_late(cluster, strategy, error):
    """Only a parameter-server worker or an evaluator can replace one that died."""
    if strategy != "parameter_server" and cluster.role != "evaluator":
        raise RuntimeError(f"{error}; end all of its tasks, and start them together") from error
    if cluster.role == "ps":
        raise RuntimeError(
            f"{error}, and the variables that {cluster.name} stored are lost; end all of its tasks,"
            " and start them together"
        ) from error
    _logger.info("%s joins a running job", cluster.name)


def serve(cluster: Cluster, devices: Sequence[str]):
    """Serves the coordinator with `devices`, and exits the process when the coordinator has ended.

    A parameter server has no devices.
    """
    first = cluster.first_task
    _logger.info("%s serves until %s ends", cluster.name, first.name)
    with restrict_to_loopback(cluster):
        server = tf.distribute.Server(
            _cluster_spec(cluster),
            job_name=cluster.role,
            task_index=cluster.index,
            protocol="grpc",
            config=_server_config(devices),
        )
    heartbeat.set_activity("serving")
    heartbeat.start()
    LivenessProbe(first.address).wait_until_gone()
    del server
    raise SystemExit(0)


def parameter_server_strategy(
    cluster: Cluster,
) -> tf.distribute.experimental.ParameterServerStrategy:
    """Returns the strategy by which this process, the chief, coordinates the workers."""
    _allow_concurrent_operations()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        _cluster_spec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    with _quiet_absl():
        return tf.distribute.experimental.ParameterServerStrategy(resolver)


def connect_to_all(cluster: Cluster, devices: Sequence[str]) -> list[list[str]]:
    """Returns the full names of all tasks' devices, one list per task, after connecting to them.

    This process is the first task. The devices of each task are such as `["CPU:0", "CPU:1"]`.
    """
    _allow_concurrent_operations()
    with _quiet_absl():
        tf.config.experimental_connect_to_cluster(
            _cluster_spec(cluster), job_name=cluster.role, task_index=cluster.index
        )
    return [
        [f"/job:{task.role}/replica:0/task:{task.index}/device:{device}" for device in devices]
        for task in cluster.all_tasks()
    ]


@contextlib.contextmanager
def _quiet_absl():
    """Context in which TensorFlow does not log its configuration."""
    before = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.WARNING)
    try:
        yield
    finally:
        absl_logging.set_verbosity(before)


def _cluster_spec(cluster: Cluster) -> tf.train.ClusterSpec:
    """Returns the training tasks in TensorFlow's format."""
    roles = ("chief", "worker", "ps")
    return tf.train.ClusterSpec({r: list(cluster.tasks[r]) for r in roles if r in cluster.tasks})


def _allow_concurrent_operations():
    """Provides a thread for each of several operations that wait for messages."""
    threads = tf.config.threading
    if _inter_op_threads() != threads.get_inter_op_parallelism_threads():
        threads.set_inter_op_parallelism_threads(_inter_op_threads())


def _server_config(devices):
    """Returns the configuration of a server, which ignores that of its process."""
    cpus = [int(name.partition(":")[2]) for name in devices if name.startswith("CPU:")]
    return tf.compat.v1.ConfigProto(
        device_count={"CPU": max(cpus, default=0) + 1},
        gpu_options=tf.compat.v1.GPUOptions(allow_growth=True),
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=_inter_op_threads(),
    )


def _inter_op_threads():
    """Returns the configured number of threads, but enough that waiting operations do not block."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    threads = threads or int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0)
    return threads and max(threads, _MIN_INTER_OP_THREADS)


def watch_for_hangs(cluster: Cluster, collector: Collector, limit: float):
    """Starts to supervise all tasks of a job in its first task, in a background thread.

    It replaces a launcher that reads the heartbeats of all tasks. They arrive at the collector of
    the first task. That task names the one that hangs, by the rules of `kdist.launch.supervision`,
    and commands all tasks to end with exit code 75. The engine then restarts the job. A process
    that is stopped does not hear the command; its engine ends it.

    Args:
        cluster: The job, as seen by its first task.
        collector: Collector of the first task, which the others connect to.
        limit: Limit of a step and of silence in seconds, see `Supervision`; 0 for none.
    """
    if not limit or cluster.is_alone:
        return
    tasks = {task.name: SupervisedTask(task) for task in cluster.all_tasks()}

    def note(name, beat):
        if name not in tasks:
            return
        if beat is None:  # disconnected: its own error, or its engine, ends the job
            tasks[name].returncode = 0
        else:
            tasks[name].note_beat(beat)

    heartbeat.add_receiver(tasks[cluster.name].note_beat)
    collector.pass_heartbeats(note)
    supervision = Supervision(list(tasks.values()), limit)

    def end(hung, reason):
        collector.end_tasks(hung, reason)
        end_process(cluster, hung, reason)

    threading.Thread(
        target=_supervise, args=(supervision, end), name="kdist-hangs", daemon=True
    ).start()


def _supervise(supervision, end):
    found = None
    while found is None:
        time.sleep(_POLL_SECONDS)
        for line in supervision.news():
            _logger.warning("%s", line)
        found = supervision.hung()
    task, reason = found
    end(task.name, reason)


def end_process(cluster: Cluster, hung: str, reason: str):
    """Ends this process with exit code 75, within half a minute.

    Args:
        cluster: The job, as seen by this task.
        hung: Name of the task that hangs. If it is this one, its stack is printed.
        reason: What it did, such as "was between steps, after step 5 for 60 s".
    """
    message = f"{hung} hung: it {reason} (more time: {LIMIT_VARIABLE})"
    _logger.error("%s; ending %s", message, cluster.name)
    is_this = hung == cluster.name
    if is_this and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed, or no file
            faulthandler.dump_traceback(sys.__stderr__)
    try:
        abort_steps(message)
        time.sleep(_SECONDS_TO_END_HUNG if is_this else _SECONDS_TO_END)
    finally:
        os._exit(PEER_HANGS)
