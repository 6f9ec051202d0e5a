"""The tasks of a job with parameter servers: one coordinates, the others only serve.

All of them run the same program. Where it creates the strategy, the chief goes on; on a worker or
a parameter server the program ends there: it computes, or keeps variables, until the chief ends.
"""

import os
import sys
from typing import NoReturn

import tensorflow as tf

from kdist import heartbeat
from kdist.cluster import Cluster
from kdist.devices import find_devices
from kdist.exposure import shut_out_others
from kdist.presence import Presence

# With one, training stood still for good.
_FEWEST_OPERATIONS_AT_ONCE = 4


def coordinate(cluster: Cluster) -> tf.distribute.experimental.ParameterServerStrategy:
    """The strategy by which this process, the chief, has the others work."""
    _allow_waiting()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(_trained_by(cluster)), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    return tf.distribute.experimental.ParameterServerStrategy(resolver)


def serve(cluster: Cluster, devices=None) -> NoReturn:
    """Works for the chief, and ends this process when the chief has ended.

    Args:
        cluster: the job and this process's place in it.
        devices: what a worker computes on, as `find_devices` takes it.

    Raises:
        SystemExit: always.
    """
    names = find_devices(devices) if cluster.role == "worker" else ()
    print(f"kdist: {cluster.name} serves until the chief ends", file=sys.stderr, flush=True)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(_trained_by(cluster)),
        job_name=cluster.role,
        task_index=cluster.index,
        protocol="grpc",
        config=_configuration(names),
    )
    shut_out_others(cluster)
    heartbeat.does("serving")
    heartbeat.start()
    Presence(cluster.tasks["chief"][0]).wait_until_gone()
    del server
    raise SystemExit(0)


def _trained_by(cluster):
    """The tasks that TensorFlow is to know of."""
    return {role: list(cluster.tasks[role]) for role in ("chief", "worker", "ps")}


def _configuration(names):
    """TensorFlow's server takes no notice of how the process itself is configured."""
    cpus = [name for name in names if name.startswith("CPU:")]
    return tf.compat.v1.ConfigProto(
        device_count={"CPU": max(1, len(cpus))},
        gpu_options=tf.compat.v1.GPUOptions(allow_growth=True),
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=_operations_at_once(),
    )


def _allow_waiting():
    """Several operations at once: each that waits for a message takes a thread."""
    threads = tf.config.threading
    if _operations_at_once() != threads.get_inter_op_parallelism_threads():
        threads.set_inter_op_parallelism_threads(_operations_at_once())


def _operations_at_once():
    """As many as were asked for, but so many that waiting ones do not stop the others."""
    asked = tf.config.threading.get_inter_op_parallelism_threads()
    asked = asked or int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0)
    return asked and max(asked, _FEWEST_OPERATIONS_AT_ONCE)
