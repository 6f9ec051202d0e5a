"""Times kdist's `fit` next to its rivals: same model, data, precision, and cores, in one session.

  # LeNet and MLP, some minutes; from the repository's root
  python -m benchmarks.compare_training

  # ResNet-18 as well, in both precisions, with PyTorch from another environment; kept in results/
  python -m benchmarks.compare_training --models=lenet,mlp,resnet18 \\
    --precisions=float32,bfloat16 --torch_python=/tmp/torchvenv/bin/python --save

  # where the time of one variant goes, by type of operation
  python -m benchmarks.compare_training --profile=kdist_grouped --models=lenet

Every variant runs in processes of its own. Variants alternate, so that a slow phase of the machine
affects all of them. Each trains twice, and the second time counts. Ratios above 1 mean that kdist
is faster. They are computed within a repetition, and the table shows their median. The variants:

  kdist, kdist_grouped   kdist's fit with 1 and with 20 steps per call (steps_per_execution)
  keras                  plain Keras's fit
  tf_guide               a training loop in TensorFlow, as guides write it
  tf_loop, tf_loop_grouped   the fastest such loop known, with 1 and with 20 steps per call
  torch, torch_channels_last, torch_compiled   PyTorch's DDP over Gloo, one process per replica
"""

import dataclasses
import pathlib
import sys

from absl import flags

from benchmarks import measuring, tables
from benchmarks.rivals.workload import Workload
from kdist import program

FLAGS = flags.FLAGS

# Examples per replica and step, and steps that take some seconds on two cores.
SIZES = {"lenet": (16, 400), "mlp": (16, 1000), "resnet18": (128, 3)}
# The profiler needs fewer steps, and its memory is limited.
PROFILED = {"lenet": 100, "mlp": 100, "resnet18": 3}
# PyTorch needs about a minute and a C++ compiler to compile the model.
DEFAULT_VARIANTS = [name for name in measuring.VARIANTS if name != "torch_compiled"]

# What is trained.
flags.DEFINE_list("models", ["lenet", "mlp"], f"Any of {', '.join(SIZES)}; resnet18 takes minutes.")
flags.DEFINE_list("precisions", ["float32"], "float32, bfloat16 (mixed precision), or both.")
flags.DEFINE_integer(
    "local_batch_size",
    None,
    "Examples per replica and step; by default 16, and 128 for resnet18.",
    lower_bound=1,
)

# How it is timed.
flags.DEFINE_list("variants", DEFAULT_VARIANTS, f"Of {', '.join(measuring.VARIANTS)}.")
flags.DEFINE_integer("repetitions", 3, "Processes for each variant.", lower_bound=1)
flags.DEFINE_integer(
    "steps",
    None,
    "Timed steps, after as many warm-up steps; by default a few seconds of training.",
    lower_bound=1,
)
flags.DEFINE_integer("num_devices", 2, "Replicas; GPUs are not used.", lower_bound=1)
flags.DEFINE_integer(
    "cores", 2, "CPU cores for all replicas together, the same for every rival.", lower_bound=1
)
flags.DEFINE_string(
    "torch_python",
    None,
    "A Python that can import torch, for example of another virtual environment; by default this "
    "one, if it can (pip install '.[bench]').",
)
flags.DEFINE_float("timeout", 600, "Seconds after which a process fails.", lower_bound=1)

# Results.
flags.DEFINE_boolean("save", False, "Write the tables to --results_dir, with commit and machine.")
flags.DEFINE_string(
    "results_dir", str(pathlib.Path(__file__).parent / "results"), "Directory for --save."
)
flags.DEFINE_enum(
    "profile",
    None,
    [name for name, variant in measuring.VARIANTS.items() if not variant.needs_torch],
    "Compares nothing; prints the operations that take most time in this variant.",
)


def main(_):
    program.check_items("models", SIZES)
    program.check_items("precisions", ("float32", "bfloat16"))
    program.check_items("variants", measuring.VARIANTS)
    workloads = [
        _workload(model, precision) for model in FLAGS.models for precision in FLAGS.precisions
    ]
    if FLAGS.profile:
        _profile(measuring.VARIANTS[FLAGS.profile], workloads)
    else:
        _compare({name: measuring.VARIANTS[name] for name in FLAGS.variants}, workloads)


def _workload(model, precision):
    local_batch_size, steps = SIZES[model]
    return Workload(
        model=model,
        precision=precision,
        local_batch_size=FLAGS.local_batch_size or local_batch_size,
        replicas=FLAGS.num_devices,
        cores=FLAGS.cores,
        steps=FLAGS.steps or steps,
    )


def _compare(variants, workloads):
    python = measuring.Python.find(FLAGS.torch_python, FLAGS.timeout)
    variants = _possible(variants, python)
    texts, versions = [], {}
    for workload in workloads:
        chosen = {
            name: variant
            for name, variant in variants.items()
            if variant.models is None or workload.model in variant.models
        }
        rows, found = measuring.measure(
            chosen, workload, FLAGS.repetitions, python, _progress(workload)
        )
        texts.append(tables.comparison(workload, rows))
        versions.update(found)
        print(f"{texts[-1]}\n", flush=True)
    if FLAGS.save:
        _save("\n\n".join(texts), versions)


def _possible(variants, python):
    """Returns the variants without those on PyTorch if PyTorch is not available."""
    if python.torch:
        return variants
    possible = {name: variant for name, variant in variants.items() if not variant.needs_torch}
    if len(possible) < len(variants):
        print("PyTorch is omitted: name a Python that can import it (--torch_python=…)\n")
    if not possible:
        raise ValueError("no variant can run; add --variants=kdist,keras")
    return possible


def _progress(workload):
    what = f"{workload.model}, {workload.precision}"
    total = FLAGS.repetitions
    return lambda number: print(f"{what}: repetition {number + 1} of {total}", file=sys.stderr)


def _save(text, versions):
    about = {
        "libraries": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "cores used": FLAGS.cores,
        "repetitions": FLAGS.repetitions,
    }
    print("saved", tables.save(text, pathlib.Path(FLAGS.results_dir), measuring.ROOT, about))


def _profile(variant, workloads):
    python = measuring.Python(None, FLAGS.timeout)
    for workload in workloads:
        profiled = dataclasses.replace(
            workload, steps=FLAGS.steps or PROFILED[workload.model], profile=True
        )
        answer = python.answer(variant, profiled)
        steps = variant.of(profiled).steps_per_call
        print(f"{tables.title(workload)}: {variant.name}, {steps} per call\n")
        print(f"{tables.operations(answer, profiled)}\n")


if __name__ == "__main__":
    program.run(main)
