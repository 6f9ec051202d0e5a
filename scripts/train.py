"""Trains a model with Keras's `model.fit`, on one device or on several.

  # ResNet-18 on Fashion-MNIST, two replicas (without GPUs: two logical CPU devices)
  python scripts/train.py --strategy=mirrored --num_devices=2 --local_batch_size=64

  # the same on one device: equal global batch, equal data, equal weights
  python scripts/train.py --strategy=one_device --local_batch_size=128

  # the same on two hosts: this on each of them, TF_CONFIG naming both (or by srun)
  python scripts/train.py --strategy=multi_worker --local_batch_size=64 --allow_remote

  # asynchronously: a chief hands steps to two workers, a parameter server keeps the weights
  python scripts/launch.py --workers=2 --ps=1 -- scripts/train.py --strategy=parameter_server \
    --model=lenet

  # local SGD: replicas train alone for 8 steps, then their weights are averaged
  python scripts/train.py --strategy=mirrored --num_devices=2 --local_steps=8

  # a model in two stages, on two replicas: four devices
  python scripts/train.py --layout=data=2,pipeline=2 --model=lenet --dataset=digits

  # the same with each of two hosts holding a stage of both replicas; here, hosts are processes
  python scripts/launch.py --workers=2 -- scripts/train.py --model=lenet --dataset=digits \
    --layout=data=2,pipeline=2,between=model

  # Keras's JAX backend, two replicas of two devices; the file says which weights are divided
  python scripts/train.py --backend=jax --layout=data=2,tensor=2 --split=split.json --model=mlp

  # what slows it down: the ten most expensive operations, and curves in W&B
  python scripts/train.py --profile=10:20 --wandb_mode=auto --price_usd_per_hour=2.48

  # what scripts/plan.py has chosen; at the end, what it predicted beside what was measured
  python scripts/train.py --plan=plan.json

  # in a minute: a small model on scikit-learn's digits
  python scripts/train.py --model=lenet --dataset=digits --epochs=5

It ends with the test accuracy, seconds an epoch, examples a second and the devices, and leaves
config.json, metrics.jsonl, devices.jsonl, summary.json, checkpoints and a report page in --run_dir
(with --backend=jax: config.json, summary.json and a model after each epoch).
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from absl import flags

import kdist
from kdist import program
from kdist.run_directory import RUN_DIR, RunDirectory, new_path
from kdist.telemetry import create_writer

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "plan",
    None,
    "A file that scripts/plan.py --output has written: it says the model, the strategy, devices, "
    "batch, precision, optimizer and epochs. Flags that say otherwise are an error.",
)

# What to train.
flags.DEFINE_string("model", "resnet18", "mlp, lenet, resnet18, mobilenet_v2 or inception.")
flags.DEFINE_string(
    "dataset",
    "fashion_mnist",
    "A TFDS name (fashion_mnist, cats_vs_dogs, …), digits, or a directory of images or IDX files.",
)
flags.DEFINE_string("fallback_dataset", None, "Taken, and said, when --dataset cannot be had.")
flags.DEFINE_string("data_dir", None, "Where TFDS keeps data sets, or where the IDX files lie.")
flags.DEFINE_boolean("download", True, "Whether a data set may be downloaded.")
flags.DEFINE_integer("examples", None, "Train on so many examples only.", lower_bound=1)
flags.DEFINE_float(
    "minutes",
    None,
    "Train on no more examples than can be had in about so many minutes, on one host: some steps "
    "are timed first.",
    lower_bound=0.01,
)
flags.DEFINE_string(
    "operations", "", "What is done to each image, such as 'resize(160, 160)|random_flip()'."
)

# Where.
flags.DEFINE_enum(
    "backend",
    "tensorflow",
    ["tensorflow", "jax"],
    "What Keras computes with. jax (pip install 'kdist[jax]') takes --layout with data and tensor, "
    "or --num_devices, and no --strategy; what else it does not take, it names.",
)
flags.DEFINE_string(
    "strategy",
    "auto",
    "auto, one_device, mirrored, multi_worker, parameter_server, central_storage or tpu.",
)
flags.DEFINE_integer(
    "num_devices", None, "How many devices; without GPUs, logical CPU devices.", lower_bound=1
)
flags.DEFINE_list("devices", None, "Which devices, such as GPU:0,GPU:2.")
flags.DEFINE_string(
    "layout",
    None,
    "Splits the model over devices, instead of --strategy. data=2,branch=2: two replicas, each "
    "with branches on two devices; pipeline=2,micro_batches=4: stages that work on four parts of a "
    "batch in turn (with recompute, they keep little and compute it again; schedule=gpipe: all go "
    "forward first); tensor=2: layers whose weights are divided over two devices. Over several "
    "hosts each has replicas of its own, or with between=model a part of every replica.",
)
flags.DEFINE_string(
    "split",
    "auto",
    "With --layout, which layer goes where: auto balances what they cost, and divides the largest "
    "weights; or a JSON file such as "
    '{"stem.*": "stage(0)", "head": "stage(1)"} or {".*_up": "column()", ".*_down": "row()"}. '
    "scripts/check.py --layout shows what lies where.",
)
flags.DEFINE_string(
    "reduction",
    "auto",
    "mirrored: auto, nccl, hierarchical_copy or reduction_to_one_device. multi_worker: auto, nccl "
    "or ring.",
)
flags.DEFINE_integer("num_packs", None, "Pack the gradients into so many tensors.", lower_bound=0)
flags.mark_flags_as_mutual_exclusive(["num_devices", "devices"])
flags.mark_flags_as_mutual_exclusive(["num_devices", "layout"])
flags.mark_flags_as_mutual_exclusive(["plan", "layout"])
flags.DEFINE_float(
    "cluster_timeout_seconds", 60.0, "How long a task of a job waits for the others.", lower_bound=0
)
flags.DEFINE_float(
    "step_timeout_seconds",
    600.0,
    "How long a worker waits for the others in a step.",
    lower_bound=0,
)
flags.DEFINE_boolean(
    "allow_remote",
    False,
    "Whether other machines may reach this task of a job, as they have to where it runs on several "
    "hosts: TensorFlow's servers let everybody in who reaches them.",
)

# How.
flags.DEFINE_integer("local_batch_size", 64, "Examples a replica takes at once.", lower_bound=1)
flags.DEFINE_integer(
    "accumulate", 1, "Micro-steps of --local_batch_size behind one update.", lower_bound=1
)
flags.DEFINE_integer(
    "max_staleness",
    None,
    "parameter_server: how many updates others may make between a step's reading of the weights "
    "and its own; 0 is one step after the other. By default any number.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "local_steps",
    None,
    "Local SGD: each replica takes so many steps alone, then weights are averaged (also at an "
    "epoch's end). By default replicas add up their gradients in every step. More steps save "
    "messages and cost accuracy; on several hosts let --steps_per_execution be a multiple.",
    lower_bound=1,
)
flags.DEFINE_enum(
    "local_slots",
    "keep",
    ["keep", "average", "reset"],
    "With --local_steps, what becomes of momenta when weights are averaged: each replica keeps its "
    "own, they are averaged too, or begin at zero.",
)
flags.DEFINE_integer("epochs", 1, "Times through the data.", lower_bound=1)
flags.DEFINE_enum("optimizer", "momentum", ["sgd", "momentum", "adam"], "momentum is SGD with 0.9.")
flags.DEFINE_float("learning_rate", 0.05, "The highest learning rate.", lower_bound=0.0)
flags.DEFINE_enum("schedule", "cosine", ["constant", "ramp", "cosine"], "How the rate moves.")
flags.DEFINE_float("ramp_epochs", 0.2, "Epochs in which the rate rises.", lower_bound=0.0)
flags.DEFINE_float("decay", 0.5, "ramp: factor an epoch by which the rate falls afterwards.")
flags.DEFINE_enum(
    "scale_learning_rate", "none", ["none", "linear", "sqrt"], "With the global batch."
)
flags.DEFINE_integer(
    "base_batch_size", 128, "The global batch that --learning_rate is meant for.", lower_bound=1
)
flags.DEFINE_enum(
    "precision", "float32", ["float32", "mixed_bfloat16", "mixed_float16"], "Keras's dtype policy."
)
flags.DEFINE_boolean("jit_compile", False, "Compile the step with XLA.")
flags.DEFINE_string("steps_per_execution", "1", "Steps in one call; auto tries what is fastest.")
flags.register_validator(
    "steps_per_execution",
    lambda text: text == "auto" or (text.isdecimal() and int(text) > 0),
    "must be auto or a whole number from 1 on",
)
flags.DEFINE_boolean("sync_batch_norm", False, "BatchNorm over all replicas, not each its own.")
flags.DEFINE_integer("seed", 0, "Of initial weights, order of examples, augmentation, dropout.")

# What is left of it.
flags.DEFINE_string(
    "run_dir",
    None,
    "A directory for the run, new or with one that was interrupted; by default new, under runs/.",
)
flags.DEFINE_string(
    "resume",
    "auto",
    "auto: with an interrupted run in --run_dir, go on from its newest checkpoint, as if nothing "
    "had happened. never: begin anew, in a new --run_dir. Or the path of a checkpoint.",
)
flags.DEFINE_integer(
    "checkpoint_steps",
    None,
    "Write a checkpoint after so many steps, besides those of epochs and on SIGTERM or Ctrl-C.",
    lower_bound=1,
)
flags.DEFINE_float(
    "checkpoint_minutes", 10.0, "Write one after so many minutes; 0: not by time.", lower_bound=0.0
)
flags.DEFINE_enum(
    "wandb_mode",
    "off",
    ["auto", "online", "offline", "off"],
    "Weights & Biases, besides the run directory. auto: online where there is a login and the "
    "server answers, else offline, for `wandb sync` later.",
)
flags.DEFINE_string("wandb_project", None, "By default WANDB_PROJECT, else kdist.")
flags.DEFINE_string("wandb_group", None, "Runs that belong together; WANDB_RUN_GROUP by default.")
flags.DEFINE_string("wandb_job_type", None, "What kind of run of the group this is.")
flags.DEFINE_boolean("tensorboard", False, "Curves for TensorBoard in RUN_DIR/tensorboard.")
flags.DEFINE_float(
    "device_seconds", 5.0, "Between two samples of the devices; 0 samples none.", lower_bound=0.0
)
flags.DEFINE_string(
    "profile",
    None,
    "Trace these steps, such as 10:20, for TensorBoard and xprof in RUN_DIR/profile; the report "
    "names the ten most expensive operations.",
)
flags.register_validator(
    "profile",
    lambda text: text is None or re.fullmatch(r"[1-9]\d*:[1-9]\d*", text),
    "must be FIRST:LAST, steps counted from 1, such as 10:20",
)
flags.DEFINE_float(
    "price_usd_per_hour", None, "Of all machines of the run: the report says its cost.", 0.0
)
flags.DEFINE_enum(
    "verbose", "auto", ["auto", "0", "1", "2"], "Keras's: silent, bar, line an epoch."
)


# What an interrupted run has been asked for has to be the same in these; devices may be others, as
# long as the global batch is the same.
SAME_TO_GO_ON = (
    *("model", "examples", "minutes", "operations", "epochs", "optimizer", "learning_rate"),
    *("schedule", "ramp_epochs", "decay", "scale_learning_rate", "base_batch_size", "precision"),
    *("sync_batch_norm", "seed", "local_steps", "local_slots", "backend"),
)

# What --backend=jax takes; all other flags are refused, with what to do instead.
ON_JAX = (
    *("backend", "model", "dataset", "fallback_dataset", "data_dir", "download", "examples"),
    *("operations", "num_devices", "layout", "split", "local_batch_size", "epochs", "optimizer"),
    *("learning_rate", "schedule", "ramp_epochs", "decay", "scale_learning_rate"),
    *("base_batch_size", "precision", "steps_per_execution", "sync_batch_norm", "seed", "run_dir"),
    *("price_usd_per_hour", "verbose"),
)
INSTEAD_ON_JAX = {
    "strategy": "say --layout=data=N or --num_devices=N",
    "accumulate": "JAX has no micro-steps here; take a smaller --local_batch_size",
    "jit_compile": "JAX compiles every step; leave it out",
}

# --minutes: how many steps are timed, and how many are trained in any case.
MEASURED_STEPS = 2
MINIMAL_STEPS = 4


def main(_):
    choose_backend()
    if FLAGS.backend == "jax":
        train_on_jax()
        return
    import keras  # after --help has been answered: TensorFlow takes seconds to import

    started = time.perf_counter()
    plan = follow_plan()
    run_dir = FLAGS.run_dir or default_run_dir()
    goes_on = FLAGS.resume != "never" and RunDirectory(run_dir).holds_unfinished()
    if goes_on:
        RunDirectory(run_dir).check_goes_on(config(FLAGS.dataset), SAME_TO_GO_ON)
    else:
        RunDirectory(run_dir).check_is_free()

    # Devices and data
    strategy = kdist.create_strategy(
        plan or split_layout() or FLAGS.strategy,
        None if plan else FLAGS.num_devices or FLAGS.devices,
        reduction=FLAGS.reduction,
        num_packs=FLAGS.num_packs,
        cluster_timeout_seconds=FLAGS.cluster_timeout_seconds,
        step_timeout_seconds=FLAGS.step_timeout_seconds,
        allow_remote=FLAGS.allow_remote,
    )
    is_chief = kdist.strategies.is_chief(strategy)
    batch = kdist.Batch(FLAGS.local_batch_size, strategy.num_replicas_in_sync, FLAGS.accumulate)
    keras.utils.set_random_seed(FLAGS.seed)
    dataset, train, test = load_data(batch)
    if FLAGS.minutes is not None:
        examples = measured_before(run_dir) if goes_on else None
        examples = examples or examples_in_time(strategy, train, test, started)
        keras.utils.set_random_seed(FLAGS.seed)
        if examples < train.num_examples:
            dataset, train, test = load_data(batch, examples)
    if is_chief:
        print(f"{dataset}: {train.num_examples:,} examples, {batch}, {train.steps_per_epoch} steps")
        if plan:
            say_differences(plan, train)

    model = compiled_model(strategy, train)

    # Training
    run = RunDirectory(run_dir)
    if is_chief:
        run = RunDirectory.create(run_dir, config(dataset, train.num_examples), goes_on)
    writer = create_writer(
        run,
        is_chief=is_chief,
        wandb_mode=FLAGS.wandb_mode,
        tensorboard=FLAGS.tensorboard,
        config=config(dataset, train.num_examples),
        project=FLAGS.wandb_project,
        group=FLAGS.wandb_group,
        job_type=FLAGS.wandb_job_type,
        name=run.path.name,
    )
    profile = profiled(run)
    telemetry = kdist.callbacks.Telemetry(
        run, device_seconds=FLAGS.device_seconds or None, profiles=not profile, writer=writer
    )
    checkpoint = kdist.callbacks.EpochCheckpoint(run.checkpoints)
    stop = kdist.callbacks.StopOnNonFiniteLoss(checkpoint)
    going_on = kdist.callbacks.Checkpoint(
        run.checkpoints,
        FLAGS.checkpoint_steps,
        FLAGS.checkpoint_minutes or None,
        resume=FLAGS.resume,
        at_resume=run.forget_after,
    )
    history = model.fit(
        train,
        validation_data=test,
        epochs=FLAGS.epochs,
        callbacks=[*profile, telemetry, stop, checkpoint, going_on],
        verbose=verbosity(),
    ).history

    if not is_chief:
        return
    if "val_loss" not in history:  # an evaluator follows the checkpoints; this is the last one
        results = model.evaluate(test, verbose=0, return_dict=True)
        history.update({f"val_{name}": [value] for name, value in results.items()})

    # What a person wants to know
    summary = {
        **summary_of_layout(strategy, batch, dataset, train.num_examples, model),
        "test_accuracy": history["val_accuracy"][-1],
        "test_loss": history["val_loss"][-1],
        **telemetry.summary(),
        **cost(time.perf_counter() - started),
    }
    if plan:
        summary["plan"] = plan.to_dict()
        print(plan.compared(summary["examples_per_second"]))
    if profile:
        summary["top_operations"] = profile[0].top_operations()
    writer.write_summary(summary)
    print_summary(summary)
    print(f"report: {kdist.report.write([run.path], run.report)}")
    writer.write_report(run.report)
    writer.close()


def choose_backend():
    """Has Keras compute with --backend, when it is imported.

    Raises:
        ImportError: JAX is not installed.
        ValueError: KERAS_BACKEND says something else and --backend nothing; or a flag is given
            that --backend=jax does not take.
    """
    said = os.environ.get("KERAS_BACKEND", FLAGS.backend)
    if said != FLAGS.backend and not FLAGS["backend"].present:
        raise ValueError(f"KERAS_BACKEND is {said}, and --backend {FLAGS.backend}: say --backend")
    os.environ["KERAS_BACKEND"] = FLAGS.backend
    if FLAGS.backend == "tensorflow":
        return
    for flag in FLAGS.flags_by_module_dict()[sys.argv[0]]:
        if flag.present and flag.name not in ON_JAX:
            remedy = INSTEAD_ON_JAX.get(flag.name, "leave it out, or take --backend=tensorflow")
            raise ValueError(f"--{flag.name} is not for --backend=jax: {remedy}")
    if FLAGS.steps_per_execution == "auto":
        raise ValueError("--steps_per_execution=auto is not for --backend=jax: give a number")
    if importlib.util.find_spec("jax") is None:
        raise ImportError("JAX is not installed: pip install 'kdist[jax]'")


def train_on_jax():
    """What `main` does, for --backend=jax: a layout of data and tensor on a mesh."""
    import keras

    started = time.perf_counter()
    run_dir = FLAGS.run_dir or default_run_dir()
    RunDirectory(run_dir).check_is_free()
    check_one_task()
    layout = split_layout() or kdist.Layout(data=FLAGS.num_devices or 1)
    mesh = kdist.parallel.Mesh(layout)
    batch = kdist.Batch(FLAGS.local_batch_size, layout.data)
    keras.utils.set_random_seed(FLAGS.seed)
    dataset, train, test = load_data(batch)
    print(f"{dataset}: {train.num_examples:,} examples, {batch}, {train.steps_per_epoch} steps")
    model = build_model(train)
    mesh.place(model, kdist.parallel.plan_as_said(model, layout, FLAGS.split))
    model.compile(
        optimizer(learning_rate(batch, train.num_examples)),
        loss(model),
        weighted_metrics=[accuracy(model)],
        steps_per_execution=steps_per_execution(),
    )
    run = RunDirectory.create(run_dir, config(dataset, train.num_examples))
    seconds = kdist.callbacks.EpochSeconds()
    checkpoint = kdist.callbacks.EpochCheckpoint(run.checkpoints)
    history = model.fit(
        train.dataset(),
        steps_per_epoch=train.steps_per_epoch,
        validation_data=kdist.data.weighed(test),
        shuffle=False,  # the pipeline has done it
        epochs=FLAGS.epochs,
        callbacks=[seconds, kdist.callbacks.StopOnNonFiniteLoss(checkpoint), checkpoint],
        verbose=verbosity(),
    ).history
    summary = {
        **summary_on_jax(mesh, batch, dataset, train, model),
        "test_accuracy": history["val_accuracy"][-1],
        "test_loss": history["val_loss"][-1],
        **speed_of(seconds.seconds, train),
        **cost(time.perf_counter() - started),
    }
    run.write_summary(summary)
    print_summary(summary)


def check_one_task():
    """Raises a ValueError where this is one of several tasks of a job."""
    tasks = sum(map(len, kdist.Cluster.resolve().tasks.values()))
    if tasks > 1:
        raise ValueError(
            f"--backend=jax is for the devices of one machine, and this job has {tasks} tasks: "
            "start it alone, without TF_CONFIG, or take --backend=tensorflow"
        )


def speed_of(epoch_seconds, train):
    """Seconds of an epoch, and the rate of those after the first, in which JAX compiles."""
    examples = train.steps_per_epoch * train.batch.global_size
    later = epoch_seconds[1:]
    return {
        "seconds_per_epoch": sum(epoch_seconds) / len(epoch_seconds),
        "examples_per_second": len(later) * examples / sum(later) if later else None,
    }


def follow_plan():
    """The plan of --plan, whose flags are set; None without.

    Raises:
        ValueError: a flag on the command line says otherwise.
    """
    if FLAGS.plan is None:
        return None
    plan = kdist.planner.Plan.load(FLAGS.plan)
    layout = plan.layout
    planned = {
        "model": plan.model,
        "strategy": layout.strategy,
        "num_devices": layout.devices,
        "local_batch_size": layout.local_batch,
        "accumulate": layout.accumulate,
        "local_steps": layout.local_steps,
        "epochs": int(plan.epochs),
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "jit_compile": plan.jit_compile,
    }
    for name, value in planned.items():
        if FLAGS[name].present and FLAGS[name].value != value:
            raise ValueError(
                f"--{name}={FLAGS[name].value}, and {FLAGS.plan} is for {value}; leave the flag "
                "out, or plan anew with scripts/plan.py"
            )
        FLAGS[name].value = value
    if plan.epochs != int(plan.epochs):
        raise ValueError(f"{FLAGS.plan} is for {plan.epochs} epochs; plan whole ones")
    if FLAGS.devices:
        raise ValueError(f"{FLAGS.plan} says the devices; leave --devices out")
    return plan


def say_differences(plan, train):
    """Where the data are others than those that were planned for."""
    for what, planned, there in (
        ("examples an epoch", plan.examples, train.num_examples),
        ("a shape of", plan.input_shape, tuple(train.image_shape)),
    ):
        if planned != there:
            print(f"planned for {what} {planned}, the data have {there}: times will differ")


def load_data(batch, examples=None):
    """The data set's name and its pipelines; the fallback's if it cannot be had.

    Args:
        batch: a `kdist.Batch`.
        examples: to train on, in the place of --examples.
    """
    options = {"batch": batch, "seed": FLAGS.seed, "operations": FLAGS.operations}
    try:
        return FLAGS.dataset, *kdist.data.load(
            FLAGS.dataset,
            examples=examples or FLAGS.examples,
            data_dir=FLAGS.data_dir,
            download=FLAGS.download,
            **options,
        )
    except kdist.data.DatasetUnavailable as error:
        if FLAGS.fallback_dataset is None:
            raise
        print(f"{error}\nTraining on {FLAGS.fallback_dataset} instead.", file=sys.stderr)
        return FLAGS.fallback_dataset, *kdist.data.load(FLAGS.fallback_dataset, **options)


def examples_in_time(strategy, train, test, started):
    """How many examples --minutes leave time for, by the time that a few steps take."""
    if kdist.strategies.num_workers(strategy) > 1:
        raise ValueError("--minutes is for one host; on several, give --examples")
    model = compiled_model(strategy, train)
    training = rate(train, lambda steps: model.fit(train, steps_per_epoch=steps, verbose=0))
    testing = rate(train, lambda steps: model.evaluate(train, steps=steps, verbose=0))
    # Compiling anew takes no longer than all of this has taken.
    left = 60 * FLAGS.minutes - 2 * (time.perf_counter() - started)
    left -= FLAGS.epochs * test.num_examples / testing
    batch = train.batch.global_size
    examples = int(left * training / FLAGS.epochs) // batch * batch
    kept = min(train.num_examples, max(MINIMAL_STEPS * batch, examples))
    print(
        f"{training:,.0f} examples/s: {FLAGS.minutes:g} minutes are enough for {kept:,} of "
        f"{train.num_examples:,} examples"
    )
    return kept


def rate(train, run):
    """Examples a second of `run`, a function of how many steps to run, after compiling."""
    run(1)
    began = time.perf_counter()
    run(MEASURED_STEPS)
    return MEASURED_STEPS * train.batch.global_size / (time.perf_counter() - began)


def compiled_model(strategy, train):
    """The model that the flags describe, compiled."""
    plain = on_host(build_model, train) if FLAGS.layout else None
    with strategy.scope():
        if plain is None:
            model = build_model(train)
        else:
            model = kdist.parallel.split_as(plain, strategy.layout, FLAGS.split)
        model.compile(
            optimizer(learning_rate(train.batch, train.num_examples)),
            loss(model),
            metrics=[accuracy(model)],
            jit_compile=FLAGS.jit_compile,
            steps_per_execution=steps_per_execution(),
            accumulate=FLAGS.accumulate,
            max_staleness=FLAGS.max_staleness,
            local_steps=FLAGS.local_steps,
            local_slots=FLAGS.local_slots,
        )
    return model


def split_layout():
    """The layout of --layout; None without.

    Raises:
        ValueError: it is none, or --strategy says something else.
    """
    if FLAGS.layout is None:
        if FLAGS["split"].present:
            raise ValueError("--split says what lies where in a --layout; give one")
        return None
    if FLAGS["strategy"].present:
        raise ValueError("--layout is a strategy of its own; leave --strategy out")
    return kdist.Layout.parse(FLAGS.layout)


def on_host(function, *arguments):
    """What a function gives that makes its variables in the host's memory: a model that is to be
    split need not fit one device."""
    import tensorflow as tf

    with tf.device("CPU:0"):
        return function(*arguments)


def build_model(train):
    """The model that --model names, for the data's shape and number of classes."""
    return kdist.models.create(
        FLAGS.model,
        input_shape=train.image_shape,
        num_classes=train.num_classes,
        sync_batch_norm=FLAGS.sync_batch_norm,
        precision=FLAGS.precision,
    )


