"""Training with --backend=tensorflow, under any strategy, plan, or layout."""

import contextlib
import importlib.util
import logging
import math
import time

from absl import flags

import kdist
from kdist.commands.training_run.backend_and_plan import (
    apply_plan,
    apply_tuned,
    choose_backend,
    report_data_differences,
)
from kdist.commands.training_run.compiled_model import (
    compiled_model,
    split_layout,
    splits_model,
    verbosity,
)
from kdist.commands.training_run.datasets import load_data, load_data_in_time
from kdist.commands.training_run.flag_checks import check_flags
from kdist.commands.training_run.next_steps import (
    check_saved,
    print_next_steps,
    print_start,
    says_how_to_continue,
    says_how_to_export,
)
from kdist.commands.training_run.recording import (
    best_model,
    check_directory,
    cost,
    open_mirror,
    print_summary,
    run_config,
    run_directory,
    start_recording,
)
from kdist.mirror.store import is_url
from kdist.report.records import NO_RECORDS, read_records
from kdist.run_directory import RunDirectory, checkpoint_step
from kdist.strategy_spec import resolve
from kdist.telemetry.writers import write_results

FLAGS = flags.FLAGS
_logger = logging.getLogger("kdist.train")
# Fields of the summary that describe a model, wherever it is used.
_MODEL_FACTS = (
    *("model", "dataset", "strategy", "devices", "num_replicas"),
    *("global_batch_size", "precision", "epochs", "versions", "git_commit"),
)


def train_on_tensorflow():
    """Trains with the strategy of the flags, and writes a run directory."""
    apply_tuned()
    plan = apply_plan()
    spec = strategy_spec(plan)
    check_flags(spec)
    path = run_directory()
    with open_mirror(path, spec.cluster.is_chief) as mirror:
        _train(spec, plan, path, mirror)


def _train(spec, plan, path, mirror):
    resumes = check_directory(path, writes=spec.cluster.is_chief)
    import keras  # after all checks, which are to fail early, and not for --help

    started = time.perf_counter()
    strategy = kdist.strategies.build(spec)
    is_chief = kdist.strategies.is_chief(strategy)
    batch = kdist.strategies.elastic_batch(strategy, FLAGS.local_batch_size, FLAGS.accumulate)
    keras.utils.set_random_seed(FLAGS.seed)
    dataset, train, test = load_data_in_time(strategy, batch, started, path if resumes else None)
    if is_chief:
        print(f"{dataset}: {train.num_examples:,} examples, {batch}, {train.steps_per_epoch} steps")
        if plan:
            report_data_differences(plan, train)
        print_start(path, resumes, mirror)
    with says_how_to_continue(RunDirectory(path)) if is_chief else contextlib.nullcontext():
        model = compiled_model(strategy, train)
        config = run_config(dataset, train.num_examples)
        recording = start_recording(path, config, model, is_chief, resumes, test, mirror)
        trained = model.fit(
            train,
            validation_data=test,
            epochs=FLAGS.epochs,
            callbacks=recording.callbacks,
            verbose=verbosity(),
        )
        history = trained.history
    if not is_chief:
        return
    if mirror is not None:
        mirror.wait_for_files()
    summary = {
        **recording.telemetry.summary(),
        "model": FLAGS.model,
        "dataset": dataset,
        "examples": train.num_examples,
        **test_results(model, test, history),
        **best_results(recording.run, history),
        **cost(time.perf_counter() - started),
    }
    try:
        finish(recording, summary, plan)
        if FLAGS.export:
            with says_how_to_export(recording.run):
                to_export = model_to_export(model, recording.run)
                exported = export_model(to_export, recording.run, train.class_names)
            write_models(recording, exported, summary)
    finally:
        recording.writer.close()
    if not FLAGS.export:
        check_saved(recording.run, trained.epoch)
    print_next_steps(recording.run, dataset)


def checked_spec():
    """Returns the spec of the strategy of the flags, after checking them and choosing a backend."""
    choose_backend()
    spec = strategy_spec(None)
    check_flags(spec)
    return spec


def prepare_training():
    """Returns (strategy, training pipeline) of the flags, after checking them, for one process."""
    spec = checked_spec()
    import keras

    strategy = kdist.strategies.build(spec)
    replicas = strategy.num_replicas_in_sync
    batch = kdist.Batch(FLAGS.local_batch_size, replicas, FLAGS.accumulate)
    keras.utils.set_random_seed(FLAGS.seed)
    _, train, _ = load_data(batch)
    return strategy, train


