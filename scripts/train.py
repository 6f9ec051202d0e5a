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

import re

from absl import flags

from kdist import program
from training.backend import choose_backend
from training.on_jax import train_on_jax
from training.on_tensorflow import train_on_tensorflow

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


def main(_):
    choose_backend()
    if FLAGS.backend == "jax":
        train_on_jax()
    else:
        train_on_tensorflow()


if __name__ == "__main__":
    program.run(main)
