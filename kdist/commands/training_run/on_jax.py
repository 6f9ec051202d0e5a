"""Training with --backend=jax."""

import time

from absl import flags

import kdist
from kdist.commands.training_run.compiled_model import (
    accuracy,
    build_model,
    learning_rate,
    loss,
    optimizer,
    split_layout,
    steps_per_execution,
    verbosity,
)
from kdist.commands.training_run.datasets import load_data
from kdist.commands.training_run.flag_checks import check_flags
from kdist.commands.training_run.recording import (
    cost,
    jax_summary,
    print_summary,
    run_config,
    run_directory,
    speed_of,
)
from kdist.hardware import parse_devices
from kdist.run_directory import RunDirectory, check_writable
from kdist.strategy_spec import resolve

FLAGS = flags.FLAGS


def train_on_jax():
    """Trains a layout of data and tensor parallelism on a mesh, and writes a run directory."""
    run_dir, layout = run_directory(), jax_layout()
    check_flags(resolve("auto", cluster=kdist.Cluster()))
    check_writable(RunDirectory(run_dir).config)
    RunDirectory(run_dir).check_available()
    check_one_task()
    import keras  # after all checks, which are to fail early

    started = time.perf_counter()
    mesh = kdist.parallel.Mesh(layout)
    batch = kdist.Batch(FLAGS.local_batch_size, layout.data)
    keras.utils.set_random_seed(FLAGS.seed)
    dataset, train, test = load_data(batch)
    print(f"{dataset}: {train.num_examples:,} examples, {batch}, {train.steps_per_epoch} steps")
    model = build_model(train)
    if model.compiled:
        raise ValueError(
            f"--backend=jax compiles the model itself: return it from {FLAGS.model} uncompiled"
        )
    mesh.place(model, kdist.parallel.resolve_placement(model, layout, FLAGS.split))
    model.compile(
        optimizer(learning_rate(batch, train.num_examples)),
        loss(model),
        weighted_metrics=[accuracy(model)],
        steps_per_execution=steps_per_execution(),
    )
    run = RunDirectory.create(run_dir, run_config(dataset, train.num_examples))
    seconds = kdist.callbacks.EpochSeconds()
    checkpoint = kdist.callbacks.EpochCheckpoint(run.checkpoints)
    history = model.fit(
        train.dataset(),
        steps_per_epoch=train.steps_per_epoch,
        validation_data=kdist.data.weighted(test),
        shuffle=False,  # the pipeline shuffles
        epochs=FLAGS.epochs,
        callbacks=[seconds, kdist.callbacks.StopOnNonFiniteLoss(checkpoint), checkpoint],
        verbose=verbosity(),
    ).history
    summary = {
        **jax_summary(mesh, batch, dataset, train, model),
        "test_accuracy": history["val_accuracy"][-1],
        "test_loss": history["val_loss"][-1],
        **speed_of(seconds.seconds, train),
        **cost(time.perf_counter() - started),
    }
    print_summary(summary)
    run.write_summary(summary)


def jax_layout():
    """Returns the layout of --layout or --num_devices, after checking that JAX supports it."""
    layout = split_layout() or kdist.Layout(data=FLAGS.num_devices or 1)
    layout.check_mesh()
    parse_devices(layout.devices)
    return layout


def check_one_task():
    """Raises a ValueError if this is one of several tasks of a job."""
    tasks = sum(map(len, kdist.Cluster.resolve().tasks.values()))
    if tasks > 1:
        raise ValueError(
            f"--backend=jax supports the devices of one machine, but this job has {tasks} tasks; "
            "set TF_CONFIG={} to train one model in each of them, or use --backend=tensorflow"
        )
