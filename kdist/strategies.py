"""Creates `tf.distribute` strategies by name, from a plan, or from a layout.

    strategy = create_strategy("auto")                   # all devices of this host, or of the job
    strategy = create_strategy("mirrored", devices=2)              # two GPUs, or logical CPUs
    strategy = create_strategy("mirrored", devices=["GPU:0", "GPU:3"], reduction="nccl")
    strategy = create_strategy("multi_worker")                     # on each task of a job
    strategy = create_strategy("parameter_server")                 # only the chief returns
    strategy = create_strategy(kdist.planner.Plan.load("plan.json"))      # as planned
    strategy = create_strategy(kdist.tuning.Tuned.load("tuned.json"))     # as kdist tune found
    strategy = create_strategy(kdist.Layout(data=2, pipeline=2))          # split models
    strategy = create_strategy("mirrored", devices=4, shard="optimizer")  # sharded slots

Create the strategy before anything else uses TensorFlow: the number of logical devices and the
GPUs' memory growth are fixed by the first operation.
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from kdist.batch import Batch
from kdist.cluster import Cluster
from kdist.compat.tensorflow import heartbeat_timeout, number_of_workers, worker_devices
from kdist.layout import Layout
from kdist.strategy_spec import StrategySpec, resolve
from kdist.training.evaluator import is_evaluator
from kdist.training.replica import hooks
from kdist.training.replica.reduction import find_ranks
from kdist.training.scopes import is_multi_worker, num_local_replicas
from kdist.training.strategy_setup import note_created, set_up

if TYPE_CHECKING:
    from kdist.planner.plans import Plan
    from kdist.training.parameter_server.variables import Partitioner
    from kdist.tuning.settings import Tuned

_logger = logging.getLogger(__name__)

_CROSS_DEVICE_OPS = {
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
}

# Silence after which TensorFlow considers a `multi_worker` task dead. The launcher, which knows
# which task hangs, acts earlier.
_MAX_SILENT_SECONDS = 65.0


def create_strategy(
    name: "str | Plan | Layout | Tuned" = "auto",
    devices: int | Sequence[str] | None = None,
    *,
    reduction: str = "auto",
    num_packs: int | None = None,
    cluster: Cluster | None = None,
    cluster_timeout_seconds: float = 60.0,
    step_timeout_seconds: float = 600.0,
    allow_remote: bool = False,
    partitioner: "Partitioner | None" = None,
    shard: str | None = None,
    intra_op_threads: int | None = None,
) -> tf.distribute.Strategy:
    """Creates a distribution strategy.

    Example:

        strategy = kdist.create_strategy("mirrored", devices=2)
        with strategy.scope():
            model = kdist.models.lenet(input_shape=(28, 28, 1), num_classes=10)
            model.compile("sgd", "sparse_categorical_crossentropy")

    Args:
        name: `"auto"`, `"one_device"`, `"mirrored"`, `"multi_worker"`, `"parameter_server"`,
            `"central_storage"`, or `"tpu"`. `"auto"` is `"parameter_server"` in a job with
            parameter servers, `"multi_worker"` in any other job of several tasks, otherwise
            `"mirrored"` on several devices and `"one_device"` on one; the choice is logged. Or a
            `kdist.planner.Plan`, which also determines the devices; the job must have as many tasks
            as the plan has machines. Or a `kdist.tuning.Tuned`, which also determines devices,
            reduction, shards, and threads. Or the `kdist.Layout` of a split model, or of replicas
            that are sharded. Defaults to `"auto"`.
        devices: Number of devices or their names, such as `["GPU:0", "GPU:3"]`. A number on a
            machine without GPUs creates that many logical CPU devices. In a job, these are the
            devices of this task, and every task has the same number. Defaults to all GPUs, or the
            CPU if there is none.
        reduction: Algorithm that reduces gradients. For `"mirrored"`: `"auto"` (TensorFlow's choice
            for GPUs, `"reduction_to_one_device"` for CPU devices), `"nccl"` (GPUs only),
            `"hierarchical_copy"`, or `"reduction_to_one_device"`. For `"multi_worker"`: `"auto"`,
            `"nccl"` (GPUs only), or `"ring"`. Defaults to `"auto"`.
        num_packs: Number of tensors that `"nccl"` and `"hierarchical_copy"` pack gradients into; 0
            sends each gradient separately. Defaults to TensorFlow's default, 1.
        cluster: Tasks of the job and the place of this process. Defaults to `Cluster.resolve()`,
            which reads TF_CONFIG, or the variables of Slurm, Kubernetes, and other engines.
        cluster_timeout_seconds: Time limit for all tasks to start. Defaults to 60.
        step_timeout_seconds: Time limit of a `"multi_worker"` step that waits for other workers;
            then it raises. 0 means no limit. Defaults to 600.
        allow_remote: Whether other machines may connect to this task. TensorFlow's servers have no
            authentication. If False, all tasks must be on this machine. Defaults to False.
        partitioner: For `"parameter_server"`: partitions embedding tables over the servers, such as
            `tf.distribute.experimental.partitioners.MinSizePartitioner(max_shards=2)`. Other
            variables are never partitioned. Defaults to None, no partitions.
        shard: What the replicas of `"mirrored"` or `"multi_worker"` divide among themselves to save
            memory. `"optimizer"`: the optimizer's slots, and its update. `"gradients"`: also the
            sums of gradients over micro-steps. `"weights"`: also the weights, which processes of
            several devices each divide among their own, and processes of one device among all. See
            `kdist.Layout`. Defaults to None: each device holds everything.
        intra_op_threads: Threads among which one operation on the CPU is divided. They can be set
            only before TensorFlow starts; later a warning is logged. Defaults to None: all cores,
            or one if there are no more cores than logical CPU devices.

    Returns:
        A `tf.distribute.Strategy`. In a job with a coordinator (`"parameter_server"`, a layout),
        only the first task and the evaluator return; the others serve until the job ends.

    Raises:
        ValueError: If the name or the reduction is unknown, options contradict each other, or fewer
            devices are available. If tasks of the job are missing, have different settings, or are
            on other machines without `allow_remote`.
        TimeoutError: If another task does not start.
        RuntimeError: If TensorFlow has already started with other devices, Keras uses another
            backend, or a `keras.distribution` is set, which TensorFlow ignores.
    """
    from kdist.compat.keras import check_is_tensorflow, check_no_distribution

    check_is_tensorflow("kdist.create_strategy")
    check_no_distribution()
    spec = resolve(
        name,
        devices,
        reduction=reduction,
        num_packs=num_packs,
        cluster=cluster,
        cluster_timeout_seconds=cluster_timeout_seconds,
        step_timeout_seconds=step_timeout_seconds,
        allow_remote=allow_remote,
        partitioner=partitioner,
        shard=shard,
        intra_op_threads=intra_op_threads,
    )
    strategy = build(spec)
    note_created(strategy)
    return strategy


def _is_worth_reading(record):
    """Returns False for a line about one reduction, of which TensorFlow logs hundreds."""
    is_wanted = record.levelno > logging.INFO or tf.get_logger().isEnabledFor(logging.DEBUG)
    return is_wanted or record.module != "cross_device_ops"


def build(spec: StrategySpec) -> tf.distribute.Strategy:
    """Returns the strategy that a spec describes; see `create_strategy`.

    It configures devices, joins the job if there is one, and starts TensorFlow.
    """
    builders = {
        "auto": _auto,
        "one_device": _one_device,
        "mirrored": _mirrored,
        "central_storage": _central_storage,
        "tpu": _tpu,
        "multi_worker": _multi_worker,
        "parameter_server": _parameter_server,
        "layout": _layout,
    }
    # `kdist.Model` does it as well, but layers are created before it: their weights may be divided,
    # and their activations recomputed.
    hooks.install()
    tf.get_logger().addFilter(_is_worth_reading)  # absl programs log at the level INFO
    if spec.intra_op_threads is not None:
        from kdist.devices import set_intra_op_threads

        set_intra_op_threads(spec.intra_op_threads)
    return builders[spec.kind](spec)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this process writes checkpoints and logs: always, outside of a job."""
    return strategy.extended.should_checkpoint and not is_evaluator(strategy)


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of processes that compute: 1, outside of a job."""
    if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
        return number_of_workers(strategy)
    from kdist.parallel.device_groups import GroupStrategy

    if isinstance(strategy, GroupStrategy):
        return len({device.rpartition("/")[0] for device in device_names(strategy)})
    return strategy.num_replicas_in_sync // num_local_replicas(strategy)


def elastic_batch(strategy: tf.distribute.Strategy, local: int, accumulate: int = 1) -> Batch:
    """Returns the batch of a job that may run with fewer workers than planned.

    Its global size is that of the planned number of workers (`kdist launch --min_workers`). If some
    are missing, the others take more micro-steps, of at most `local` examples. Pass its
    `accumulate` to `compile`. In any other job it is `Batch(local, replicas, accumulate)`.

    Args:
        strategy: The strategy of the job.
        local: Number of examples per replica and micro-step, with all workers.
        accumulate: Number of micro-steps per update, with all workers. Defaults to 1.

    Returns:
        The `kdist.Batch` for the workers that there are.

    Raises:
        ValueError: If a size is less than 1.

    Example:

        strategy = kdist.create_strategy()
        batch = kdist.strategies.elastic_batch(strategy, local=16)
        train, test = kdist.data.load("fashion_mnist", batch=batch)
        ...
        model.compile("adam", "sparse_categorical_crossentropy", accumulate=batch.accumulate)
    """
    replicas, planned = strategy.num_replicas_in_sync, planned_workers(strategy)
    if planned is None:
        return Batch(local, replicas, accumulate)
    all_replicas = replicas // num_workers(strategy) * planned
    return Batch(local, all_replicas, accumulate).on_replicas(replicas)


def planned_workers(strategy: tf.distribute.Strategy) -> int | None:
    """Returns the number of workers when none is missing; None if all of them have to run."""
    try:
        cluster = Cluster.resolve()
    except ValueError:  # variables that a strategy of one process does not need
        return None
    # An evaluator, and a strategy of one process in a job of several, do not share the batch.
    shares = cluster.role != "evaluator" and cluster.num_workers == num_workers(strategy)
    return cluster.planned_workers if shares else None


def device_names(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the devices of the strategy's replicas, such as `("GPU:0", "GPU:1")`."""
    from kdist.parallel.device_groups import device_names as names

    return names(strategy)