def has_one_logit(model):
    """Whether the model answers a yes-or-no question with one number."""
    return model.output_shape[-1] == 1


def loss(model):
    """The loss that belongs to the model's output."""
    import keras

    if has_one_logit(model):
        return keras.losses.BinaryCrossentropy(from_logits=True)
    return keras.losses.SparseCategoricalCrossentropy()


def accuracy(model):
    """The accuracy that belongs to the model's output."""
    import keras

    if has_one_logit(model):
        return keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")
    return keras.metrics.SparseCategoricalAccuracy(name="accuracy")


def learning_rate(batch, epoch_examples):
    """The schedule that the flags describe, in examples."""
    scaling = {"scale": FLAGS.scale_learning_rate, "base_batch": FLAGS.base_batch_size}
    ramp = int(FLAGS.ramp_epochs * epoch_examples)
    if FLAGS.schedule == "cosine":
        return kdist.schedules.Cosine(
            peak=FLAGS.learning_rate,
            batch=batch,
            ramp_examples=ramp,
            total_examples=FLAGS.epochs * epoch_examples,
            **scaling,
        )
    return kdist.schedules.Ramp(
        peak=FLAGS.learning_rate,
        batch=batch,
        ramp_examples=ramp if FLAGS.schedule == "ramp" else 0,
        decay=FLAGS.decay if FLAGS.schedule == "ramp" else 1.0,
        decay_examples=epoch_examples,
        **scaling,
    )


