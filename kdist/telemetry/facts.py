"""Facts about a training that its configuration and its summary contain."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from kdist.cluster import Cluster
from kdist.cluster.handshake import parse_address
from kdist.layout import Layout
from kdist.parallel.device_groups import GroupStrategy, device_names
from kdist.telemetry.provenance import git_commit, versions
from kdist.training.scopes import has_parameter_servers
from kdist.training.sharding.parts import sharded_state
from kdist.training.state import training_state_of

_PLAIN = str | int | float | bool | None


def training_config(
    model: keras.Model, workers: int, fit_params: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the configuration of a training, grouped as W&B shows it.

    Args:
        model: the compiled model, in `fit` or before.
        workers: number of processes that compute.
        fit_params: `epochs` and `steps` of `fit`, such as a callback's `params`; None if unknown.

    Returns:
        Names and values. `optimizer`, `batch`, `layout`, and `versions` are groups.
    """
    strategy, fit_params = model.distribute_strategy, fit_params or {}
    return {
        "model": model.name,
        "optimizer": _optimizer(model.optimizer),
        "loss": _name(getattr(model, "loss", None)),
        "strategy": _strategy_name(strategy),
        "devices": _devices(strategy),
        "precision": model.dtype_policy.name,
        "epochs": fit_params.get("epochs"),
        "steps_per_epoch": fit_params.get("steps"),
        "num_examples": (_state(model, "data_facts") or {}).get("num_examples"),
        "steps_per_execution": getattr(model, "steps_per_execution", 1),
        "jit_compile": bool(getattr(model, "jit_compile", False)),
        "batch": _batch(model),
        "layout": _layout(model, workers),
        "versions": versions(),
        "git_commit": git_commit(),
    }


def training_summary(model: keras.Model, workers: int) -> dict[str, Any]:
    """Returns the facts of a trained model that `summary.json` contains.

    Args:
        model: the model.
        workers: number of processes that compute.
    """
    strategy, batch = model.distribute_strategy, _batch(model)
    local_steps = _state(model, "local_steps")
    staleness = _state(model, "staleness")
    return {
        "model": model.name,
        "parameters": model.count_params() if model.built else None,
        "strategy": _strategy_name(strategy),
        "devices": _devices(strategy),
        "num_replicas": batch["replicas"],
        "local_batch_size": batch["local"],
        "accumulate": batch["accumulate"],
        "workers": workers,
        "staleness": dataclasses.asdict(staleness) if staleness else None,
        "global_batch_size": batch["global"],
        "local_steps": local_steps,
        "local_slots": _state(model, "local_slots") if local_steps else None,
        "precision": model.dtype_policy.name,
        "versions": versions(),
        "git_commit": git_commit(),
    }


def shares_cores(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all devices of a strategy share the cores of one machine.

    Such devices are logical CPU devices of one process, or those of several processes on loopback.
    """
    names = _devices(strategy)
    if not all("CPU" in name for name in names):
        return False
    addresses = _addresses()
    hosts = {parse_address(address)[0] for address in addresses}
    return (len(names) > 1 or len(addresses) > 1) and len(hosts) <= 1


def _addresses():
    try:
        return [address for tasks in Cluster.resolve().tasks.values() for address in tasks]
    except ValueError:  # a strategy of one process does not need the variables of the job
        return []


def _strategy_name(strategy):
    name = type(strategy).__name__
    return "DefaultStrategy" if name.startswith("_Default") else name


def _devices(strategy):
    try:
        return list(device_names(strategy))
    except RuntimeError:  # TensorFlow's default strategy does not report its device
        return ["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"]


def _state(model, name):
    return getattr(training_state_of(model), name, None)


def _batch(model):
    replicas, size = (
        model.distribute_strategy.num_replicas_in_sync,
        _state(model, "global_batch_size"),
    )
    accumulate = _state(model, "accumulate") or 1
    return {
        "global": size,
        # The largest, as the rows may be divided unevenly.
        "local": -(-size // (replicas * accumulate)) if size else None,
        "replicas": replicas,
        "accumulate": accumulate,
    }


def _layout(model, workers):
    strategy = model.distribute_strategy
    if isinstance(strategy, GroupStrategy):
        return dataclasses.asdict(strategy.layout)
    is_asynchronous = has_parameter_servers(strategy)
    return {
        **dataclasses.asdict(strategy.layout if sharded_state(strategy) else Layout()),
        "data": workers if is_asynchronous else strategy.num_replicas_in_sync,
        "machines": workers,
        "accumulate": _state(model, "accumulate") or 1,
        "local_steps": _state(model, "local_steps"),
        "asynchronous": is_asynchronous,
    }


def _optimizer(optimizer):
    """Returns the name and the plain settings of an optimizer; a schedule by its name."""
    if optimizer is None:
        return None
    try:
        config = optimizer.get_config()
    except (NotImplementedError, AttributeError):
        config = {}
    settings = {key: _setting(value) for key, value in config.items() if key != "name"}
    known = {key: value for key, value in settings.items() if value is not None}
    return {"name": type(optimizer).__name__, **known}


def _setting(value):
    if isinstance(value, float):
        return float(f"{value:.7g}")  # optimizers have float32
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict) and isinstance(value.get("class_name"), str):
        config = value.get("config") or {}
        plain = {
            key: _setting(part)
            for key, part in config.items()
            if isinstance(part, _PLAIN) and part is not None
        }
        return {"name": value["class_name"], **plain}
    try:
        return float(f"{float(value):.7g}")  # a NumPy number
    except (TypeError, ValueError):
        return None


def _name(value):
    """Returns the name of a loss, or the names of several."""
    if isinstance(value, dict):
        return {key: _name(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_name(part) for part in value]
    if value is None or isinstance(value, str):
        return value
    return getattr(value, "name", None) or getattr(value, "__name__", type(value).__name__)
