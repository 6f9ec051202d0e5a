"""Which backend Keras computes with, by --backend."""

import importlib.util
import os
import sys

from absl import flags

FLAGS = flags.FLAGS

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