def optimizer(rate):
    """The optimizer that --optimizer names."""
    import keras

    if FLAGS.optimizer == "adam":
        return keras.optimizers.Adam(rate)
    return keras.optimizers.SGD(rate, momentum=0.9 if FLAGS.optimizer == "momentum" else 0.0)


def steps_per_execution():
    """A number, or "auto"."""
    text = FLAGS.steps_per_execution
    return text if text == "auto" else int(text)


def verbosity():
    """Keras's `verbose`: a progress bar for a person, a line an epoch for a log file."""
    if FLAGS.verbose == "auto":
        return 1 if sys.stdout.isatty() else 2
    return int(FLAGS.verbose)


def config(dataset, num_examples=None):
    """What the run was asked to do: every flag of this program, and the data that it got."""
    own = FLAGS.flags_by_module_dict()[sys.argv[0]]
    asked = {flag.name: flag.value for flag in own}
    return {**asked, "dataset": dataset, "num_examples": num_examples}


def measured_before(run_dir):
    """The examples that an interrupted run with --minutes has found time for."""
    return json.loads(RunDirectory(run_dir).config.read_text())["num_examples"]


def profiled(run):
    """The callback that --profile asks for, in a list; an empty one without."""
    if FLAGS.profile is None:
        return []
    first, last = map(int, FLAGS.profile.split(":"))
    return [kdist.callbacks.Profile(run.path / "profile", first, last)]


