"""Times training on several processes next to its rivals: same model, data, and cores, one session.

  # all parts, about half an hour; from the repository's root, as root for the slow link
  python -m benchmarks.compare_clusters

  # two of them, kept in results/
  python -m benchmarks.compare_clusters --only=multi_worker,parameter_server --save

Every trial runs in processes of its own. Trials alternate, so that a slow phase of the machine
affects all of them. The first epoch does not count. Ratios are computed within a repetition. The
table shows their median, minimum, and maximum, and the target. The parts, all with LeNet:

  multi_worker       two processes on loopback, and MirroredStrategy on two devices of one
  parameter_server   kdist and Keras 2 (tf-keras, pip install '.[bench]'), two workers
  slowed             one of two workers four times as slow: parameter_server and multi_worker
  network            a link of 100 Mbit/s between two hosts: synchronous training and local SGD;
                     needs root and iproute2 for network namespaces, and Fashion-MNIST

In each task an operation runs on one thread (TF_NUM_INTRAOP_THREADS=1), for rivals and for kdist.
"""

import contextlib
import importlib.util
import os
import pathlib
import signal
import sys

from absl import flags

from benchmarks import measuring, tables
from benchmarks.clusters import jobs, network
from benchmarks.clusters import tables as cluster_tables
from benchmarks.clusters.parts import LOCAL_STEPS, PARTS, RATE_MBIT, Sizes
from kdist import program

FLAGS = flags.FLAGS

# What is compared.
flags.DEFINE_list("only", list(PARTS), f"Parts, of {', '.join(PARTS)}.")
flags.DEFINE_list(
    "steps_per_call", ["1", "16"], "For multi_worker and parameter_server: steps_per_execution."
)
flags.DEFINE_integer(
    "local_steps", LOCAL_STEPS, "For network: steps of local SGD; 0 omits it.", lower_bound=0
)
flags.DEFINE_integer(
    "rate_mbit", RATE_MBIT, "For network: rate of the link in Mbit/s.", lower_bound=1
)
flags.DEFINE_integer("epochs", 3, "For network: epochs of training, at least 2.", lower_bound=2)

# How it is timed.
flags.DEFINE_integer("repeats", 3, "Runs of each trial.", lower_bound=1)
flags.DEFINE_integer(
    "steps", None, "Steps per epoch; by default a few seconds of training.", lower_bound=1
)
flags.DEFINE_integer("cores", 2, "CPU cores that all tasks of a job share.", lower_bound=1)
flags.DEFINE_float("timeout", 600, "Seconds after which a trial fails.", lower_bound=1)

# Results.
flags.DEFINE_boolean("save", False, "Write the tables to --results_dir, with commit and machine.")
flags.DEFINE_string(
    "results_dir", str(pathlib.Path(__file__).parent / "results"), "Directory for --save."
)


def main(_):
    sizes = Sizes(FLAGS.steps, _steps_per_call(), FLAGS.epochs, FLAGS.local_steps, FLAGS.rate_mbit)
    _check_parts()
    _take_cores()
    # SIGTERM between two jobs raises, too, so that network namespaces are removed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    texts, versions = [], {}
    for name in FLAGS.only:
        part = PARTS[name](sizes)
        answers = _measure(name, part)
        texts.append(cluster_tables.text(part, answers))
        for found in answers.values():
            versions.update(found[-1]["versions"])
        print(f"{texts[-1]}\n", flush=True)
    print(_threads())
    if FLAGS.save:
        _save("\n\n".join(texts), versions)


def _check_parts():
    """Raises an error for parts that cannot run, before anything is measured."""
    program.check_items("only", PARTS)
    if "parameter_server" in FLAGS.only and not importlib.util.find_spec("tf_keras"):
        raise ImportError(
            "the rival of parameter_server is tf-keras, which is not installed: "
            "pip install '.[bench]', or leave the part out (--only=…)"
        )
    if "network" in FLAGS.only:
        network.check()


def _steps_per_call():
    wrong = [text for text in FLAGS.steps_per_call if not text.isdecimal() or int(text) < 1]
    if wrong or not FLAGS.steps_per_call:
        raise ValueError(
            f"--steps_per_call={','.join(FLAGS.steps_per_call)}: give numbers of at least 1"
        )
    return [int(text) for text in FLAGS.steps_per_call]


def _take_cores():
    """Restricts this process, and all processes that it starts, to some cores."""
    allowed = sorted(os.sched_getaffinity(0))
    if FLAGS.cores > len(allowed):
        raise ValueError(f"--cores={FLAGS.cores}, but only {len(allowed)} are available")
    os.sched_setaffinity(0, allowed[: FLAGS.cores])


def _measure(name, part):
    """Returns the answers of each trial, one per repetition, which starts with another trial."""
    names = list(part.trials)
    answers = {trial: [] for trial in names}
    link = network.two_hosts(FLAGS.rate_mbit) if part.on_hosts else contextlib.nullcontext(())
    with link as hosts:
        for number in range(FLAGS.repeats):
            first = number % len(names)
            for trial in names[first:] + names[:first]:
                what = f"{name}: repetition {number + 1} of {FLAGS.repeats}, {trial}"
                print(what, end=": ", file=sys.stderr, flush=True)
                answer = jobs.run(part.trials[trial], number, FLAGS.timeout, hosts)
                print(_in_short(answer), file=sys.stderr, flush=True)
                answers[trial].append(answer)
    return answers


def _in_short(answer):
    share = f", ran {answer['share']:.3f} of the time" if "share" in answer else ""
    return f"{answer['examples_per_second']:,.0f} examples/s{share}"


def _threads():
    set_by_us = ", ".join(f"{k}={v}" for k, v in jobs.ENVIRONMENT.items() if k.startswith("TF_"))
    return f"Every task of every rival had {set_by_us}; all shared {FLAGS.cores} cores."


def _save(text, versions):
    about = {
        "libraries": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "cores used": FLAGS.cores,
        "repetitions": FLAGS.repeats,
        "threads": _threads(),
    }
    path = tables.save(
        text, pathlib.Path(FLAGS.results_dir), measuring.ROOT, about, "Clusters compared"
    )
    print("saved", path)


if __name__ == "__main__":
    program.run(main)
