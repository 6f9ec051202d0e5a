"""Flags that choose the backend, and flags that are set by a plan or by tuned settings."""

import hashlib
import importlib.metadata
import os
import pathlib

from absl import flags

import kdist
from kdist import program
from kdist.commands.training_run.compiled_model import builds
from kdist.commands.training_run.user_code import is_reference
from kdist.hardware import describe_processors, find_gpus
from kdist.mirror.store import is_url
from kdist.planner.plans import layout_flags
from kdist.strategy_spec import resolve
from kdist.tuning.settings import this_machine

FLAGS = flags.FLAGS

# Flags that --backend=jax supports. All others are rejected, with a remedy.
SUPPORTED_ON_JAX = (
    *(
        "backend",
        "model",
        "model_args",
        "dataset",
        "fallback_dataset",
        "fallback_epochs",
        "data_dir",
        "download",
        "examples",
    ),
    *("operations", "num_devices", "layout", "split", "local_batch_size", "epochs", "optimizer"),
    *("learning_rate", "schedule", "ramp_epochs", "decay", "scale_learning_rate"),
    *("base_batch_size", "precision", "steps_per_execution", "sync_batch_norm", "seed", "run_dir"),
    "compile_cache",
    *("price_usd_per_hour", "verbose"),
)
REMEDIES_ON_JAX = {
    "strategy": "use --layout=data=N or --num_devices=N",
    "accumulate": "JAX runs no micro-steps here; use a smaller --local_batch_size",
    "jit_compile": "JAX compiles every step; leave it out",
}
# On CPUs with AVX2, oneDNN's kernels train these models 1.4 to 2.5 times as fast, but MobileNetV2
# 0.57 times as fast: benchmarks/results/2026-11-25-onednn.md.
FASTER_WITH_ONEDNN = ("lenet", "resnet18", "inception")


def choose_backend():
    """Sets the Keras backend of --backend, before Keras is imported.

    Raises:
        ImportError: JAX is not installed.
        ValueError: KERAS_BACKEND differs from the default of --backend, or a flag is not supported
            by --backend=jax.
    """
    chosen = os.environ.get("KERAS_BACKEND", FLAGS.backend)
    if chosen != FLAGS.backend and not FLAGS["backend"].present:
        other = "pass --backend=jax, or " if chosen == "jax" else ""
        raise ValueError(
            f"KERAS_BACKEND is {chosen}, but --backend is {FLAGS.backend}; {other}set "
            f"KERAS_BACKEND={FLAGS.backend}"
        )
    os.environ["KERAS_BACKEND"] = FLAGS.backend
    if FLAGS.compile_cache:
        _use_compile_cache()
    if FLAGS.backend == "tensorflow":
        _choose_kernels()
        return
    for flag in program.own_flags().values():
        if flag.present and flag.name not in SUPPORTED_ON_JAX:
            remedy = REMEDIES_ON_JAX.get(flag.name, "leave it out, or use --backend=tensorflow")
            raise ValueError(f"--{flag.name} is not supported by --backend=jax: {remedy}")
    if is_url(FLAGS.run_dir):
        raise ValueError(f"--run_dir={FLAGS.run_dir} is not supported by --backend=jax: use a path")
    if FLAGS.steps_per_execution == "auto":
        raise ValueError("--steps_per_execution=auto is not supported by --backend=jax; use 1")
    program.check_installed("jax", "jax")