def strategy_spec(plan):
    """Returns the spec of the plan's strategy, otherwise of --layout or --strategy."""
    return resolve(
        plan or split_layout() or FLAGS.strategy,
        None if plan else FLAGS.num_devices or FLAGS.devices,
        reduction=FLAGS.reduction,
        num_packs=FLAGS.num_packs,
        cluster_timeout_seconds=FLAGS.cluster_timeout_seconds,
        step_timeout_seconds=FLAGS.step_timeout_seconds,
        allow_remote=FLAGS.allow_remote,
        shard=FLAGS.shard,
        intra_op_threads=FLAGS.intra_op_threads,
    )


def test_results(model, test, history):
    """Returns loss and metrics on the test data after the last epoch, such as test_accuracy."""
    if "val_loss" not in history:  # an evaluator task validates; this is the last model
        results = model.evaluate(test, verbose=0, return_dict=True)
        history = {f"val_{name}": [value] for name, value in results.items()}
    return test_results_of({name: values[-1] for name, values in history.items()})


def test_results_of(logs):
    """Returns the validation results of an epoch, named test_loss, test_accuracy, and so on."""
    return {
        f"test_{name.removeprefix('val_')}": value
        for name, value in logs.items()
        if name.startswith("val_")
    }


def best_results(run, history):
    """Returns epoch and loss of the model of --save_best, and prints them; empty without one."""
    path = best_model(run)
    if path is None:
        return {}
    loss = min(value for value in history["val_loss"] if not math.isnan(value))
    epoch = history["val_loss"].index(loss) + 1
    print(f"best model: {path}, of epoch {epoch}, with a test loss of {loss:.4f}")
    return {"best_epoch": epoch, "best_loss": loss}


def model_to_export(model, run):
    """Returns the trained model, with the weights of --save_best if there are some."""
    import keras

    path = best_model(run)
    if path is None:
        return model
    if splits_model():  # the file holds the merged model
        return keras.saving.load_model(path, compile=False)
    model.load_weights(path)
    return model


def finish(recording, summary, plan):
    """Prints and writes the summary, and writes the report."""
    if recording.profile:
        summary["top_operations"] = recording.profile[0].top_operations()
    if plan:
        summary["plan"] = plan.to_dict()
        print(plan.compare(summary["examples_per_second"]))
    print_summary(summary)  # first, as it is also there if the disk is full
    if page := write_results(recording.run, recording.writer, summary):
        print(f"report: {page}")


def write_models(recording, version, summary):
    """Adds the exported version and the best checkpoint to the writer of the run, such as W&B."""
    facts = {name: summary[name] for name in _MODEL_FACTS if name in summary}
    results = {name: value for name, value in summary.items() if name.startswith("test_")}
    if "best_epoch" in summary:  # --save_best exports this model
        results = {"epoch": summary["best_epoch"], "test_loss": summary["best_loss"]}
    recording.writer.write_model(version, {**facts, **results}, aliases=[f"export-{version.name}"])
    if best := kdist.checkpoint.CheckpointFiles(recording.run.checkpoints).best():
        step = checkpoint_step(best)
        recording.writer.write_model(
            best,
            {**facts, "step": step, **results_at(step, recording.run)},
            name=f"{version.parent.name}-checkpoint",
            aliases=["best"],
        )


def results_at(step, run):
    """Returns loss and metrics on the test data at the end of an epoch, from metrics.jsonl."""
    epochs = read_records(run.metrics, ["kind"], []).get(("epoch",), NO_RECORDS)
    points = {name: dict(zip(*epochs.points("step", name), strict=True)) for name in epochs.columns}
    return test_results_of(
        {name: float(values[step]) for name, values in points.items() if step in values}
    )


def export_model(model, run, class_names):
    """Exports the trained model to --export, and prints where it is.

    If --export is a URL, the version is written to the run directory first, and stays there.

    Returns:
        The local directory of the version.
    """
    from kdist.serving.exporting.bucket import next_version, put_version
    from kdist.serving.exporting.export import export

    url = FLAGS.export.rstrip("/") if is_url(FLAGS.export) else None
    fits = class_names and model.output_shape[-1] == len(class_names)
    if not (has_server := importlib.util.find_spec("tensorflow_serving") is not None):
        _logger.warning(
            "the export has no requests to warm up a server, which need pip install 'kdist[serve]'"
        )
    version = export(
        model,
        FLAGS.export if url is None else run.path / "export" / url.rpartition("/")[2],
        None if url is None else next_version(url),
        classes=class_names if fits else None,
        examples=None if has_server else {},
    )
    exported = version if url is None else put_version(version, url)
    print(f"export: {exported}")
    return version