# Strategies of one process.


def _auto(spec):
    if spec.devices is None and os.environ.get("TPU_NAME"):
        _logger.info("auto chose tpu: TPU_NAME=%s is set", os.environ["TPU_NAME"])
        return _tpu(spec)
    names = _find_devices(spec)
    if spec.devices is not None:
        reason = "as requested"
    elif names[0].startswith("CPU"):
        reason = "TensorFlow sees no GPU (--num_devices=N creates N logical CPU devices)"
    else:
        reason = f"TensorFlow sees {len(names)} GPU{'s' * (len(names) > 1)}"
    kind, builder = ("mirrored", _mirrored) if len(names) > 1 else ("one_device", _one_device)
    if spec.layout is not None and len(names) == 1:
        _logger.warning("shard=%s has no effect on one device", spec.layout.shard)
    _logger.info("auto chose %s on %s: %s", kind, ", ".join(names), reason)
    return builder(dataclasses.replace(spec, devices=names))


def _one_device(spec):
    return tf.distribute.OneDeviceStrategy(_find_devices(spec)[0])


def _mirrored(spec):
    names = _find_devices(spec)
    reduction = spec.reduction
    if names[0].startswith("CPU"):
        if reduction == "nccl":
            raise ValueError(
                f"nccl reduces between GPUs, and the devices are {', '.join(names)}; use "
                "--reduction=auto, hierarchical_copy or reduction_to_one_device"
            )
        if reduction == "auto":
            # TensorFlow's own choice, collectives, allows only one group of CPU devices per
            # process: a second strategy of another size fails, and all later ones with it. Packed
            # copies fail on gradients of several types.
            reduction = "reduction_to_one_device"
    packs = {} if spec.num_packs is None else {"num_packs": spec.num_packs}
    operations = None if reduction == "auto" else _CROSS_DEVICE_OPS[reduction](**packs)
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=operations)
    if spec.layout is not None:
        _divide(strategy, spec.layout)
    return strategy


