"""A process takes its place in a job: the last thing before its TensorFlow starts.

join(Cluster.resolve(), "multi_worker", timeout_seconds=60)
"""

import dataclasses
import hashlib
import random
import secrets
import sys
from collections.abc import Mapping

import keras
import tensorflow as tf

from kdist import __version__
from kdist.agreement import AlreadyRunning, agree, first_task
from kdist.cluster import Cluster
from kdist.telemetry.collector import Collector, attend, task_name
from kdist.tensorflow_internals import has_started


def join(
    cluster: Cluster,
    strategy: str,
    timeout_seconds: float,
    facts: Mapping[str, str] | None = None,
) -> Collector:
    """Waits for the other tasks, agrees with them, and tells TensorFlow of the job.

    Afterwards random numbers are drawn alike on all tasks, as each of them shuffles the same data
    and takes its part. If the user has set the same seed on all, it stays as it is.

    Args:
        cluster: the job and this process's place in it.
        strategy: the name of the strategy, which needs tasks of certain roles.
        timeout_seconds: how long it waits for the others.
        facts: what has to be the same on all tasks besides versions and the command line.

    Returns:
        What samples this task's devices; on the first task, those of all tasks.

    Raises:
        ValueError: tasks that the strategy needs are missing, or tasks were told different things.
        TimeoutError: a task did not come.
        RuntimeError: TensorFlow has started already.
    """
    cluster.check_roles_for(strategy)
    if has_started():
        raise RuntimeError(
            f"{cluster.name}: TensorFlow has started, and from then on takes no part in a job; set "
            f"TF_CONFIG and create the strategy {strategy!r} before anything else runs on it"
        )
    facts = {
        "kdist": __version__,
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "the command line": " ".join(sys.argv[1:]),
        "the strategy": strategy,
        **(facts or {}),
    }
    state = hashlib.sha256(repr(random.getstate()).encode()).hexdigest()
    token = secrets.token_hex(16)
    collector = _collector(cluster, token)
    own = {"state": state, "seed": secrets.randbits(31), "port": collector.port, "token": token}
    try:
        told = agree(cluster, facts, timeout_seconds, own)
    except AlreadyRunning as error:
        _check_can_join_late(cluster, strategy, error)
        told = {cluster.name: own}
    except BaseException:
        collector.close()
        raise
    first = first_task(cluster)
    if len({own["state"] for own in told.values()}) > 1:
        keras.utils.set_random_seed(told[first.name]["seed"])
    if cluster != first and first.name in told:  # who comes late has not heard of it
        attend(cluster, told[first.name]["port"], told[first.name]["token"])
    _trained_by(cluster).publish()
    return collector


def _collector(cluster, token):
    """Only the first task of several has others to hear from."""
    if cluster.is_alone or cluster != first_task(cluster):
        return Collector(task_name(cluster))
    return Collector.listening(cluster, token)


def _trained_by(cluster):
    """The cluster that TensorFlow is to know of: an evaluator is no part of the training."""
    if cluster.role == "evaluator":
        return cluster
    tasks = {role: some for role, some in cluster.tasks.items() if role != "evaluator"}
    return dataclasses.replace(cluster, tasks=tasks)


def _check_can_join_late(cluster, strategy, error):
    """A worker of parameter servers, or an evaluator, takes the place of one that died."""
    if strategy != "parameter_server" and cluster.role != "evaluator":
        raise RuntimeError(f"{error}; end all of its tasks, and start them together") from error
    if cluster.role == "ps":
        raise RuntimeError(
            f"{error}, and the variables that {cluster.name} kept are lost; end all of its tasks, "
            "and start them together"
        ) from error
    print(f"kdist: {cluster.name} joins a job that runs already", file=sys.stderr)
