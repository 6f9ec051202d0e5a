"""Times kdist's `fit` beside its rivals: same model, data, precision and cores, in one session.

  # LeNet and MLP, some minutes; from the repository's root
  python -m benchmarks.compare_training

  # ResNet-18 as well, in both precisions, with PyTorch from another environment; kept in results/
  python -m benchmarks.compare_training --models=lenet,mlp,resnet18 \\
    --precisions=float32,bfloat16 --torch_python=/tmp/torchvenv/bin/python --save

  # where the time of one variant goes, by type of operation
  python -m benchmarks.compare_training --profile=kdist_grouped --models=lenet

Every variant runs in processes of its own, in turn, so that a slow phase of the machine hits all of
them. Each trains twice, and the second time counts. Ratios above 1 mean that kdist is faster; they
are taken within a repetition, and their median is shown. The variants:

  kdist, kdist_grouped   kdist's fit with 1 and with 20 steps a call (steps_per_execution)
  keras                  plain Keras's fit
  tf_guide               a training loop in TensorFlow, as guides write it
  tf_loop, tf_loop_grouped   the fastest such loop known, with 1 and with 20 steps a call
  torch, torch_channels_last, torch_compiled   PyTorch's DDP over Gloo, a process a replica
"""

import dataclasses
import pathlib
import sys

from absl import flags

from benchmarks import measuring, tables
from benchmarks.rivals.workload import Workload
from kdist import program

FLAGS = flags.FLAGS

# Examples that a replica takes in a step, and steps that take some seconds on two cores.
SIZES = {"lenet": (16, 400), "mlp": (16, 1000), "resnet18": (128, 3)}
# Under the profiler fewer will do, and its memory holds only so many events.
PROFILED = {"lenet": 100, "mlp": 100, "resnet18": 3}
# Compiling takes PyTorch a minute or so, and a C++ compiler.
DEFAULT_VARIANTS = [name for name in measuring.VARIANTS if name != "torch_compiled"]

# What is trained.
flags.DEFINE_list("models", ["lenet", "mlp"], f"Of {', '.join(SIZES)}; resnet18 takes minutes.")
flags.DEFINE_list("precisions", ["float32"], "float32, bfloat16 (mixed precision), or both.")
flags.DEFINE_integer(
    "local_batch_size",
    None,
    "Examples a replica takes in a step; by default 16, and 128 for resnet18.",
    lower_bound=1,
)

# How it is timed.
flags.DEFINE_list("variants", DEFAULT_VARIANTS, f"Of {', '.join(measuring.VARIANTS)}.")
flags.DEFINE_integer("repetitions", 3, "Processes for each variant.", lower_bound=1)
flags.DEFINE_integer(
    "steps",
    None,
    "Steps that are timed, after as many to warm up; by default as many as take some seconds.",
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
flags.DEFINE_float("timeout", 600, "Seconds after which a process is given up.", lower_bound=1)

# What comes out.
flags.DEFINE_boolean("save", False, "Write the tables to --results_dir, with commit and machine.")
flags.DEFINE_string(
    "results_dir", str(pathlib.Path(__file__).parent / "results"), "Where --save writes to."
)
flags.DEFINE_enum(
    "profile",
    None,
    [name for name, variant in measuring.VARIANTS.items() if not variant.needs_torch],
    "Compare nothing: print the operations that this variant spends its time with.",
)


def main(_):
    _check("models", SIZES)
    _check("precisions", ("float32", "bfloat16"))
    _check("variants", measuring.VARIANTS)
    workloads = [
        _workload(model, precision) for model in FLAGS.models for precision in FLAGS.precisions
    ]
    if FLAGS.profile:
        _profile(measuring.VARIANTS[FLAGS.profile], workloads)
    else:
        _compare({name: measuring.VARIANTS[name] for name in FLAGS.variants}, workloads)


def _check(flag, known):
    for value in FLAGS[flag].value:
        if value not in known:
            raise ValueError(f"--{flag}: no {value!r}; take some of {', '.join(known)}")


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
    """Without those on PyTorch, where there is none."""
    if python.torch:
        return variants
    possible = {name: variant for name, variant in variants.items() if not variant.needs_torch}
    if len(possible) < len(variants):
        print("PyTorch is left out: name a Python that has it (--torch_python=…)\n")
    if not possible:
        raise ValueError("nothing is left to be timed; add --variants=kdist,keras")
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
        print(f"{tables.title(workload)}: {variant.name}, {steps} a call\n")
        print(f"{tables.operations(answer, profiled)}\n")


if __name__ == "__main__":
    program.run(main)