def cost(seconds):
    """How long the program ran, and what that costs where a price is given."""
    price = FLAGS.price_usd_per_hour
    paid = {} if price is None else {"cost_usd": price * seconds / 3600}
    return {"total_seconds": seconds, "price_usd_per_hour": price, **paid}


def default_run_dir():
    """What the launcher chose, else a directory under runs/ that says when and what."""
    if RUN_DIR in os.environ:
        return pathlib.Path(os.environ[RUN_DIR])
    return new_path(FLAGS.model)


def summary_of_layout(strategy, batch, dataset, examples, model):
    """What was trained, where, and with which versions."""
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
        "staleness": dataclasses.asdict(model.staleness),
        "global_batch_size": batch.global_size,
        "local_steps": FLAGS.local_steps,
        "local_slots": FLAGS.local_slots if FLAGS.local_steps else None,
        "precision": FLAGS.precision,
        "epochs": FLAGS.epochs,
        "versions": versions(),
        "git_commit": git_commit(),
    }


def summary_on_jax(mesh, batch, dataset, train, model):
    """As `summary_of_layout`, of a mesh; and what its devices hold of the model."""
    from kdist.parallel.jax_mesh import bytes_per_device

    held = bytes_per_device([*model.variables, *model.optimizer.variables])
    return {
        "model": FLAGS.model,
        "parameters": model.count_params(),
        "dataset": dataset,
        "examples": train.num_examples,
        "backend": FLAGS.backend,
        "strategy": f"JAX mesh {mesh.layout}",
        "layout": str(mesh.layout),
        "devices": [str(name).upper() for name in mesh.device_mesh.devices.flatten()],
        "state_bytes_per_device": {name.upper(): size for name, size in held.items()},
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


def versions(*more):
    """Versions of what the numbers depend on."""
    names = ("kdist", "tensorflow", "keras", "numpy", *more)
    return {
        "python": sys.version.split()[0],
        **{name: importlib.metadata.version(name) for name in names},
    }


def git_commit():
    """The commit of this program's checkout; None outside of one."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def print_summary(summary):
    """The end of the run in two lines, the way d2l says it."""
    rate, local = summary["examples_per_second"], summary["local_steps"]
    print(
        f"test accuracy {summary['test_accuracy']:.4f}, test loss {summary['test_loss']:.4f}, "
        f"{summary['seconds_per_epoch']:.1f} sec/epoch"
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


if __name__ == "__main__":
    program.run(main)
