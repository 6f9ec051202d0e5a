"""A name becomes a `tf.distribute.Strategy`.

    strategy = create_strategy("auto")                             # takes what is there
    strategy = create_strategy("mirrored", devices=2)              # two GPUs, or logical CPUs
    strategy = create_strategy("mirrored", devices=["GPU:0", "GPU:3"], reduction="nccl")
    strategy = create_strategy("multi_worker")                     # on each task of a job
    strategy = create_strategy("parameter_server")                 # only the chief goes on
    strategy = create_strategy(kdist.planner.Plan.load("plan.json"))      # what was planned
    strategy = create_strategy(kdist.Layout(data=2, pipeline=2))          # models that are split

Create it before anything else runs on TensorFlow: the number of logical devices and the GPUs'
memory growth are fixed from the first operation on.
"""

import difflib
import os
from collections.abc import Sequence

import tensorflow as tf

from kdist.agreement import first_task
from kdist.backend import check_is_tensorflow, check_no_distribution
from kdist.cluster import Cluster
from kdist.coordinator import devices_of_all, parameter_server_strategy, serve
from kdist.devices import find_devices
from kdist.exposure import check_allowed, shut_out_others
from kdist.join import join
from kdist.layout import Layout
from kdist.parallel.groups import GroupStrategy, short_name
from kdist.planner.plans import Layout as PlannedLayout
from kdist.planner.plans import Plan
from kdist.telemetry.collector import note_collector
from kdist.tensorflow_internals import (
    each_worker_has,
    number_of_workers,
    reuse_collective_keys,
    silence_is_borne,
)
from kdist.training.served_embedding import Partitioner, serve_embeddings
from kdist.training.sidecar import is_evaluator, make_evaluator, note_evaluator
from kdist.training.step_limit import limit_steps
from kdist.training.together import replicas_here

REDUCTIONS = {
    "auto": None,
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
}

# How `multi_worker` adds gradients across tasks.
COMMUNICATIONS = {"auto": "AUTO", "nccl": "NCCL", "ring": "RING"}

# What is no strategy here, and how it is had.
_NO_STRATEGIES = {
    "local_sgd": (
        "it is a way to train under 'mirrored' or 'multi_worker': take one of these and "
        "model.compile(…, local_steps=k) (--strategy=mirrored --local_steps=8)"
    ),
}


# After which a task of `multi_worker` counts as gone; the launcher, which can tell which one hangs,
# comes first.
_SILENT_SECONDS = 65.0

# Strategies of several tasks.
_OF_JOBS = ("multi_worker", "parameter_server")