def _choose_kernels():
    """Enables oneDNN's kernels on CPUs where TensorFlow does not, for models that they speed up.

    TensorFlow itself uses them only on CPUs with AVX512-VNNI or AMX.
    """
    if FLAGS.model in FASTER_WITH_ONEDNN:
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def _use_compile_cache():
    """Lets XLA read and write compiled functions in a folder of --compile_cache.

    TensorFlow does not look whether they were compiled for this kind of processor, so each kind,
    and each version of TensorFlow, has a folder of its own.

    Raises:
        ValueError: nothing is compiled with XLA.
        OSError: the folder cannot be written.
    """
    is_tensorflow = FLAGS.backend == "tensorflow"
    if is_tensorflow and not FLAGS.jit_compile:
        raise ValueError(
            "--compile_cache stores what XLA compiles, and without --jit_compile it compiles "
            "nothing. Add --jit_compile, or leave --compile_cache out"
        )
    compiler = importlib.metadata.version("tensorflow" if is_tensorflow else "jaxlib")
    options = os.environ.get("XLA_FLAGS", "")
    key = "\n".join([FLAGS.backend, compiler, options, describe_processors()])
    folder = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = pathlib.Path(FLAGS.compile_cache).absolute() / f"{FLAGS.backend}-{compiler}-{folder}"
    path.mkdir(parents=True, exist_ok=True)
    if is_tensorflow:
        flag = f"--tf_xla_persistent_cache_directory={path}"
        os.environ["TF_XLA_FLAGS"] = f"{os.environ.get('TF_XLA_FLAGS', '')} {flag}".strip()
    else:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(path)


def apply_plan():
    """Returns the plan of --plan, after setting its flags; None without --plan.

    Raises:
        ValueError: a flag on the command line contradicts the plan.
    """
    if FLAGS.plan is None:
        return None
    plan = kdist.planner.Plan.load(FLAGS.plan)
    layout = plan.layout
    planned = {
        "model": plan.model,
        **layout_flags(layout),
        "local_batch_size": plan.local_batch,
        "accumulate": layout.accumulate,
        "local_steps": layout.local_steps,
        "epochs": int(plan.epochs),
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "jit_compile": plan.jit_compile,
    }
    if is_reference(FLAGS.model) and not builds(plan.model):
        del planned["model"]  # the user's own function builds the model of the plan
    for name, value in planned.items():
        _check_agrees(name, value, FLAGS.plan, "kdist plan")
        FLAGS[name].value = value
    if plan.checkpoint_minutes and not FLAGS["checkpoint_minutes"].present:
        FLAGS.checkpoint_minutes = plan.checkpoint_minutes
    if plan.epochs != int(plan.epochs):
        raise ValueError(f"{FLAGS.plan} is for {plan.epochs} epochs; plan a whole number")
    if FLAGS.devices:
        raise ValueError(f"{FLAGS.plan} sets the devices; leave --devices out")
    return plan


def apply_tuned():
    """Sets the flags of the settings of --tuned, as if they were on the command line.

    Raises:
        ValueError: the file holds no such settings, a value is invalid or not supported by the
            strategy, or a flag on the command line contradicts them or excludes one of them.
    """
    if FLAGS.tuned is None:
        return
    tuned = kdist.tuning.Tuned.load(FLAGS.tuned)
    for name, value in tuned.settings.items():
        _check_agrees(name, value, FLAGS.tuned, "kdist tune")
    try:
        for name, value in tuned.settings.items():
            FLAGS[name].parse(value)
            FLAGS[name].present = 1
        FLAGS.validate_all_flags()
        resolve(tuned)
    except (flags.Error, ValueError) as error:
        raise ValueError(f"--tuned={FLAGS.tuned}: {error}") from error
    for difference in tuned.differences(FLAGS.model, this_machine()):
        print(f"note: {FLAGS.tuned} is of {difference}; other settings may be faster: kdist tune")


def _check_agrees(name, value, path, command):
    if FLAGS[name].present and FLAGS[name].value != value:
        raise ValueError(
            f"--{name}={FLAGS[name].value} contradicts {path}, which has {value}; leave the flag "
            f"out, or create a new file with {command}"
        )


def report_data_differences(plan, train):
    """Prints how the data and the GPUs differ from those of the plan."""
    gpus = len(find_gpus(os.environ))
    if gpus < plan.layout.devices_per_machine:
        print(
            f"GPUs: {plan.layout.devices_per_machine} × {plan.machine.gpu} planned, {gpus} on this "
            "machine; logical CPU devices replace missing ones, and times will differ"
        )
    for what, planned, actual in (
        ("examples per epoch", plan.examples, train.num_examples),
        ("input shape", plan.input_shape, tuple(train.image_shape)),
    ):
        if planned != actual:
            print(f"{what}: {planned} planned, {actual} in the data; times will differ")
