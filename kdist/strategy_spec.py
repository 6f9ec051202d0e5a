"""Validated description of a strategy, resolved without TensorFlow.

    spec = resolve("mirrored", devices=2, reduction="nccl")
    spec = resolve(kdist.Layout(data=2, pipeline=2))
    spec = resolve(kdist.planner.Plan.load("plan.json"))
    spec = resolve(kdist.tuning.Tuned.load("tuned.json"))
    strategy = kdist.strategies.build(spec)

`resolve` finds every error that does not depend on the devices of this machine.
"""

import dataclasses
import difflib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kdist.cluster import Cluster
from kdist.cluster.remote_access import check_remote_access
from kdist.hardware import parse_devices
from kdist.layout import Layout, supported_shards
from kdist.tuning.settings import Tuned

if TYPE_CHECKING:
    from kdist.planner.plans import Plan

_logger = logging.getLogger(__name__)

# Strategies of one process, and of the tasks of a job.
SINGLE_PROCESS = ("auto", "one_device", "mirrored", "central_storage", "tpu")
MULTI_PROCESS = ("multi_worker", "parameter_server")

# Ways to reduce gradients across devices (`mirrored`) and across tasks (`multi_worker`).
MIRRORED_REDUCTIONS = ("auto", "nccl", "hierarchical_copy", "reduction_to_one_device")
MULTI_WORKER_REDUCTIONS = ("auto", "nccl", "ring")

# Training methods that are not strategies, and how to use them.
_OTHER_METHODS = {
    "local_sgd": (
        "it is a training method for 'mirrored' and 'multi_worker': use one of these and "
        "model.compile(…, local_steps=k) (--strategy=mirrored --local_steps=8)"
    ),
}


@dataclasses.dataclass(frozen=True)
class StrategySpec:
    """Everything that `kdist.strategies.build` needs to create a strategy.

    Attributes:
        kind: A name in `SINGLE_PROCESS` or `MULTI_PROCESS`, or `"layout"` for a split model.
        devices: Number of devices of this task, or their names; None for all.
        reduction: Algorithm that reduces gradients.
        num_packs: Number of tensors that gradients are packed into; None for TensorFlow's default.
        layout: Layout of a split model, or of sharded replicas; None for others. The number of
            sharded replicas is that of the devices.
        cluster: Tasks of the job; a single process for `SINGLE_PROCESS`.
        cluster_timeout_seconds: Limit for all tasks to start.
        step_timeout_seconds: Limit of a `multi_worker` step; 0 for none.
        partitioner: Partitioner of embedding tables under `parameter_server`.
        intra_op_threads: Threads of one operation on the CPU; None for the default.
    """

    kind: str
    devices: int | tuple[str, ...] | None = None
    reduction: str = "auto"
    num_packs: int | None = None
    layout: Layout | None = None
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    cluster_timeout_seconds: float = 60.0
    step_timeout_seconds: float = 600.0
    partitioner: Callable | None = None
    intra_op_threads: int | None = None

    @property
    def job_name(self) -> str:
        """The strategy's name among the tasks of a job."""
        return "a layout" if self.kind == "layout" else self.kind


