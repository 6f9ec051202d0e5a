"""Jobs of which one task, the coordinator, has the others work: parameter servers, split models.

All tasks run the same program. Where it creates the strategy, the first one coordinates and goes
on; on the others the program ends there: they compute, or keep variables, until the first has
ended.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import tensorflow as tf
from absl import logging

from kdist import heartbeat
from kdist.agreement import first_task
from kdist.cluster import Cluster
from kdist.devices import find_devices
from kdist.exposure import shut_out_others
from kdist.presence import Presence

# With one, training stood still for good.
_FEWEST_OPERATIONS_AT_ONCE = 4


def serve(cluster: Cluster, devices=None) -> NoReturn:
    """Works for the first task, and ends this process when that one has ended.

    Args:
        cluster: the job and this process's place in it.
        devices: what is computed on, as `find_devices` takes it. A parameter server has none.

    Raises:
        SystemExit: always.
    """
    names = find_devices(devices) if cluster.role != "ps" else ()
    first = first_task(cluster)
    print(f"kdist: {cluster.name} serves until {first.name} ends", file=sys.stderr, flush=True)
    server = tf.distribute.Server(
        _spec_of(cluster),
        job_name=cluster.role,
        task_index=cluster.index,
        protocol="grpc",
        config=_configuration(names),
    )
    shut_out_others(cluster)
    heartbeat.does("serving")
    heartbeat.start()
    Presence(first.address).wait_until_gone()
    del server
    raise SystemExit(0)


def parameter_server_strategy(
    cluster: Cluster,
) -> tf.distribute.experimental.ParameterServerStrategy:
    """The strategy by which this process, the chief, has the others work."""
    _allow_waiting()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        _spec_of(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    with _no_page_of_settings():
        return tf.distribute.experimental.ParameterServerStrategy(resolver)


def devices_of_all(cluster: Cluster, devices: Sequence[str]) -> list[list[str]]:
    """Makes this process, the first task, TensorFlow's master of all tasks' devices.

    Args:
        cluster: the job.
        devices: names of those of each task, such as `["CPU:0", "CPU:1"]`.

    Returns:
        Full names, those of each task in a list.
    """
    _allow_waiting()
    with _no_page_of_settings():
        tf.config.experimental_connect_to_cluster(
            _spec_of(cluster), job_name=cluster.role, task_index=cluster.index
        )
    return [
        [f"/job:{task.role}/replica:0/task:{task.index}/device:{device}" for device in devices]
        for task in cluster.all_tasks()
    ]


@contextlib.contextmanager
def _no_page_of_settings():
    """A context in which TensorFlow does not print how it is configured."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _spec_of(cluster: Cluster) -> tf.train.ClusterSpec:
    """The tasks that TensorFlow is to know of."""
    roles = ("chief", "worker", "ps")
    return tf.train.ClusterSpec({r: list(cluster.tasks[r]) for r in roles if r in cluster.tasks})


def _allow_waiting():
    """Several operations at once: each that waits for a message takes a thread."""
    threads = tf.config.threading
    if _operations_at_once() != threads.get_inter_op_parallelism_threads():
        threads.set_inter_op_parallelism_threads(_operations_at_once())


def _configuration(names):
    """TensorFlow's server takes no notice of how the process itself is configured."""
    cpus = [int(name.partition(":")[2]) for name in names if name.startswith("CPU:")]
    return tf.compat.v1.ConfigProto(
        device_count={"CPU": max(cpus, default=0) + 1},
        gpu_options=tf.compat.v1.GPUOptions(allow_growth=True),
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=_operations_at_once(),
    )


def _operations_at_once():
    """As many as were asked for, but so many that waiting ones do not stop the others."""
    asked = tf.config.threading.get_inter_op_parallelism_threads()
    asked = asked or int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0)
    return asked and max(asked, _FEWEST_OPERATIONS_AT_ONCE)
