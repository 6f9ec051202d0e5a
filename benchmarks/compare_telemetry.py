"""Times kdist's `fit` with telemetry beside the same without: what does it cost to watch?

  # LeNet and ResNet-18, about half an hour on two cores; from the repository's root
  python -m benchmarks.compare_telemetry --save

  # one model, fewer steps
  python -m benchmarks.compare_telemetry --models=lenet --steps=500

Every variant runs in processes of its own, in turn, so that a slow phase of the machine hits all of
them. Each trains twice, and the second time counts. Ratios are step times divided by those without
telemetry within the same repetition; their median is shown. The variants:

  off        no telemetry
  run        the run directory
  offline    and W&B, offline
  healthy    and W&B, online; a stand-in for its server answers on loopback
  frozen, refusing, dead   the same, but before the clock starts the server stops to answer, answers
             with 503, or is gone
"""

import pathlib
import sys

from absl import flags

from benchmarks import measuring, tables
from benchmarks.measuring import Variant
from benchmarks.rivals.workload import Workload
from kdist import program

FLAGS = flags.FLAGS

# Examples that a replica takes in a step, and steps that take some ten seconds on two cores.
SIZES = {"lenet": (16, 3000), "resnet18": (16, 30)}

NAMES = {
    "off": "no telemetry",
    "run": "run directory",
    "offline": "W&B offline",
    "healthy": "W&B online",
    "frozen": "W&B, server frozen",
    "refusing": "W&B, server refusing",
    "dead": "W&B, server dead",
}
VARIANTS = {
    name: Variant(text, "", "kdist_telemetry", {"telemetry": name}) for name, text in NAMES.items()
}

flags.DEFINE_list("models", list(SIZES), f"Of {', '.join(SIZES)}.")
flags.DEFINE_list("variants", list(VARIANTS), f"Of {', '.join(VARIANTS)}; off is always there.")
flags.DEFINE_integer("repetitions", 3, "Processes for each variant.", lower_bound=1)
flags.DEFINE_integer(
    "steps",
    None,
    "Steps that are timed, after as many to warm up; by default as many as take some seconds.",
    lower_bound=1,
)
flags.DEFINE_integer("num_devices", 2, "Replicas; GPUs are not used.", lower_bound=1)
flags.DEFINE_integer("cores", 2, "CPU cores for everything.", lower_bound=1)
flags.DEFINE_float("timeout", 600, "Seconds after which a process is given up.", lower_bound=1)
flags.DEFINE_boolean("save", False, "Write the tables to --results_dir, with commit and machine.")
flags.DEFINE_string(
    "results_dir", str(pathlib.Path(__file__).parent / "results"), "Where --save writes to."
)


def main(_):
    _check("models", SIZES)
    _check("variants", VARIANTS)
    python = measuring.Python(None, FLAGS.timeout)
    chosen = {
        name: variant
        for name, variant in VARIANTS.items()
        if name == "off" or name in FLAGS.variants
    }
    texts, versions = [], {}
    for model in FLAGS.models:
        workload = _workload(model)
        rows, found = measuring.measure(
            chosen, workload, FLAGS.repetitions, python, _progress(workload)
        )
        versions.update(found)
        texts.append(table(workload, rows))
        print(f"{texts[-1]}\n", flush=True)
    if FLAGS.save:
        _save("\n\n".join(texts), versions)


def table(workload: Workload, rows: list[tables.Row]) -> str:
    """One workload: a row for each variant, the first without telemetry."""
    head = ["telemetry", "ms a step", "min–max", "of the time without"]
    lines = [
        [
            row.name,
            f"{row.median:.2f}",
            f"{min(row.times):.2f}–{max(row.times):.2f}",
            f"{rows[0].times_as_fast_as(row):.3f}",
        ]
        for row in rows
    ]
    return "\n\n".join([tables.title(workload), tables.markdown([head, *lines])])


def _check(flag, known):
    for value in FLAGS[flag].value:
        if value not in known:
            raise ValueError(f"--{flag}: no {value!r}; take some of {', '.join(known)}")


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
        of = f"repetition {number + 1} of {FLAGS.repetitions}"
        print(f"{workload.model}: {of}", file=sys.stderr)

    return say


def _save(text, versions):
    about = {
        "libraries": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "cores used": FLAGS.cores,
        "repetitions": FLAGS.repetitions,
    }
    title = "Telemetry compared"
    path = tables.save(text, pathlib.Path(FLAGS.results_dir), measuring.ROOT, about, title)
    print("saved", path)


if __name__ == "__main__":
    program.run(main)
