"""Jobs with a coordinator: parameter servers and split models.

All tasks run the same program. When it creates the strategy, the first task becomes the coordinator
and continues. The program of every other task ends there: the process computes or stores variables
until the coordinator ends.
"""

import contextlib
import logging
import os
from collections.abc import Sequence

import tensorflow as tf
from absl import logging as absl_logging

from kdist.cluster import Cluster, heartbeat
from kdist.cluster.liveness import LivenessProbe
from kdist.cluster.remote_access import restrict_to_loopback

_logger = logging.getLogger(__name__)

# With a single thread, training deadlocked.
_MIN_INTER_OP_THREADS = 4


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