def _divide(strategy, layout):
    """Lets the replicas of a strategy divide what a layout says."""
    strategy.layout = dataclasses.replace(layout, data=strategy.num_replicas_in_sync)


def _central_storage(spec):
    names = _find_devices(spec)
    parameters = names[0] if len(names) == 1 else "CPU:0"
    return tf.distribute.experimental.CentralStorageStrategy(names, parameters)


def _tpu(_):
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(os.environ.get("TPU_NAME", ""))
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, tf.errors.OpError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"no TPU answers ({reason or type(error).__name__}); set TPU_NAME to one that this "
            "machine can reach, or use --strategy=auto"
        ) from error
    return tf.distribute.TPUStrategy(resolver)


# Strategies of the tasks of a job.


def _join(spec, names, create, settings=None):
    """Returns the strategy of a task that joins a job; an evaluator computes on one device."""
    from kdist.job import join_job

    if spec.cluster.role == "evaluator":
        create = functools.partial(tf.distribute.OneDeviceStrategy, names[0])
    return join_job(spec, names, create, settings)


def _multi_worker(spec):
    names = _find_devices(spec)
    settings = {"the number of devices": str(len(names))}
    if spec.layout is not None:
        settings["the layout"] = str(spec.layout)

    def create():
        name = spec.reduction.upper()
        implementation = tf.distribute.experimental.CommunicationImplementation[name]
        options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
        with worker_devices(names), heartbeat_timeout(_MAX_SILENT_SECONDS):
            strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        set_up(strategy, spec.step_timeout_seconds, equalizes_seeds=False)  # by the handshake
        if spec.layout is not None and strategy.num_replicas_in_sync > 1:
            _divide(strategy, spec.layout)
            if is_multi_worker(strategy):
                find_ranks(strategy)
        return strategy

    return _join(spec, names, create, settings)


def _parameter_server(spec):
    from kdist.job import parameter_server_strategy

    def create():
        strategy = parameter_server_strategy(spec.cluster)
        set_up(strategy, partitioner=spec.partitioner)
        return strategy

    # The coordinator and the servers do not compute.
    computes = spec.cluster.role in ("worker", "evaluator")
    names = _find_devices(spec) if computes else ()
    return _join(spec, names, create)


def _layout(spec):
    from kdist.job import connect_to_all
    from kdist.parallel.device_groups import GroupStrategy

    names, layout = _find_devices(spec), spec.layout
    if spec.cluster.is_alone:
        return GroupStrategy(layout, [names])
    settings = {"the layout": str(layout), "the devices": ", ".join(names)}

    def create():
        return GroupStrategy(layout, connect_to_all(spec.cluster, names))

    return _join(spec, names, create, settings)


def _find_devices(spec):
    from kdist.devices import find_devices

    return find_devices(spec.devices)