def create_strategy(
    name: str | Plan | Layout = "auto",
    devices: int | Sequence[str] | None = None,
    *,
    reduction: str = "auto",
    num_packs: int | None = None,
    cluster: Cluster | None = None,
    cluster_timeout_seconds: float = 60.0,
    step_timeout_seconds: float = 600.0,
    allow_remote: bool = False,
    partitioner: Partitioner | None = None,
) -> tf.distribute.Strategy:
    """Makes the strategy called `name` on `devices`.

    Args:
        name: `auto` (mirrored on several devices, else one; says in a line what it took),
            `one_device`, `mirrored`, `multi_worker`, `parameter_server`, `central_storage` or
            `tpu`. Or a plan, which says the devices as well; the job has to have as many tasks as
            it has machines. Or the layout of a model that is split over devices.
        devices: how many, or their names; None takes all GPUs, or the CPU where there are none.
            A number on a machine without GPUs makes that many logical CPU devices. Under
            `multi_worker`, and with a layout in a job of several tasks, they are those of this
            task; all tasks have the same number.
        reduction: how `mirrored` adds gradients across devices: `auto` (TensorFlow's choice
            between GPUs, `reduction_to_one_device` between CPU devices), `nccl` (GPUs only),
            `hierarchical_copy`, `reduction_to_one_device`. How `multi_worker` does: `auto`, `nccl`
            (GPUs), `ring` (any devices).
        num_packs: gradients are packed into this many tensors before `nccl` or
            `hierarchical_copy` sends them; 0 sends each alone. None is TensorFlow's default, 1.
        cluster: the tasks of the job, and which one this process is; by default what TF_CONFIG or
            Slurm says.
        cluster_timeout_seconds: how long a task of a job waits for the others to come.
        step_timeout_seconds: how long `multi_worker` waits for them in a step; then it raises.
        allow_remote: whether other machines may reach this task of a job; without it all tasks
            have to be on this machine. TensorFlow's servers let everybody in who reaches them.
        partitioner: `parameter_server`: into how many parts an embedding's table is cut, such as
            `tf.distribute.experimental.partitioners.MinSizePartitioner(max_shards=2)`. None, the
            default, keeps it whole; other variables are whole in any case.

    Raises:
        ValueError: an unknown name or reduction, options that do not go together, or more devices
            than there are; a plan and devices besides, or another number of tasks; tasks of the
            job that are missing, were told different things, or are on other machines without
            `allow_remote`.
        TimeoutError: another task did not come.
        RuntimeError: TensorFlow's context was configured otherwise before; Keras has another
            backend, or a `keras.distribution` is set, which does nothing on TensorFlow.
    """
    check_is_tensorflow("kdist.create_strategy")
    check_no_distribution()
    if isinstance(name, Plan):
        if devices is not None:
            raise ValueError(f"the plan says the devices, {name.layout.devices}; leave them out")
        layout = name.layout
        cluster = _planned_cluster(layout, cluster)
        name, devices = layout.strategy, layout.devices
    if isinstance(name, Layout):
        _check_layout_alone(reduction, num_packs, partitioner)
        cluster = Cluster.resolve() if cluster is None else cluster
        check_allowed(cluster, allow_remote)
        return _groups(name, devices, cluster, cluster_timeout_seconds)
    if name in _OF_JOBS:
        cluster = Cluster.resolve() if cluster is None else cluster
        check_allowed(cluster, allow_remote)
        if cluster.role == "evaluator":
            return _evaluator(name, devices, cluster, cluster_timeout_seconds)
    if name == "multi_worker":
        _check_communication(reduction, num_packs)
        return _multi_worker(
            devices,
            COMMUNICATIONS[reduction],
            cluster,
            cluster_timeout_seconds,
            step_timeout_seconds,
        )
    if name == "parameter_server":
        return _parameter_server(devices, cluster, cluster_timeout_seconds, partitioner)
    return _of_one_process(name, devices, reduction, num_packs)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the one that writes: always, unless it is one of several tasks."""
    return strategy.extended.should_checkpoint and not is_evaluator(strategy)


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Processes that compute: 1, unless the strategy is one of several tasks."""
    if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
        return number_of_workers(strategy)
    if isinstance(strategy, GroupStrategy):
        return len({device.rpartition("/")[0] for device in device_names(strategy)})
    return strategy.num_replicas_in_sync // replicas_here(strategy)


