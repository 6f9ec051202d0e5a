"""Run directory, the callbacks and writers that fill it, and the summary of a run."""

import contextlib
import dataclasses
import os
import pathlib
import re

from absl import flags

import kdist
from kdist import program
from kdist.commands.training_run.compiled_model import is_text
from kdist.commands.training_run.fine_tuning import frozen_layers
from kdist.mirror.mirror import Mirror
from kdist.mirror.store import is_url, local_directory
from kdist.run_directory import RUN_DIR, RunDirectory, check_writable, new_run_path
from kdist.telemetry import create_writer

FLAGS = flags.FLAGS

# Flags that a resumed run must not change. Devices may differ if the global batch is the same.
FIXED_FLAGS = (
    *(
        "model",
        "model_args",
        "examples",
        "sequence_length",
        "minutes",
        "operations",
        "epochs",
        "optimizer",
        "learning_rate",
    ),
    *("schedule", "ramp_epochs", "decay", "scale_learning_rate", "base_batch_size", "precision"),
    *("sync_batch_norm", "seed", "local_steps", "local_slots", "backend", "weights", "freeze"),
    *("unfreeze_after_epochs", "early_stopping", "ema", "clip_norm"),
)


@dataclasses.dataclass
class Recording:
    """Everything that records a run.

    Attributes:
        run: the run directory.
        writer: writer of metrics, which discards everything in tasks that are not the chief.
        telemetry: the telemetry callback.
        profile: list with the callback of --profile, or empty.
        callbacks: list of all callbacks.
    """

    run: RunDirectory
    writer: "kdist.telemetry.Writer"  # quoted, so that --help does not import TensorFlow
    telemetry: "kdist.callbacks.Telemetry"
    profile: list
    callbacks: list


def run_directory():
    """Returns the path of --run_dir, that of the launcher, or a new one below runs/."""
    if FLAGS.run_dir:
        return local_directory(FLAGS.run_dir)
    if RUN_DIR in os.environ:
        return pathlib.Path(os.environ[RUN_DIR])
    return new_run_path(re.sub(r"[^\w.]+", "-", FLAGS.model))


def mirror_url():
    """Returns the URL of --mirror, or that of --run_dir; None without one.

    Raises:
        ValueError: --mirror is no URL, or differs from that of --run_dir.
    """
    given = FLAGS.run_dir if is_url(FLAGS.run_dir) else None
    if FLAGS.mirror is not None and not is_url(FLAGS.mirror):
        raise ValueError(
            f"--mirror={FLAGS.mirror} is no URL; write gs://BUCKET/RUN or s3://BUCKET/RUN"
        )
    if FLAGS.mirror and given and FLAGS.mirror.rstrip("/") != given.rstrip("/"):
        raise ValueError(
            f"--run_dir={given} and --mirror={FLAGS.mirror}: a run has one mirror; leave one of "
            "them out"
        )
    return FLAGS.mirror or given


def open_mirror(path, is_chief):
    """Returns a context manager with the `Mirror` of the flags, or None.

    Args:
        path: the run directory.
        is_chief: whether this task writes. The others have no mirror.
    """
    url = mirror_url()
    if url is None or not is_chief:
        return contextlib.nullcontext()
    check_writable(RunDirectory(path).config)
    return Mirror(url, path, resume=FLAGS.resume != "never")


def check_directory(path, writes):
    """Returns whether to resume the interrupted run of a directory.

    Args:
        path: the run directory.
        writes: whether this task writes it.

    Raises:
        FileExistsError: the directory holds a finished run, or one that may not be resumed.
        OSError: the directory cannot be written.
        ValueError: the interrupted run has other flags.
    """
    run = RunDirectory(path)
    if writes:
        check_writable(run.config)
    resumes = FLAGS.resume != "never" and run.is_interrupted()
    if resumes:
        run.check_same_config(_config_on_dataset_of(run), FIXED_FLAGS)
    else:
        run.check_available()
    return resumes


