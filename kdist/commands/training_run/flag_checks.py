"""Checks of everything that the flags tell before TensorFlow is imported and data are loaded."""

import os
import pathlib

from absl import flags

from kdist import program
from kdist.commands.training_run.applications import (
    APPLICATIONS,
    PREFIX,
    application,
    check_application_arguments,
)
from kdist.commands.training_run.compiled_model import MODELS, TEXT_MODEL
from kdist.commands.training_run.fine_tuning import check_weights, freeze_patterns
from kdist.commands.training_run.user_code import (
    check_arguments,
    check_reference,
    is_reference,
    parse_arguments,
)
from kdist.data.names import TEXT_PREFIX, check_dataset_name, dataset_path
from kdist.data.operations import as_operations
from kdist.data.worker_addresses import check_answers, parse_data_workers
from kdist.hardware import has_tpu
from kdist.json_text import parse_json
from kdist.mirror.mirror import find_checkpoint
from kdist.mirror.store import Store, is_url
from kdist.run_directory import check_writable

FLAGS = flags.FLAGS

# Traces of more steps fill the memory and the disk.
_MAX_PROFILED_STEPS = 1000
# Flags of a run in W&B.
_OF_WANDB = tuple(
    f"wandb_{name}" for name in ("project", "group", "job_type", "tags", "notes", "samples")
)
# Parameters of a builder that the data set.
_OF_DATA = ("input_shape", "num_classes")
# Strategies whose replicas share their weights.
_SHARE_WEIGHTS = ("parameter_server", "central_storage", "tpu")


def check_flags(spec):
    """Checks the flags of a training under the strategy of a `StrategySpec`.

    Raises:
        ValueError: a value is unknown or invalid, or flags contradict each other.
        FileNotFoundError: a directory does not exist.
        ConnectionError: a data worker does not answer.
    """
    if FLAGS.mlflow_uri is not None:
        program.check_installed("mlflow", "mlflow")
    _check_model()
    _check_fine_tuning(spec)
    _check_export()
    check_data(FLAGS.dataset, FLAGS.fallback_dataset)
    for address in parse_data_workers(FLAGS.data_workers):
        check_answers(address)
    _check_resume()
    check_split()
    _check_profile()
    _check_strategy(spec)
    _check_effects(spec)


def _check_resume():
    if FLAGS.resume in ("auto", "never"):
        return
    if is_url(FLAGS.resume):
        find_checkpoint(FLAGS.resume)
    elif not os.path.isfile(os.path.join(FLAGS.resume, "state.json")):
        raise FileNotFoundError(
            f"--resume={FLAGS.resume}: no such checkpoint; give the path of one in "
            "RUN_DIR/checkpoints, auto, or never"
        )


def check_data(*datasets):
    """Checks --operations, --data_dir, and the names of datasets; None is no dataset.

    Raises:
        ValueError: an operation or a name is unknown, or an operation has invalid arguments.
        FileNotFoundError: a directory does not exist.
    """
    as_operations(FLAGS.operations)
    for name in datasets:
        if name is not None and is_reference(name):
            check_reference("dataset", name)
        elif name is not None:
            _check_dataset(name)
    directory = FLAGS.data_dir
    if directory is None or is_url(directory) or os.path.isdir(directory):
        return
    if os.path.exists(directory) or not FLAGS.download:
        raise FileNotFoundError(
            f"--data_dir={directory}: no such directory; give that of the TFDS datasets or IDX "
            "files, or leave it out"
        )


def _check_dataset(name):
    path = dataset_path(name)
    is_known = name == "digits" or name.startswith(TEXT_PREFIX)
    if not is_known and not is_url(path) and not os.path.isdir(path):
        check_dataset_name(path, FLAGS.data_dir)


def check_split():
    """Raises a ValueError if the file of --split has another form."""
    if FLAGS.split == "auto":
        return
    try:
        placement = parse_json(pathlib.Path(FLAGS.split).read_text())
    except ValueError as error:
        raise ValueError(f"--split={FLAGS.split} is not JSON ({error}); correct it") from error
    if not isinstance(placement, dict):
        raise ValueError(f'--split={FLAGS.split}: write {{"layer.*": "stage(0)", …}}')


def _check_model():
    name, own = FLAGS.model, (*MODELS, TEXT_MODEL)
    is_for_text = FLAGS.dataset.startswith(TEXT_PREFIX)
    arguments = parse_arguments(FLAGS.model_args)
    if is_reference(name):
        check_reference("model", name)
        check_arguments(name, _OF_DATA, arguments)
    elif name == TEXT_MODEL and not is_for_text:
        raise ValueError(
            f"--model={name} predicts the next byte of a text, and --dataset={FLAGS.dataset} is no "
            "text; add --dataset=text:PATH"
        )
    elif name not in own and application(name) is None:
        known = (*own, *map(str.lower, APPLICATIONS), *(PREFIX + each for each in APPLICATIONS))
        raise ValueError(
            f"unknown model {name!r}{program.hint(name, known)} Available are {', '.join(own)}, "
            f"{PREFIX}NAME, and your own functions as module:function or path.py:function"
        )
    elif name != TEXT_MODEL and is_for_text:
        raise ValueError(
            f"--model={name} is for images, and --dataset={FLAGS.dataset} is text; add "
            f"--model={TEXT_MODEL}, or your own function"
        )
    elif name in own:
        module = "transformer" if name == TEXT_MODEL else "images"
        arguments.pop("precision", None)  # of the decorator of all builders
        check_arguments(f"kdist.models.{module}:{name}", _OF_DATA, arguments, decorated=True)
    else:
        check_application_arguments(application(name), arguments)
    if FLAGS.sync_batch_norm and name not in MODELS:
        raise ValueError(
            f"--sync_batch_norm is for {', '.join(MODELS)}; leave it out, and in your own model "
            "write BatchNormalization(synchronized=True)"
        )


