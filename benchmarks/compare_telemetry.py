"""Times kdist's `fit` with telemetry or checkpoints, and without: what do they cost?

  # LeNet and ResNet-18, about half an hour on two cores; from the repository's root
  python -m benchmarks.compare_telemetry --save

  # the cost of a checkpoint in a turn of 10 steps; one every 50 steps costs a fifth of that
  python -m benchmarks.compare_telemetry --models=resnet18 --variants=checkpoint --steps=10

  # one model, fewer steps
  python -m benchmarks.compare_telemetry --models=lenet --steps=500

Every variant has a process of its own. They take turns of some seconds (`benchmarks.turns`), so
that a slow phase of the machine affects all of them. Ratios are step times divided by those without
telemetry in the same round. The table shows their median and its 95 % confidence interval, by order
statistics. The variants:

  off        no telemetry
  run        the run directory
  offline    the run directory and W&B, offline
  healthy    the same with W&B online; a stand-in for its server answers on loopback
  frozen, refusing, dead   the same, but before the clock starts the server stops answering, answers
             with 503, or is gone
  checkpoint no telemetry, and one checkpoint per turn
  mirror     the same, copied to object storage that takes half a second for each file
"""

import pathlib
import statistics
import sys

from absl import flags

from benchmarks import measuring, tables, turns
from benchmarks.measuring import Variant
from benchmarks.rivals.workload import Workload
from kdist import program

FLAGS = flags.FLAGS

# Examples per replica and step, and steps that take some seconds on two cores.
SIZES = {"lenet": (16, 1000), "resnet18": (16, 6)}

NAMES = {
    "off": "no telemetry",
    "run": "run directory",
    "offline": "W&B offline",
    "healthy": "W&B online",
    "frozen": "W&B, server frozen",
    "refusing": "W&B, server refusing",
    "dead": "W&B, server dead",
    "checkpoint": "no telemetry, a checkpoint",
    "mirror": "the same, with a slow mirror",
}
VARIANTS = {
    name: Variant(text, "", "kdist_telemetry", {"telemetry": name}) for name, text in NAMES.items()
}

flags.DEFINE_list("models", list(SIZES), f"Of {', '.join(SIZES)}.")
flags.DEFINE_list(
    "variants",
    [name for name in VARIANTS if name not in ("checkpoint", "mirror")],
    f"Any of {', '.join(VARIANTS)}; off is always included.",
)
flags.DEFINE_integer("turns", 30, "How often each variant is timed.", lower_bound=6)
flags.DEFINE_integer(
    "steps",
    None,
    "Steps per turn; by default a few seconds of training.",
    lower_bound=1,
)
flags.DEFINE_integer("num_devices", 2, "Replicas; GPUs are not used.", lower_bound=1)
flags.DEFINE_integer("cores", 2, "CPU cores for everything.", lower_bound=1)
flags.DEFINE_boolean("save", False, "Write the tables to --results_dir, with commit and machine.")
flags.DEFINE_string(
    "results_dir", str(pathlib.Path(__file__).parent / "results"), "Directory for --save."
)


def main(_):
    program.check_items("models", SIZES)
    program.check_items("variants", VARIANTS)
    chosen = {
        name: variant
        for name, variant in VARIANTS.items()
        if name == "off" or name in FLAGS.variants
    }
    texts, versions = [], {}
    for model in FLAGS.models:
        workload = _workload(model)
        rows, found = turns.measure(chosen, workload, FLAGS.turns, _progress(workload))
        versions.update(found)
        texts.append(table(workload, rows))
        print(f"{texts[-1]}\n", flush=True)
    if FLAGS.save:
        _save("\n\n".join(texts), versions)


def table(workload: Workload, rows: list[tables.Row]) -> str:
    """Returns the table of one workload: a row per variant, the first one without telemetry."""
    head = ["telemetry", "ms per step", "min–max", "relative to without", "95 %"]
    lines = []
    for row in rows:
        ratio, low, high = _median(row.times, rows[0].times)
        spread = f"{min(row.times):.2f}–{max(row.times):.2f}"
        texts = [f"{row.median:.2f}", spread, f"{ratio:.3f}", f"{low:.3f}–{high:.3f}"]
        lines.append([row.name, *texts])
    return "\n\n".join([tables.title(workload), tables.markdown([head, *lines])])


def _median(times, without):
    """Returns the median of the ratios in each round, and its 95 % confidence interval.

    Of n sorted ratios, the median lies between the k-th and the k-th from the end with probability
    1 - 2 P(X < k), where X is binomial with n and 1/2. The normal approximation gives k for 95 %.
    """
    ratios = sorted(one / other for one, other in zip(times, without, strict=True))
    n = len(ratios)
    k = max(0, int((n - 1.96 * n**0.5) / 2))
    return statistics.median(ratios), ratios[k], ratios[n - 1 - k]


def _workload(model):
    local_batch_size, steps = SIZES[model]
    return Workload(
        model=model,
        precision="float32",
        local_batch_size=local_batch_size,
        replicas=FLAGS.num_devices,
        cores=FLAGS.cores,
        steps=FLAGS.steps or steps,
    )


def _progress(workload):
    def say(number):
        print(f"{workload.model}: turn {number + 1} of {FLAGS.turns}", file=sys.stderr)

    return say


def _save(text, versions):
    about = {
        "libraries": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "cores used": FLAGS.cores,
        "turns": FLAGS.turns,
    }
    title = "Telemetry compared"
    path = tables.save(text, pathlib.Path(FLAGS.results_dir), measuring.ROOT, about, title)
    print("saved", path)


if __name__ == "__main__":
    program.run(main)