def _config_on_dataset_of(run):
    """Returns the configuration that the flags ask for on the dataset of an interrupted run."""
    config = run_config(FLAGS.dataset)
    with contextlib.suppress(ValueError):  # damaged, which `check_same_config` logs
        dataset = run.read_config().get("dataset")
        if FLAGS.fallback_epochs and dataset == FLAGS.fallback_dataset != FLAGS.dataset:
            config["epochs"] = FLAGS.fallback_epochs
    return config


def start_recording(path, config, model, is_chief, resumes, test, mirror):
    """Returns the `Recording` of a new or resumed run.

    Args:
        path: the run directory.
        config: configuration of the run.
        model: the compiled model.
        is_chief: whether this task writes.
        resumes: whether the directory already holds the run.
        test: pipeline of the test data, for --wandb_samples.
        mirror: the open `Mirror` of the run, or None.
    """
    run = RunDirectory.create(path, config, resumes) if is_chief else RunDirectory(path)
    writer = create_writer(
        run,
        is_chief=is_chief,
        wandb_mode=FLAGS.wandb_mode,
        tensorboard=FLAGS.tensorboard,
        config=config,
        project=FLAGS.wandb_project,
        group=FLAGS.wandb_group,
        job_type=FLAGS.wandb_job_type,
        name=run.path.name,
        tags=FLAGS.wandb_tags,
        notes=FLAGS.wandb_notes,
        mlflow_uri=FLAGS.mlflow_uri,
        mlflow_experiment=FLAGS.mlflow_experiment,
    )
    profile = profile_callbacks(run)
    telemetry = kdist.callbacks.Telemetry(
        run,
        device_seconds=FLAGS.device_seconds or None,
        profiles=not profile,
        writer=writer,
        samples=samples(test),
    )
    checkpoint = kdist.callbacks.EpochCheckpoint(run.checkpoints)
    stop = kdist.callbacks.StopOnNonFiniteLoss(checkpoint)
    resumption = kdist.callbacks.Checkpoint(
        run.checkpoints,
        FLAGS.checkpoint_steps,
        FLAGS.checkpoint_minutes or None,
        resume=FLAGS.resume,
        at_resume=run.discard_after,
        mirror=mirror,
    )
    tuning = tuning_callbacks(run, model, is_chief)
    callbacks = [*profile, telemetry, stop, *tuning, checkpoint, resumption]
    return Recording(run, writer, telemetry, profile, callbacks)


def tuning_callbacks(run, model, is_chief):
    """Returns the callbacks of the flags that act at the end of an epoch, in their order.

    Args:
        run: the run directory.
        model: the compiled model.
        is_chief: whether this task prints.
    """
    import keras

    callbacks = []
    if FLAGS.early_stopping is not None:
        callbacks.append(
            keras.callbacks.EarlyStopping(patience=FLAGS.early_stopping, verbose=int(is_chief))
        )
    if FLAGS.ema is not None:
        callbacks.append(kdist.callbacks.AveragedWeights())
    if FLAGS.unfreeze_after_epochs is not None:
        layers = frozen_layers(model)
        callbacks.append(kdist.callbacks.Unfreeze(layers, FLAGS.unfreeze_after_epochs))
    if FLAGS.save_best:
        callbacks.append(keras.callbacks.ModelCheckpoint(run.best, save_best_only=True))
    return callbacks


def best_model(run):
    """Returns the file of --save_best in a run directory, or None."""
    return run.best if FLAGS.save_best and run.best.exists() else None


def samples(test):
    """Returns the `Samples` of --wandb_samples, or None."""
    if not FLAGS.wandb_samples or is_text(test):
        return None
    return kdist.telemetry.Samples(*test.sample(FLAGS.wandb_samples), test.class_names)


def profile_callbacks(run):
    """Returns a list with the callback of --profile, or an empty list."""
    if FLAGS.profile is None:
        return []
    first, last = map(int, FLAGS.profile.split(":"))
    return [kdist.callbacks.Profile(run.path / "profile", first, last)]


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
