"""Configuration and summary of a run."""

import dataclasses
import importlib.metadata
import pathlib
import subprocess
import sys

from absl import flags

import kdist
from kdist import program

FLAGS = flags.FLAGS


def run_config(dataset, num_examples=None):
    """Returns all flags of this program with the actual dataset and number of examples."""
    return {
        **{name: flag.value for name, flag in program.own_flags().items()},
        "dataset": dataset,
        "num_examples": num_examples,
    }


def tensorflow_summary(strategy, batch, dataset, examples, model):
    """Returns the model, devices, batch, and versions of the run."""
    return {
        "model": FLAGS.model,
        "parameters": model.count_params(),
        "dataset": dataset,
        "examples": examples,
        "strategy": type(strategy).__name__,
        "devices": list(kdist.strategies.device_names(strategy)),
        "num_replicas": batch.replicas,
        "local_batch_size": batch.local,
        "accumulate": batch.accumulate,
        "workers": kdist.strategies.num_workers(strategy),
        "staleness": dataclasses.asdict(model.training_state.staleness),
        "global_batch_size": batch.global_size,
        "local_steps": FLAGS.local_steps,
        "local_slots": FLAGS.local_slots if FLAGS.local_steps else None,
        "precision": FLAGS.precision,
        "epochs": FLAGS.epochs,
        "versions": versions(),
        "git_commit": git_commit(),
    }


def jax_summary(mesh, batch, dataset, train, model):
    """Returns the summary of a run on a JAX mesh, with the bytes of state per device."""
    from kdist.parallel.jax_mesh import bytes_per_device

    state_bytes = bytes_per_device([*model.variables, *model.optimizer.variables])
    return {
        "model": FLAGS.model,
        "parameters": model.count_params(),
        "dataset": dataset,
        "examples": train.num_examples,
        "backend": FLAGS.backend,
        "strategy": f"JAX mesh {mesh.layout}",
        "layout": str(mesh.layout),
        "devices": [str(name).upper() for name in mesh.device_mesh.devices.flatten()],
        "state_bytes_per_device": {name.upper(): size for name, size in state_bytes.items()},
        "num_replicas": batch.replicas,
        "local_batch_size": batch.local,
        "accumulate": batch.accumulate,
        "workers": 1,
        "global_batch_size": batch.global_size,
        "local_steps": None,
        "precision": FLAGS.precision,
        "epochs": FLAGS.epochs,
        "versions": versions("jax"),
        "git_commit": git_commit(),
    }


def speed_of(epoch_seconds, train):
    """Returns seconds per epoch, and the throughput after the first epoch, which compiles."""
    examples = train.steps_per_epoch * train.batch.global_size
    later = epoch_seconds[1:]
    return {
        "seconds_per_epoch": sum(epoch_seconds) / len(epoch_seconds),
        "examples_per_second": len(later) * examples / sum(later) if later else None,
    }


def versions(*more):
    """Returns the versions of Python and of the packages that affect the results."""
    names = ("kdist", "tensorflow", "keras", "numpy", *more)
    return {
        "python": sys.version.split()[0],
        **{name: importlib.metadata.version(name) for name in names},
    }


def git_commit():
    """Returns the commit of the clone that contains this package; None without one."""
    root = pathlib.Path(kdist.__file__).parents[1]
    if not (root / ".git").exists():  # not that of a project that has the package in its folder
        return None
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cost(seconds):
    """Returns the duration of the program, and its cost if a price is given."""
    price = FLAGS.price_usd_per_hour
    paid = {} if price is None else {"cost_usd": price * seconds / 3600}
    return {"total_seconds": seconds, "price_usd_per_hour": price, **paid}


def print_summary(summary):
    """Prints the results of the run, in the format of *Dive into Deep Learning*."""
    rate, local = summary["examples_per_second"], summary["local_steps"]
    results = {name: summary[name] for name in summary if name.startswith("test_")}
    first = ["test_accuracy"] if "test_accuracy" in results else []
    names = [*first, "test_loss", *sorted(results.keys() - {"test_accuracy", "test_loss"})]
    print(
        "".join(f"{name.replace('_', ' ')} {results[name]:.4f}, " for name in names)
        + f"{summary['seconds_per_epoch']:.1f} sec/epoch"
        + (f", {rate:.1f} examples/sec" if rate else "")
    )
    print(
        f"on {', '.join(summary['devices'])} ({summary['strategy']}, "
        f"{summary['num_replicas']} replicas × {summary['local_batch_size']}"
        + (f" × {accumulate} micro-steps" if (accumulate := summary["accumulate"]) > 1 else "")
        + (f", {workers} workers" if (workers := summary["workers"]) > 1 else "")
        + (f", {local} local steps, slots: {summary['local_slots']}" if local else "")
        + ")"
    )
    for sentence in summary.get("verdict", ()):
        print(sentence)
    if (staleness := summary.get("staleness")) and staleness["steps"]:
        print("staleness: mean {mean:.2f}, largest {largest}".format(**staleness))
    if sizes := summary.get("state_bytes_per_device"):
        print("weights and slots: " + ", ".join(f"{n} {s:,} bytes" for n, s in sizes.items()))
