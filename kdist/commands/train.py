"""Trains a model with Keras's `model.fit`, on one device or several.

  # ResNet-18 on Fashion-MNIST, two replicas (without GPUs: two logical CPU devices)
  kdist train --strategy=mirrored --num_devices=2 --local_batch_size=64

  # on one device: the same global batch, data, and resulting weights
  kdist train --strategy=one_device --local_batch_size=128

  # on two hosts: run this on each of them, with TF_CONFIG set (or by srun)
  kdist train --strategy=multi_worker --local_batch_size=64 --allow_remote

  # asynchronously: a chief dispatches steps to two workers; a parameter server holds the weights
  kdist launch --workers=2 --ps=1 -- kdist train --model=lenet

  # local SGD: replicas train independently for 8 steps, then their weights are averaged
  kdist train --strategy=mirrored --num_devices=2 --local_steps=8

  # a model in two pipeline stages, with two replicas: four devices
  kdist train --layout=data=2,pipeline=2 --model=lenet --dataset=digits

  # the same with one stage of both replicas per host; here, processes act as hosts
  kdist launch --workers=2 -- kdist train --model=lenet --layout=data=2,pipeline=2,between=model

  # Keras's JAX backend, two replicas of two devices; the file assigns the divided weights
  kdist train --backend=jax --layout=data=2,tensor=2 --split=split.json --model=mlp

  # find the bottleneck: the ten most expensive operations, and curves in W&B
  kdist train --profile=10:20 --wandb_mode=auto --price_usd_per_hour=2.48

  # run a plan of `kdist plan`, and compare its prediction with the measurement
  kdist train --plan=plan.json

  # with the settings that kdist tune measured to be fastest on this machine
  kdist train --tuned=tuned.json

  # your own model and data, and a version of the model for `kdist serve`
  kdist train --model=my_code.py:build --model_args="width=8" --dataset=my_code.py:load_data \\
    --export=models/mine

  # fine-tune a model of Keras: first its new last layer, and after two epochs all of it
  kdist train --model=keras.applications.MobileNetV2 --weights=imagenet --dataset=PetImages \\
    --operations="resize(160, 160)" --freeze='(?!logits).*' --unfreeze_after_epochs=2 \\
    --epochs=8 --learning_rate=0.005 --early_stopping=3 --save_best

  # a language model of the documents of a repository, byte by byte
  kdist train --model=transformer --dataset=text:docs --optimizer=adam --learning_rate=0.003

  # on a spot VM: run the same command again on another one, and it resumes from the bucket
  kdist train --run_dir=gs://bucket/cats/a --checkpoint_minutes=5

  # within a minute: a small model on handwritten digits, a part of kdist
  kdist train --model=lenet --dataset=digits --epochs=20

It prints the test accuracy, seconds per epoch, examples per second, and the devices. It writes
config.json, metrics.jsonl, devices.jsonl, summary.json, checkpoints, and a report to --run_dir
(with --backend=jax: config.json, summary.json, and a model per epoch).
"""

import re

from absl import flags

from kdist import program
from kdist.commands.training_run.backend_and_plan import choose_backend
from kdist.commands.training_run.on_jax import train_on_jax
from kdist.commands.training_run.on_tensorflow import train_on_tensorflow
from kdist.layout import SHARDS

FLAGS = flags.FLAGS