def _check_fine_tuning(spec):
    check_weights()
    freeze_patterns()
    after = FLAGS.unfreeze_after_epochs
    if after is not None and after >= FLAGS.epochs:
        raise ValueError(
            f"--unfreeze_after_epochs={after}: no epoch would follow; train for more --epochs than "
            f"{FLAGS.epochs}, or leave it out"
        )
    if after is not None and spec.kind in ("parameter_server", "layout"):
        raise ValueError(
            f"--unfreeze_after_epochs={after}: a {spec.kind} trains the same weights to the end; "
            "use --strategy=mirrored or multi_worker, or train twice: with --freeze, and then "
            "without it from --weights=RUN_DIR/checkpoints/epoch-….keras"
        )
    if "evaluator" in spec.cluster.tasks and (FLAGS.early_stopping or FLAGS.save_best):
        name = "early_stopping" if FLAGS.early_stopping else "save_best"
        raise ValueError(
            f"--{name} needs validation in the training itself, but in this job the evaluator "
            "validates; start the job without one, or leave the flag out"
        )


def _check_export():
    if FLAGS.export is None:
        return
    if is_url(FLAGS.export):
        Store(FLAGS.export).names()
        return
    path = pathlib.Path(FLAGS.export)
    if not FLAGS.export or (path.exists() and not path.is_dir()):
        raise ValueError(f"--export={path} is not a directory; give one, such as models/fashion")
    check_writable(path / "1")


def _check_profile():
    if FLAGS.profile is None:
        return
    first, last = map(int, FLAGS.profile.split(":"))
    if not first <= last < first + _MAX_PROFILED_STEPS:
        raise ValueError(
            f"--profile={FLAGS.profile}: LAST is at least FIRST, and at most {_MAX_PROFILED_STEPS} "
            "steps are traced; use --profile=10:20"
        )


def _check_strategy(spec):
    if spec.kind == "tpu" and not has_tpu(os.environ):
        raise ValueError(
            "--strategy=tpu: this machine has no TPU, and TPU_NAME is not set; set it to one that "
            "this machine can reach, or use --strategy=auto"
        )
    if FLAGS.minutes is not None and spec.cluster.num_workers > 1:
        raise ValueError("--minutes is for one host; use --examples on several")
    if FLAGS.local_steps is not None and spec.kind in _SHARE_WEIGHTS:
        raise ValueError(
            f"--local_steps={FLAGS.local_steps}: every replica needs its own weights, and under "
            f"{spec.kind} they share them; use --strategy=mirrored or multi_worker, or leave it out"
        )
    if FLAGS.local_steps is not None and spec.cluster.planned_workers is not None:
        raise ValueError(
            f"--local_steps={FLAGS.local_steps}: the weights of each replica depend on the number "
            "of replicas; leave it out, or start the job without --min_workers"
        )
    if FLAGS.local_steps is not None and FLAGS.sync_batch_norm:
        raise ValueError(
            "--local_steps and --sync_batch_norm: replicas would communicate in every step; leave "
            "one of them out"
        )
    if FLAGS.jit_compile and spec.kind == "layout":
        raise ValueError(
            "--jit_compile and --layout: XLA compiles for one device, not for a split model; leave "
            "one of them out"
        )
    if FLAGS.jit_compile and spec.layout is not None and spec.layout.shard == "weights":
        raise ValueError(
            "--jit_compile and shard=weights: XLA would gather all weights at once; leave one of "
            "them out, or use --shard=optimizer"
        )


def _check_effects(spec):
    """Refuses flags that would be ignored, as the training would differ from what was asked for."""
    for name, is_used, needed in (
        ("unfreeze_after_epochs", bool(FLAGS.freeze), "--freeze"),
        ("fallback_epochs", FLAGS.fallback_dataset is not None, "--fallback_dataset"),
        ("max_staleness", spec.kind == "parameter_server", "--strategy=parameter_server"),
        ("local_slots", FLAGS.local_steps is not None, "--local_steps"),
        ("decay", FLAGS.schedule == "ramp", "--schedule=ramp"),
        ("sequence_length", FLAGS.dataset.startswith(TEXT_PREFIX), "--dataset=text:PATH"),
        ("ramp_epochs", FLAGS.schedule != "constant", "--schedule=ramp or cosine"),
        *((name, FLAGS.wandb_mode != "off", "--wandb_mode=auto") for name in _OF_WANDB),
        ("mlflow_experiment", FLAGS.mlflow_uri is not None, "--mlflow_uri"),
        ("base_batch_size", FLAGS.scale_learning_rate != "none", "--scale_learning_rate"),
    ):
        if FLAGS[name].present and not is_used:
            raise ValueError(
                f"--{name}={FLAGS[name].value} has no effect without {needed}; add it, or leave "
                f"--{name} out"
            )
