"""Configuration and summary of a run."""

from absl import flags

from kdist import program

FLAGS = flags.FLAGS


def run_config(dataset, num_examples=None):
    """Returns all flags of this program with the actual dataset and number of examples."""
    return {
        **{name: flag.value for name, flag in program.own_flags().items()},
        "dataset": dataset,
        "num_examples": num_examples,
    }


def jax_summary(mesh, batch, dataset, train, model):
    """Returns the summary of a run on a JAX mesh, with the bytes of state per device."""
    from kdist.parallel.jax_mesh import bytes_per_device
    from kdist.telemetry.provenance import git_commit, versions

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