with program.flag_group("Common"):
    flags.DEFINE_string(
        "model",
        "resnet18",
        "Model to train: mlp, lenet, resnet18, mobilenet_v2, inception, transformer (for "
        "--dataset=text:PATH, whose next byte it predicts), a model of Keras such as "
        "keras.applications.ResNet50, or your own function as module:function or path.py:function. "
        "It returns a Keras model; its parameters input_shape and num_classes, if it has them, are "
        "those of the data. A model that is not compiled is trained as a classifier.",
    )
    flags.DEFINE_string(
        "model_args", "", "Arguments of the function that builds the model: width=8,name='small'."
    )
    flags.DEFINE_string(
        "dataset",
        "fashion_mnist",
        "Dataset: a TFDS name (fashion_mnist, cats_vs_dogs, …), digits, a directory or URL "
        "(gs://bucket/pets) of images or IDX files, text:PATH for a file or directory of text, or "
        "a function as module:function or path.py:function. It returns "
        "(x_train, y_train), (x_test, y_test), such as "
        "keras.datasets.cifar10:load_data, or two kdist.data.Source.",
    )
    flags.DEFINE_string(
        "strategy",
        "auto",
        "Distribution strategy: auto, one_device, mirrored, multi_worker, parameter_server, "
        "central_storage, or tpu. auto: parameter_server or multi_worker in a job of several "
        "processes, else all devices of this machine.",
    )
    flags.DEFINE_integer(
        "num_devices",
        None,
        "Number of devices. Without GPUs, that many logical CPU devices are created.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "local_batch_size", 64, "Examples per replica and micro-step.", lower_bound=1
    )
    flags.DEFINE_integer("epochs", 1, "Passes over the training data.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 0.05, "Peak learning rate.", lower_bound=0.0)
    flags.DEFINE_string(
        "run_dir",
        None,
        "Run directory: a new one, or that of an interrupted run, which resumes. By default a new "
        "directory under runs/. A URL such as gs://bucket/cats/a is the directory "
        "runs/gs/bucket/cats/a and its --mirror.",
    )
    flags.DEFINE_string(
        "export",
        None,
        "Directory or URL to which the trained model is exported for kdist serve, such as "
        "models/fashion or gs://bucket/models/fashion.",
    )

with program.flag_group("Data"):
    flags.DEFINE_string(
        "fallback_dataset", None, "Dataset to use, with a warning, if --dataset is not available."
    )
    flags.DEFINE_integer(
        "fallback_epochs",
        None,
        "Passes over --fallback_dataset, which may be smaller; by default --epochs.",
        lower_bound=1,
    )
    flags.DEFINE_list(
        "data_workers",
        [],
        "Addresses (host:port) of processes that read and prepare the batches; start each with "
        "`kdist data_worker`. By default those of `kdist launch --data_workers`. For runs whose "
        "report says that they are input-bound.",
    )
    flags.DEFINE_string("data_dir", None, "Directory or URL of TFDS datasets or of the IDX files.")
    flags.DEFINE_boolean("download", True, "Allow downloading a dataset.")
    flags.DEFINE_integer(
        "examples", None, "Number of training examples to use; all by default.", lower_bound=1
    )
    flags.DEFINE_float(
        "minutes",
        None,
        "Time budget for the run. Times a few steps first, then uses as many examples as fit into "
        "the budget. For one host.",
        lower_bound=0.01,
    )
    flags.DEFINE_integer(
        "sequence_length", 128, "Tokens per sequence of --dataset=text:PATH.", lower_bound=1
    )
    flags.DEFINE_string(
        "operations",
        "",
        "Image operations, applied in order, such as 'resize(160, 160)|random_flip()'.",
    )

with program.flag_group("Devices and layout"):
    flags.DEFINE_enum(
        "backend",
        "tensorflow",
        ["tensorflow", "jax"],
        "Keras backend. jax (pip install 'kdist[jax]') supports --layout with data and tensor, or "
        "--num_devices, but not --strategy. It reports other flags that it does not support.",
    )
    flags.DEFINE_list("devices", None, "Names of the devices to use, such as GPU:0,GPU:2.")
    flags.DEFINE_string(
        "layout",
        None,
        "Degrees of parallelism of a split model; replaces --strategy. data=2,branch=2: two "
        "replicas, each with parallel branches of the model on two devices. "
        "pipeline=2,micro_batches=4: two stages "
        "that process four parts of each batch (recompute: trade activation memory for "
        "computation; schedule=gpipe: all forward passes first). tensor=2: weights divided over "
        "two devices. On several hosts each host computes whole replicas; with between=model each "
        "host computes a part of the model for all replicas.",
    )
    flags.DEFINE_enum(
        "shard",
        None,
        list(SHARDS),
        "Training state that replicas of mirrored or multi_worker divide among themselves, to save "
        "memory. optimizer: each holds the optimizer's slots of its part of every large weight. "
        "gradients: also the sums of gradients of --accumulate. weights: also its part of the "
        "weights, which are gathered where a layer uses them; hosts of several devices each divide "
        "them among their own, hosts of one device among all. "
        "In a layout: data=4,shard=optimizer.",
    )
    flags.DEFINE_string(
        "split",
        "auto",
        "Placement of layers for --layout. auto balances the cost of the layers and divides the "
        'largest weights. Or a JSON file such as {"stem.*": "stage(0)", "head": "stage(1)"} or '
        '{".*_up": "column()", ".*_down": "row()"}. `kdist check --layout` prints it.',
    )
    flags.DEFINE_string(
        "reduction",
        "auto",
        "Gradient reduction. mirrored: auto, nccl, hierarchical_copy, or reduction_to_one_device. "
        "multi_worker: auto, nccl, or ring.",
    )
    flags.DEFINE_integer(
        "num_packs",
        None,
        "Number of tensors into which gradients are packed before the reduction.",
        lower_bound=0,
    )
    flags.DEFINE_string(
        "plan",
        None,
        "Plan written by `kdist plan --output`. It sets the model, strategy, devices, batch, "
        "precision, optimizer, and epochs. A flag that contradicts it is an error.",
    )
    flags.DEFINE_string(
        "tuned",
        None,
        "Settings written by `kdist tune --output`, such as XLA, the step group, and the devices. "
        "A flag that contradicts them is an error.",
    )

with program.flag_group("Several hosts"):
    flags.DEFINE_float(
        "cluster_timeout_seconds",
        60.0,
        "Time limit for the tasks of a job to connect.",
        lower_bound=0,
    )
    flags.DEFINE_float(
        "step_timeout_seconds",
        600.0,
        "Time limit for a worker that waits for the others in a step.",
        lower_bound=0,
    )
    flags.DEFINE_boolean(
        "allow_remote",
        False,
        "Accept connections from other hosts; required for jobs on several hosts. TensorFlow's "
        "servers do not authenticate clients.",
    )

with program.flag_group("Optimization"):
    flags.DEFINE_enum(
        "optimizer",
        "momentum",
        ["sgd", "momentum", "adam"],
        "Optimizer. momentum is SGD with a momentum of 0.9.",
    )
    flags.DEFINE_enum(
        "schedule", "cosine", ["constant", "ramp", "cosine"], "Learning rate schedule."
    )
    flags.DEFINE_float(
        "ramp_epochs", 0.2, "Length of the learning-rate warmup (ramp), in epochs.", 0.0, 1e6
    )
    flags.DEFINE_float(
        "decay", 0.5, "Decay factor per epoch after the warmup of --schedule=ramp.", 0.0, 1.0
    )
    flags.DEFINE_enum(
        "scale_learning_rate",
        "none",
        ["none", "linear", "sqrt"],
        "Scaling of --learning_rate with the global batch size.",
    )
    flags.DEFINE_integer(
        "base_batch_size",
        128,
        "Global batch size for which --learning_rate was tuned.",
        lower_bound=1,
    )
    flags.DEFINE_integer("accumulate", 1, "Micro-steps per optimizer update.", lower_bound=1)
    flags.DEFINE_boolean(
        "sync_batch_norm", False, "Compute BatchNormalization statistics over all replicas."
    )
    flags.DEFINE_integer(
        "seed",
        0,
        "Seed of the initial weights, shuffling, augmentation, and dropout.",
        lower_bound=0,
        upper_bound=2**32 - 1,
    )

with program.flag_group("Fine-tuning and regular practice"):
    flags.DEFINE_string(
        "weights",
        "none",
        "Start weights: none for new ones, a .keras or .weights.h5 file, or imagenet for those "
        "that Keras downloads for its applications. Layers that a file does not fit, such as the "
        "last one for another number of classes, get new weights, and are listed.",
    )
    flags.DEFINE_multi_string(
        "freeze",
        [],
        "Layers that are not trained: regular expressions that match a whole name, or a path such "
        "as base/conv1, separated by commas. BatchNormalization in them is in inference mode. "
        "'(?!logits).*' is all layers but logits.",
    )
    flags.DEFINE_integer(
        "unfreeze_after_epochs",
        None,
        "Number of epochs after which the layers of --freeze are trained, too. Their "
        "BatchNormalization stays in inference mode. Never by default.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "early_stopping",
        None,
        "Number of epochs without a lower validation loss after which training ends; 3 to 10 are "
        "usual. By default all --epochs are trained.",
        lower_bound=1,
    )
    flags.DEFINE_boolean(
        "save_best",
        False,
        "Keep the model with the lowest validation loss in RUN_DIR/best.keras, for kdist export. "
        "--export exports it instead of the last one.",
    )
    flags.DEFINE_float(
        "ema",
        None,
        "Momentum of a moving average of the weights, such as 0.999: about the mean of the last "
        "1,000 steps. Validation, saved models, and the exported one have the average. None by "
        "default.",
        lower_bound=0.0,
        upper_bound=0.999999,
    )
    flags.DEFINE_float(
        "clip_norm",
        None,
        "Maximum norm of the gradient of all weights together; a longer one is scaled down. 1 is "
        "usual for transformers. No limit by default.",
        lower_bound=1e-9,
        upper_bound=1e9,
    )

with program.flag_group("Local SGD and asynchronous training"):
    flags.DEFINE_integer(
        "local_steps",
        None,
        "Local SGD: number of steps after which the weights are averaged. They are also averaged "
        "at the end of an epoch. By default gradients are reduced in every step. More local steps "
        "save communication and cost accuracy. On several hosts, use a --steps_per_execution that "
        "is a multiple of it.",
        lower_bound=1,
    )
    flags.DEFINE_enum(
        "local_slots",
        "keep",
        ["keep", "average", "reset"],
        "Optimizer slots when --local_steps averages the weights: each replica keeps its own, they "
        "are averaged, or they are reset to zero.",
    )
    flags.DEFINE_integer(
        "max_staleness",
        None,
        "parameter_server: maximum number of updates by other workers between reading the weights "
        "and applying an update. 0 runs one step at a time. Unlimited by default.",
        lower_bound=0,
    )

with program.flag_group("Performance"):
    flags.DEFINE_enum(
        "precision",
        "float32",
        ["float32", "mixed_bfloat16", "mixed_float16"],
        "Keras dtype policy.",
    )
    flags.DEFINE_boolean("jit_compile", False, "Compile the training step with XLA.")
    flags.DEFINE_boolean(
        "share_trace",
        False,
        "Trace a step once for all replicas of a process: with many devices, deep models start "
        "sooner.",
    )
    flags.DEFINE_string(
        "compile_cache",
        None,
        "Directory in which XLA keeps what it compiles, so that later runs of the same model on "
        "the same kind of machine start sooner. Needs --jit_compile, or --backend=jax.",
    )
    flags.DEFINE_string(
        "steps_per_execution", "1", "Steps per call of the train function; auto tunes the number."
    )
    flags.DEFINE_integer(
        "intra_op_threads",
        None,
        "Threads among which one operation on the CPU is divided. By default all cores, or one if "
        "there are no more cores than logical CPU devices.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "parallel_calls",
        None,
        "Number of examples that are read and prepared at the same time; tuned by tf.data by "
        "default.",
        lower_bound=1,
    )
    flags.DEFINE_string(
        "profile",
        None,
        "Steps to trace, FIRST:LAST, such as 10:20. Writes a trace for TensorBoard and xprof to "
        "RUN_DIR/profile and lists the ten most expensive operations in the report.",
    )

with program.flag_group("Checkpoints"):
    flags.DEFINE_string(
        "resume",
        "auto",
        "auto: resume an interrupted run in --run_dir from its newest checkpoint. never: start a "
        "new run, in a new --run_dir. Or the path or URL of a checkpoint, or the URL of a run, "
        "whose newest checkpoint is fetched.",
    )
    flags.DEFINE_integer(
        "checkpoint_steps",
        None,
        "Steps between checkpoints, in addition to those at the end of an epoch, on SIGTERM and "
        "Ctrl-C, and when the terminal is closed. None by default.",
        lower_bound=1,
    )
    flags.DEFINE_float(
        "checkpoint_minutes", 10.0, "Minutes between checkpoints; 0 disables them.", lower_bound=0.0
    )

    flags.DEFINE_string(
        "mirror",
        None,
        "URL in object storage, such as gs://bucket/cats/a or s3://bucket/cats/a, to which the run "
        "is copied in the background. On a new disk the run is fetched from it and resumes.",
    )

with program.flag_group("Logs and tracking"):
    flags.DEFINE_enum(
        "wandb_mode",
        "off",
        ["auto", "online", "offline", "off"],
        "Weights & Biases, in addition to the run directory. auto: online if there is a login and "
        "the server answers, otherwise offline; upload later with `wandb sync`.",
    )
    flags.DEFINE_string(
        "wandb_project", None, "W&B project. By default WANDB_PROJECT, otherwise kdist."
    )
    flags.DEFINE_string("wandb_group", None, "W&B group of the run. By default WANDB_RUN_GROUP.")
    flags.DEFINE_string("wandb_job_type", None, "W&B job type of the run within its group.")
    flags.DEFINE_list("wandb_tags", [], "W&B tags of the run. By default those in WANDB_TAGS.")
    flags.DEFINE_string("wandb_notes", None, "W&B notes on the run. By default WANDB_NOTES.")
    flags.DEFINE_integer(
        "wandb_samples",
        0,
        "Number of random test examples whose predictions are a table in W&B after each epoch: "
        "image, label, prediction, and probability.",
        lower_bound=0,
        upper_bound=100,
    )
    flags.DEFINE_string(
        "mlflow_uri",
        None,
        "MLflow tracking URI, such as http://127.0.0.1:5000, to which the run is logged as well "
        "(needs kdist[mlflow]). An exported model becomes an MLflow model.",
    )
    flags.DEFINE_string(
        "mlflow_experiment", None, "MLflow experiment. By default MLFLOW_EXPERIMENT_NAME, or kdist."
    )
    flags.DEFINE_boolean("tensorboard", False, "Write TensorBoard logs to RUN_DIR/tensorboard.")
    flags.DEFINE_float(
        "device_seconds",
        5.0,
        "Seconds between two samples of the devices; 0 disables sampling.",
        lower_bound=0.0,
    )
    flags.DEFINE_float(
        "price_usd_per_hour",
        None,
        "Price of all machines of the run, in US dollars per hour, for the cost in the report.",
        0.0,
    )
    flags.DEFINE_enum(
        "verbose",
        "auto",
        ["auto", "0", "1", "2"],
        "Verbosity of Keras: 0 silent, 1 progress bar, 2 one line per epoch.",
    )

flags.mark_flags_as_mutual_exclusive(["num_devices", "devices"])
flags.mark_flags_as_mutual_exclusive(["num_devices", "layout"])
flags.mark_flags_as_mutual_exclusive(["plan", "layout"])
flags.register_validator(
    "steps_per_execution",
    lambda text: text == "auto" or re.fullmatch(r"[1-9][0-9]{0,5}", text),
    "must be auto, or an integer from 1 to 999999",
)
flags.register_validator(
    "profile",
    lambda text: text is None or re.fullmatch(r"[1-9][0-9]{0,11}:[1-9][0-9]{0,11}", text),
    "must be FIRST:LAST, with steps counted from 1, such as 10:20",
)
program.accept_urls("run_dir", "mirror", "dataset", "data_dir", "export", "resume")
program.accept_urls("mlflow_uri", is_checked=False)
flags.mark_flags_as_mutual_exclusive(["plan", "tuned"])
program.reads_file("tuned", "create it with kdist tune --output")
program.reads_file("plan", "create it with kdist plan --output")
program.reads_file("split", "write the placement to it, or use --split=auto", unless=["auto"])


def main(_):
    choose_backend()
    if FLAGS.backend == "jax":
        train_on_jax()
    else:
        train_on_tensorflow()


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    program.run(main)