def device_names(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """The devices that the strategy's replicas compute on, such as `("GPU:0", "GPU:1")`."""
    if isinstance(strategy, GroupStrategy):
        return tuple(short_name(device) for group in strategy.groups for device in group)
    devices = strategy.extended.worker_devices
    return tuple(device.rsplit("/device:", 1)[-1].rsplit("/", 1)[-1].upper() for device in devices)


def _planned_cluster(layout: PlannedLayout, cluster: Cluster | None) -> Cluster:
    """The job's cluster, which has to have as many computing tasks as the plan has machines."""
    cluster = Cluster.resolve() if cluster is None else cluster
    served = layout.strategy == "parameter_server"
    computing = ("worker",) if served else ("chief", "worker")
    tasks = sum(len(cluster.tasks.get(role, ())) for role in computing) or 1
    servers = len(cluster.tasks.get("ps", ()))
    if tasks != layout.machines or (served and servers != layout.machines):
        flags = f"--workers={layout.machines}" + served * f" --ps={layout.machines}"
        raise ValueError(
            f"the plan is for {layout.machines} machines ({layout}{', a server on each' * served}),"
            f" and this job has {tasks} task{'s' * (tasks > 1)}"
            f"{f' and {servers} servers' * served}; start it with scripts/launch.py {flags}, with "
            "TF_CONFIG on each machine, or plan anew with --max_machines"
        )
    return cluster


def _of_one_process(name, devices, reduction, num_packs):
    builders = {
        "auto": _auto,
        "one_device": _one_device,
        "mirrored": _mirrored,
        "central_storage": _central_storage,
        "tpu": _tpu,
    }
    if name not in builders:
        raise ValueError(_unknown(name, [*builders, *_OF_JOBS]))
    if name not in ("auto", "mirrored") and (reduction != "auto" or num_packs is not None):
        raise ValueError(
            f"reduction={reduction!r} and num_packs={num_packs} are options of 'mirrored'; "
            f"{name!r} has no such choice, leave them out"
        )
    return builders[name](devices, _cross_device_ops(reduction, num_packs))


def _auto(devices, cross_device_ops):
    if devices is None and os.environ.get("TPU_NAME"):
        print(f"kdist: auto took tpu, because TPU_NAME={os.environ['TPU_NAME']} is set")
        return _tpu(None, None)
    names = find_devices(devices)
    reason = "as asked" if devices is not None else f"TensorFlow sees {_counted(names)}"
    if len(names) > 1:
        print(f"kdist: auto took mirrored on {', '.join(names)}: {reason}")
        return _mirrored(names, cross_device_ops)
    print(f"kdist: auto took one_device on {names[0]}: {reason}")
    return _one_device(names, cross_device_ops)


def _counted(names):
    if names[0].startswith("CPU"):
        return "no GPU (--num_devices=N makes N logical CPU devices)"
    return f"{len(names)} GPU{'s' if len(names) > 1 else ''}"


def _one_device(devices, _):
    names = find_devices(devices)
    if devices is not None and len(names) > 1:
        raise ValueError(
            f"one_device takes one device, {len(names)} were asked for ({', '.join(names)}); "
            "name one, or take --strategy=mirrored"
        )
    return tf.distribute.OneDeviceStrategy(names[0])


def _mirrored(devices, cross_device_ops):
    names = find_devices(devices)
    if isinstance(cross_device_ops, tf.distribute.NcclAllReduce) and names[0].startswith("CPU"):
        raise ValueError(
            f"nccl reduces between GPUs, and the devices are {', '.join(names)}; take --reduction="
            "auto, hierarchical_copy or reduction_to_one_device"
        )
    if cross_device_ops is None and names[0].startswith("CPU"):
        # TensorFlow's own choice, its collectives, lets only one group of CPU devices exist in a
        # process: a second strategy of another size fails, and all later ones with it. Packed
        # copies would fail on gradients of several types.
        cross_device_ops = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(names, cross_device_ops=cross_device_ops)


def _check_layout_alone(reduction, num_packs, partitioner):
    if (reduction, num_packs, partitioner) != ("auto", None, None):
        raise ValueError(
            f"reduction={reduction!r}, num_packs={num_packs}, partitioner={partitioner}: a layout "
            "has no such choice, leave them out"
        )


def _groups(layout, devices, cluster, cluster_timeout_seconds):
    if cluster.is_alone:
        devices = layout.devices if devices is None else devices
        return GroupStrategy(layout, [find_devices(devices)])
    cluster.check_roles_for("a layout")
    if devices is None:
        devices = _devices_of_each(layout, cluster)
    names = find_devices(devices)
    layout.groups([names] * cluster.num_workers)  # raises before the others wait
    facts = {"the layout": str(layout), "the devices": ", ".join(names)}
    collector = join(cluster, "a layout", cluster_timeout_seconds, facts)
    if cluster != first_task(cluster):
        serve(cluster, names)
    strategy = GroupStrategy(layout, devices_of_all(cluster, names))
    shut_out_others(cluster)
    note_collector(strategy, collector)
    return strategy


def _devices_of_each(layout, cluster):
    each, left = divmod(layout.devices, cluster.num_workers)
    if left:
        raise ValueError(
            f"{layout} is for {layout.devices} devices, which cannot be divided over "
            f"{cluster.num_workers} tasks: take another layout or another number of tasks"
        )
    return each


def _multi_worker(devices, communication, cluster, cluster_timeout_seconds, step_timeout_seconds):
    names = find_devices(devices)
    facts = _facts_of("multi_worker", names)
    collector = join(cluster, "multi_worker", cluster_timeout_seconds, facts)
    implementation = tf.distribute.experimental.CommunicationImplementation[communication]
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    with each_worker_has(names), silence_is_borne(_SILENT_SECONDS):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    reuse_collective_keys(strategy)
    shut_out_others(cluster)
    limit_steps(strategy, step_timeout_seconds)
    note_collector(strategy, collector)
    if "evaluator" in cluster.tasks:
        note_evaluator(strategy)
    return strategy


def _parameter_server(devices, cluster, cluster_timeout_seconds, partitioner):
    collector = join(cluster, "parameter_server", cluster_timeout_seconds)
    if not cluster.is_chief:
        serve(cluster, devices)
    strategy = parameter_server_strategy(cluster)
    shut_out_others(cluster)
    note_collector(strategy, collector)
    serve_embeddings(strategy, partitioner)
    if "evaluator" in cluster.tasks:
        note_evaluator(strategy)
    return strategy


def _evaluator(name, devices, cluster, cluster_timeout_seconds):
    """One device of a task that waits for checkpoints."""
    names = find_devices(devices)
    collector = join(cluster, name, cluster_timeout_seconds, _facts_of(name, names))
    strategy = tf.distribute.OneDeviceStrategy(names[0])
    note_collector(strategy, collector)
    make_evaluator(strategy, first_task(cluster).address)
    return strategy


def _facts_of(name, devices):
    """What all tasks have alike: of parameter servers and their chief, not the devices."""
    return {"the number of devices": str(len(devices))} if name == "multi_worker" else {}


def _check_communication(reduction, num_packs):
    if reduction not in COMMUNICATIONS or num_packs is not None:
        raise ValueError(
            f"reduction={reduction!r}, num_packs={num_packs}: multi_worker takes a reduction of "
            f"{', '.join(COMMUNICATIONS)} and no num_packs"
        )


def _central_storage(devices, _):
    names = find_devices(devices)
    parameters = names[0] if len(names) == 1 else "CPU:0"
    return tf.distribute.experimental.CentralStorageStrategy(names, parameters)


def _tpu(devices, _):
    if devices is not None:
        raise ValueError("tpu takes all cores of the TPU; leave devices= (--num_devices) out")
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(os.environ.get("TPU_NAME", ""))
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, tf.errors.OpError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"no TPU answers ({reason or type(error).__name__}); set TPU_NAME to one that this "
            "machine reaches, or take --strategy=auto"
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def _cross_device_ops(reduction, num_packs):
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}; there are {', '.join(REDUCTIONS)}")
    if num_packs is None:
        return REDUCTIONS[reduction]() if REDUCTIONS[reduction] else None
    if reduction not in ("nccl", "hierarchical_copy"):
        raise ValueError(f"num_packs={num_packs} needs --reduction=nccl or hierarchical_copy")
    if num_packs < 0:
        raise ValueError(f"num_packs must be 0 (no packing) or more, got {num_packs}")
    return REDUCTIONS[reduction](num_packs=num_packs)


def _unknown(name, known):
    if name in _NO_STRATEGIES:
        return f"{name!r} is no strategy of its own; {_NO_STRATEGIES[name]}"
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown strategy {name!r}{hint} There are {', '.join(known)}"
