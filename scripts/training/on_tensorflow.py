"""Training by --backend=tensorflow: under any strategy, a plan's or a layout."""

import time

from absl import flags

import kdist
from training.data import data_in_time
from training.planned import follow_plan, say_differences
from training.recipe import compiled_model, split_layout, verbosity
from training.recorded import check_directory, recording, run_directory
from training.summary import config, cost, print_summary, summary_of_layout

FLAGS = flags.FLAGS


def train_on_tensorflow():
    """Trains as the flags say, and leaves a run directory."""
    import keras  # after --help has been answered: TensorFlow takes seconds to import

    started = time.perf_counter()
    plan = follow_plan()
    path = run_directory()
    goes_on = check_directory(path)
    strategy = strategy_of(plan)
    is_chief = kdist.strategies.is_chief(strategy)
    batch = kdist.Batch(FLAGS.local_batch_size, strategy.num_replicas_in_sync, FLAGS.accumulate)
    keras.utils.set_random_seed(FLAGS.seed)
    dataset, train, test = data_in_time(strategy, batch, started, path if goes_on else None)
    if is_chief:
        print(f"{dataset}: {train.num_examples:,} examples, {batch}, {train.steps_per_epoch} steps")
        if plan:
            say_differences(plan, train)
    model = compiled_model(strategy, train)
    kept = recording(path, config(dataset, train.num_examples), is_chief, goes_on)
    history = model.fit(
        train,
        validation_data=test,
        epochs=FLAGS.epochs,
        callbacks=kept.callbacks,
        verbose=verbosity(),
    ).history
    if not is_chief:
        return
    summary = {
        **summary_of_layout(strategy, batch, dataset, train.num_examples, model),
        **tested(model, test, history),
        **kept.telemetry.summary(),
        **cost(time.perf_counter() - started),
    }
    finish(kept, summary, plan)


def strategy_of(plan):
    """What a plan says if there is one, else what --layout or --strategy say."""
    return kdist.create_strategy(
        plan or split_layout() or FLAGS.strategy,
        None if plan else FLAGS.num_devices or FLAGS.devices,
        reduction=FLAGS.reduction,
        num_packs=FLAGS.num_packs,
        cluster_timeout_seconds=FLAGS.cluster_timeout_seconds,
        step_timeout_seconds=FLAGS.step_timeout_seconds,
        allow_remote=FLAGS.allow_remote,
    )


def tested(model, test, history):
    """Accuracy and loss on the test data after the last epoch."""
    if "val_loss" not in history:  # an evaluator follows the checkpoints; this is the last one
        results = model.evaluate(test, verbose=0, return_dict=True)
        history = {f"val_{name}": [value] for name, value in results.items()}
    return {"test_accuracy": history["val_accuracy"][-1], "test_loss": history["val_loss"][-1]}


def finish(kept, summary, plan):
    """Writes the summary and the report, and says what a person wants to know."""
    if plan:
        summary["plan"] = plan.to_dict()
        print(plan.compared(summary["examples_per_second"]))
    if kept.profile:
        summary["top_operations"] = kept.profile[0].top_operations()
    kept.writer.write_summary(summary)
    print_summary(summary)
    print(f"report: {kdist.report.write([kept.run.path], kept.run.report)}")
    kept.writer.write_report(kept.run.report)
    kept.writer.close()