def resolve(
    name: "str | Plan | Layout | Tuned" = "auto",
    devices: int | Sequence[str] | None = None,
    *,
    reduction: str = "auto",
    num_packs: int | None = None,
    cluster: Cluster | None = None,
    cluster_timeout_seconds: float = 60.0,
    step_timeout_seconds: float = 600.0,
    allow_remote: bool = False,
    partitioner: Callable | None = None,
    shard: str | None = None,
    intra_op_threads: int | None = None,
) -> StrategySpec:
    """Returns the spec of a strategy, after checking that its options agree.

    It has the arguments of `kdist.create_strategy`. It reads the engine's variables if `cluster`
    is not given. It has no side effects, but logs what `"auto"` is in a job.

    Raises:
        ValueError: If the name or the reduction is unknown, options contradict each other, the
            cluster lacks tasks, or an address is remote without `allow_remote`.
    """
    if isinstance(name, Tuned):
        return resolve(
            **_completed(
                name.strategy_options,
                devices=devices,
                reduction=reduction,
                num_packs=num_packs,
                shard=shard,
                intra_op_threads=intra_op_threads,
            ),
            cluster=cluster,
            cluster_timeout_seconds=cluster_timeout_seconds,
            step_timeout_seconds=step_timeout_seconds,
            allow_remote=allow_remote,
            partitioner=partitioner,
        )
    if isinstance(name, Layout):
        name.check_only_degrees()
        if shard is not None:
            raise ValueError(
                f"shard={shard} (--shard) and the layout {name}: write shard={shard} in the layout"
            )
    elif not isinstance(name, str):
        name, devices, cluster = _from_plan(name, devices, cluster)
    if intra_op_threads is not None and intra_op_threads < 1:
        raise ValueError(f"intra_op_threads={intra_op_threads} is not a positive number or None")
    devices = parse_devices(devices)
    sharded = Layout(shard=shard) if shard is not None else None
    if isinstance(name, Layout) and name.shard is not None:
        sharded = name
        cluster = Cluster.resolve() if cluster is None else cluster
        if cluster.is_alone:
            name, devices = "mirrored", _devices_of_replicas(sharded, devices)
        else:
            name = "multi_worker"
    if name == "auto":
        name, cluster = _automatic(cluster)
    layout = name if isinstance(name, Layout) else None
    if layout is not None:
        name = "layout"
        _check_layout_options(reduction, num_packs, partitioner)
    elif name not in SINGLE_PROCESS + MULTI_PROCESS:
        raise ValueError(_unknown(name))
    if sharded is not None:
        _check_shard(sharded.shard, name)
    spec = StrategySpec(
        name,
        devices,
        reduction,
        num_packs,
        layout or sharded,
        Cluster(),
        cluster_timeout_seconds,
        step_timeout_seconds,
        partitioner,
        intra_op_threads,
    )
    if partitioner is not None and name not in ("auto", "parameter_server"):
        _logger.warning("partitioner has no effect under %s, which has no parameter servers", name)
    if name in SINGLE_PROCESS:
        _check_single_process(spec)
        if name != "auto":
            _warn_of_other_tasks(name)
        return spec
    return _in_cluster(spec, Cluster.resolve() if cluster is None else cluster, allow_remote)


def _completed(tuned, **options):
    """Returns tuned options with those that the caller gave; raises if they contradict."""
    given = {name: value for name, value in options.items() if value not in (None, "auto")}
    for name, value in given.items():
        if tuned.get(name) not in (None, value):
            raise ValueError(
                f"{name}={value!r}: the tuned settings have {tuned[name]!r}; leave it out"
            )
    return tuned | given


def _automatic(cluster):
    """Returns ("auto", cluster), or the strategy of a job of several tasks instead of "auto"."""
    cluster = Cluster.resolve() if cluster is None else cluster
    if cluster.is_alone:
        return "auto", cluster
    name = "parameter_server" if "ps" in cluster.tasks else "multi_worker"
    _logger.info("auto chose %s: the job has %s", name, cluster.counts())
    return name, cluster


def _warn_of_other_tasks(name):
    """Logs that a strategy of one process was requested by name in a job of several tasks."""
    try:
        cluster = Cluster.resolve()
    except ValueError:  # variables that this strategy does not need
        return
    if not cluster.is_alone:
        _logger.warning(
            "%s trains another model in each task of the job, which has %s; use "
            "--strategy=auto (the default) to train one model in all of them",
            name,
            cluster.counts(),
        )


def _in_cluster(spec, cluster, allow_remote):
    check_remote_access(cluster, allow_remote)
    if spec.kind == "multi_worker":
        _check_communication(spec)
    elif spec.kind == "parameter_server":
        _check_no_reduction(spec)
    if spec.kind != "layout" or not cluster.is_alone:
        cluster.check_roles_for(spec.job_name)
    if spec.kind != "multi_worker" and cluster.planned_workers is not None:
        raise ValueError(
            f"{spec.job_name} trains with a fixed number of workers; start the job without "
            "--min_workers, or use --strategy=multi_worker"
        )
    spec = dataclasses.replace(spec, cluster=cluster)
    if spec.layout is not None and spec.layout.devices > 1:
        spec = _with_layout_devices(spec)
    return spec


def _count(devices):
    return devices if isinstance(devices, int) else len(devices)


def _with_layout_devices(spec):
    """Returns the spec with the devices of this task; checks that they fit the layout."""
    tasks = max(1, spec.cluster.num_workers)
    devices = spec.devices
    if devices is None:
        devices, rest = divmod(spec.layout.devices, tasks)
        if rest:
            raise ValueError(
                f"{spec.layout} is for {spec.layout.devices} devices, which cannot be divided over "
                f"{tasks} tasks: use another layout or another number of tasks"
            )
        parse_devices(devices)
    names = [f"device {n}" for n in range(devices)] if isinstance(devices, int) else devices
    spec.layout.groups([names] * tasks)
    return dataclasses.replace(spec, devices=devices)


