"""`kdist tune` next to an exhaustive grid of the same knobs, in one session.

  python -m benchmarks.tuning_grid --quick         # one model, two values of each knob
  python -m benchmarks.tuning_grid                 # three models, all values: hours on two cores

Each cell of the grid is measured in turns with the defaults, as often as the search measures a
candidate at first. In the end, the settings of the search and the best cell are measured again in
turns with each other, as the best of many noisy measurements is too good on average.
"""

import itertools
import sys
import time

from absl import app, flags

from kdist.commands import tune  # noqa: F401  # defines the flags
from kdist.commands.tuning_run.speed import TrainingWithKnobs
from kdist.commands.tuning_run.trials import TrialPool, memory_limits
from kdist.tuning.speed import (
    MeasurementError,
    SpeedSearch,
    median_interval,
    paired_ratio,
)

FLAGS = flags.FLAGS
flags.DEFINE_list(
    "models",
    ["mlp", "lenet", "benchmarks.serving.models:small_resnet"],
    "Models to train, on digits.",
)
flags.DEFINE_boolean("quick", False, "The first model, and one other value of each knob.")
flags.DEFINE_list("knobs", ["devices", "batch"], "Knobs in addition to those searched by default.")

_PAIRS, _LAST_PAIRS = 3, 15
_LOCAL_BATCH, _DEVICES = 16, 2


def main(_):
    print("| model | cells | grid | search | fraction | gain | gain of best cell | search / best |")
    print("|--|--:|--:|--:|--:|--:|--:|--|")
    details = []
    for model in FLAGS.models[:1] if FLAGS.quick else FLAGS.models:
        set_flags(
            model=model,
            dataset="digits",
            num_devices=_DEVICES,
            local_batch_size=_LOCAL_BATCH,
            search=FLAGS.knobs,
        )
        row, detail = compare(model)
        print(row, flush=True)
        details.append(detail)
    print(*details, sep="\n")


def set_flags(**values):
    """Sets flags of `kdist tune`, as if they were on the command line."""
    for name, value in values.items():
        FLAGS[name].value, FLAGS[name].present = value, 1


def compare(model):
    """Returns a row of the table, and a sentence with the settings."""
    limit, process_limit = memory_limits()
    on_gpus = process_limit > limit
    began = time.perf_counter()
    with TrialPool(limit, on_gpus) as pool:
        training = TrainingWithKnobs(pool)
        knobs = [knob if not FLAGS.quick else shortened(knob) for knob in training.knobs()[0]]
        found = SpeedSearch(knobs, training.examples_per_second, seconds=1e6).run()
    search_seconds = time.perf_counter() - began
    began = time.perf_counter()
    cells = list(grid(knobs))
    ratios = {}
    with TrialPool(limit, on_gpus) as pool:
        training = TrainingWithKnobs(pool)
        for number, cell in enumerate(cells):
            print(f"cell {number + 1} of {len(cells)}", file=sys.stderr, flush=True)
            try:
                ratios[number] = median_ratio(training, cell, {}, _PAIRS)[0]
            except MeasurementError as error:
                print(f"{cell}: {error}", flush=True)
    grid_seconds = time.perf_counter() - began
    best = cells[max(ratios, key=ratios.get)]
    with TrialPool(limit, on_gpus) as pool:
        training = TrainingWithKnobs(pool)
        gain, _ = median_ratio(training, best, {}, _LAST_PAIRS)
        against, interval = (
            median_ratio(training, found.settings, best, _LAST_PAIRS)
            if found.settings != best
            else (1.0, (1.0, 1.0))
        )
    row = (
        f"| {model} | {len(cells)} | {grid_seconds:,.0f} s | {search_seconds:,.0f} s | "
        f"1/{grid_seconds / search_seconds:.1f} | {found.gain:.2f} × | {gain:.2f} × | "
        f"{against:.2f} ({interval[0]:.2f} to {interval[1]:.2f}) |"
    )
    return row, f"{model}: search {found.settings or 'defaults'}, grid {best or 'defaults'}"


def shortened(knob):
    """Returns the knob with its first other value only."""
    return type(knob)(knob.name, knob.present, knob.values[:1], knob.changes)


def grid(knobs):
    """Yields all settings of the knobs, as values that differ from the present ones."""
    for values in itertools.product(*((knob.present, *knob.values) for knob in knobs)):
        pairs = zip(knobs, values, strict=True)
        yield {knob.name: value for knob, value in pairs if value != knob.present}


def median_ratio(training, settings, reference, pairs):
    """Returns (median ratio of the speeds of two settings, its confidence interval or None)."""
    ratios = [
        paired_ratio(training.examples_per_second, settings, reference, number)
        for number in range(pairs)
    ]
    return sorted(ratios)[pairs // 2], median_interval(ratios)


if __name__ == "__main__":
    app.run(main)