def _devices_of_replicas(
    layout: Layout, devices: int | tuple[str, ...] | None
) -> int | tuple[str, ...]:
    """Returns the devices of a layout whose replicas have one device each."""
    if devices is None:
        devices = layout.data
        parse_devices(devices)
    count = _count(devices)
    if count != layout.data:
        raise ValueError(
            f"{layout} is for {layout.data} devices, and devices={devices!r} names {count}; make "
            "them equal, or leave devices (--num_devices) out"
        )
    return devices


def _from_plan(plan, devices, cluster):
    """Returns (strategy name or layout, devices per machine, cluster) of a plan."""
    from kdist.planner.plans import Plan

    if not isinstance(plan, Plan):
        raise ValueError(_unknown(plan))
    layout = plan.layout
    if devices is not None:
        raise ValueError(
            f"the plan determines the devices, {layout.devices_per_machine}; leave devices= out"
        )
    cluster = Cluster.resolve() if cluster is None else cluster
    _check_machines(layout, cluster)
    has_degrees = layout.group_size > 1 or layout.shard is not None
    name = layout.degrees if has_degrees else layout.strategy
    return name, layout.devices_per_machine, cluster


def _check_machines(layout, cluster):
    """Checks that the job has as many training tasks as the plan has machines."""
    served = layout.asynchronous
    roles = ("worker",) if served else ("chief", "worker")
    tasks = sum(len(cluster.tasks.get(role, ())) for role in roles) or 1
    tasks = cluster.planned_workers or tasks
    servers = len(cluster.tasks.get("ps", ()))
    if tasks != layout.machines or (served and servers != layout.machines):
        flags = f"--workers={layout.machines}" + served * f" --ps={layout.machines}"
        raise ValueError(
            f"the plan is for {layout.machines} machines ({layout.strategy}"
            f"{', a server on each' * served}), and this job has {tasks} task{'s' * (tasks > 1)}"
            f"{f' and {servers} servers' * served}; start it with kdist launch {flags}, with "
            "TF_CONFIG on each machine, or create another plan with --max_machines"
        )


def _check_single_process(spec):
    name, devices = spec.kind, spec.devices
    if name in ("auto", "mirrored"):
        _check_reduction(spec.reduction, spec.num_packs)
    else:
        _check_no_reduction(spec)
    if name == "tpu" and devices is not None:
        raise ValueError("tpu uses all cores of the TPU; leave devices= (--num_devices) out")
    if name == "one_device" and devices is not None:
        count = _count(devices)
        if count > 1:
            raise ValueError(
                f"one_device uses one device, and devices={devices!r} requests {count}; request "
                "one, or use --strategy=mirrored"
            )


def _check_reduction(reduction, num_packs):
    if reduction not in MIRRORED_REDUCTIONS:
        raise ValueError(
            f"unknown reduction {reduction!r}; use one of {', '.join(MIRRORED_REDUCTIONS)}"
        )
    if num_packs is None:
        return
    if reduction not in ("nccl", "hierarchical_copy"):
        raise ValueError(f"num_packs={num_packs} needs --reduction=nccl or hierarchical_copy")
    if num_packs < 0:
        raise ValueError(f"num_packs must be 0 (no packing) or more, got {num_packs}")


def _check_no_reduction(spec):
    if (spec.reduction, spec.num_packs) != ("auto", None):
        raise ValueError(
            f"reduction={spec.reduction!r} and num_packs={spec.num_packs} are options of "
            f"'mirrored'; {spec.kind!r} does not support them, leave them out"
        )


def _check_communication(spec):
    if spec.reduction not in MULTI_WORKER_REDUCTIONS or spec.num_packs is not None:
        raise ValueError(
            f"reduction={spec.reduction!r}, num_packs={spec.num_packs}: multi_worker supports the "
            f"reductions {', '.join(MULTI_WORKER_REDUCTIONS)} and no num_packs"
        )


def _check_shard(shard, name):
    if name == "auto" or shard in supported_shards(name):
        return
    raise ValueError(
        f"shard={shard} (--shard) divides training state over replicas with whole models, "
        f"which {name} does not support; use --strategy=mirrored or multi_worker, or leave "
        "shard out"
    )


def _check_layout_options(reduction, num_packs, partitioner):
    if (reduction, num_packs, partitioner) != ("auto", None, None):
        raise ValueError(
            f"reduction={reduction!r}, num_packs={num_packs}, partitioner={partitioner}: a layout "
            "does not support these options, leave them out"
        )


def _unknown(name):
    if isinstance(name, str) and name in _OTHER_METHODS:
        return f"{name!r} is not a strategy; {_OTHER_METHODS[name]}"
    names = SINGLE_PROCESS + MULTI_PROCESS
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"unknown strategy {name!r}{hint} Use one of {', '.join(names)}"
