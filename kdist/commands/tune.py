"""Finds the batch size of a training on this machine: what fits, and what is nearly as fast.

  # all flags of kdist train describe the training; without GPUs, memory is that of the process
  kdist tune --model=resnet18 --dataset=fashion_mnist --num_devices=2

  # never more than 8 GB, and local batches up to 512
  kdist tune --model=my_code.py:build --dataset=my_code.py:load_data --memory_gb=8 --max_batch=512

Up to five local batches are tried, each for some seconds in a process of its own, so that a batch
that does not fit ends nothing else. It prints the largest local batch that fits, the smallest one
that has 90 % of the highest rate, and what to change for the learning rate. Nothing is saved.
A larger batch makes fewer updates per epoch, so compare the accuracy as well.
"""

import json
import math
import subprocess
import sys
import tempfile
import time

import psutil
from absl import flags

from kdist import program
from kdist.commands import train  # defines the flags of the training
from kdist.commands.training_run.next_steps import command
from kdist.serving.core.resources import default_memory_bytes
from kdist.tuning.batch import BatchSearch, BatchTrial

FLAGS = flags.FLAGS
_POLL_SECONDS = 0.05
_TRIAL_SECONDS = 600
# Flags of `kdist train` without a meaning for trials, or that need other processes.
_UNSUPPORTED = ("plan", "minutes", "run_dir", "export", "mirror", "resume", "data_workers")

with program.flag_group("Batch size"):
    flags.DEFINE_float(
        "memory_gb",
        None,
        "Memory that may be used, in GB: of each GPU, or of the whole training on CPUs. By default "
        "all of a GPU, and nine tenths of what is free on this machine.",
        lower_bound=0.1,
        upper_bound=1e6,
    )
    flags.DEFINE_integer(
        "max_batch", None, "Largest local batch to try; by default the training examples.", 1
    )


def main(_):
    _check_flags()
    gpu_bytes = _gpu_bytes()
    limit = 1e9 * FLAGS.memory_gb if FLAGS.memory_gb else gpu_bytes or _free_bytes()
    print(f"at most {limit / 1e9:.1f} GB {'per GPU' if gpu_bytes else 'in all'}", flush=True)
    search = BatchSearch(FLAGS.local_batch_size, limit, FLAGS.max_batch or sys.maxsize)
    replicas = 1
    while (local_batch := search.next_batch()) is not None:
        print(f"local batch {local_batch} …", end=" ", flush=True)
        trial, facts = _run_trial(local_batch, limit, bool(gpu_bytes))
        print(_trial_text(trial), flush=True)
        search.add(trial)
        if facts:
            replicas = facts["replicas"]
            most = facts["examples"] // (replicas * FLAGS.accumulate)
            search.max_batch = min(search.max_batch, most)
    if search.largest is None:
        last = search.trials[-1]
        raise ValueError(
            f"not even a local batch of {last.local_batch} fits: {last.reason}; use more devices, "
            "or divide the model by --layout"
        )
    _print_result(search, replicas * FLAGS.accumulate)


def _check_flags():
    for name in _UNSUPPORTED:
        if FLAGS[name].present:
            raise ValueError(f"--{name} has no meaning for kdist tune; leave it out")
    if FLAGS.strategy in ("multi_worker", "parameter_server", "tpu"):
        raise ValueError(
            f"--strategy={FLAGS.strategy}: kdist tune measures one machine; leave it out, and use "
            "the batch on each"
        )
    if FLAGS.backend != "tensorflow":
        raise ValueError(f"--backend={FLAGS.backend} is not supported by kdist tune")


def _gpu_bytes():
    """Returns the memory of the smallest GPU; None without GPUs."""
    from kdist.telemetry.devices.nvml import NvmlSampler

    sampler = NvmlSampler()
    totals = [record.get("memory_total_bytes") for record in sampler.sample()]
    sampler.close()
    return min((total for total in totals if total), default=None)


def _free_bytes():
    return min(default_memory_bytes(), 0.9 * psutil.virtual_memory().available)


def _run_trial(local_batch, limit, on_gpus):
    """Returns (trial, facts that the child process reported or None)."""
    module = "kdist.commands.training_run.trial"
    arguments = [*_given_flags("local_batch_size"), f"--local_batch_size={local_batch}"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=out, stderr=errors, text=True
        )
        try:
            peak, reason = _watch(child, math.inf if on_gpus else limit)
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        errors.seek(0)
        lines, error = out.read().splitlines(), errors.read()
    if not reason and child.returncode:
        if not _is_out_of_memory(child.returncode, error):
            last = (error.strip().splitlines() or ["it ended without a message"])[-1]
            raise RuntimeError(last.removeprefix("trial.py: "))
        reason = "out of memory"
    if reason:
        return BatchTrial(local_batch, False, memory_bytes=peak, reason=reason), None
    facts = json.loads(lines[-1])
    memory = facts["gpu_bytes"] or peak
    return BatchTrial(local_batch, True, facts["step_seconds"], memory), facts


def _given_flags(*except_for):
    """Returns the flags of `kdist train` on the command line, as arguments."""
    return [
        flag.serialize()
        for name, flag in program.own_flags(train.__name__).items()
        if flag.present and name not in except_for
    ]


def _watch(child, limit):
    """Waits for a child; returns (peak bytes, why it was ended or "").

    It is ended before it takes the memory of the machine, as the kernel might end another process.
    """
    process, peak, deadline = psutil.Process(child.pid), 0, time.monotonic() + _TRIAL_SECONDS
    while child.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss)
        except psutil.Error:  # it has just ended
            break
        if peak > limit:
            return peak, "more memory than allowed"
        if time.monotonic() > deadline:
            return peak, f"no {_TRIAL_SECONDS} seconds were enough for a few steps"
        time.sleep(_POLL_SECONDS)
    child.wait()
    return peak, ""


def _is_out_of_memory(code, error):
    texts = ("ResourceExhaustedError", "OOM when allocating", "out of memory", "Cannot allocate")
    return code == -9 or any(text in error for text in texts)


def _trial_text(trial):
    if not trial.fits:
        return trial.reason
    return f"{trial.step_seconds * 1e3:,.1f} ms per step, {trial.memory_bytes / 1e9:.2f} GB"


def _print_result(search, parts):
    """Prints the table and what follows; an update has `parts` local batches."""
    print(f"\n{'local':>8} {'global':>8} {'step':>12} {'examples/s':>12} {'memory':>10}")
    for trial in search.fitting:
        size, seconds = trial.local_batch * parts, trial.step_seconds
        memory = f"{trial.memory_bytes / 1e9:.2f} GB"
        print(
            f"{trial.local_batch:8,} {size:8,} {seconds * 1e3:9,.1f} ms {size / seconds:12,.0f} "
            f"{memory:>10}"
        )
    knee = search.knee()
    bound = "" if search.is_limited else ", and memory allows more"
    print(f"\nlargest that was tried and fits: a local batch of {search.largest:,}{bound}")
    print(f"nearly as fast as the fastest (90 %): from a local batch of {knee:,} on")
    before, after = FLAGS.base_batch_size, knee * parts
    if not FLAGS["base_batch_size"].present:
        before = FLAGS.local_batch_size * parts
    ratio = after / before
    print(
        f"learning rate: for a global batch of {after:,} instead of {before:,}, times {ratio:.3g} "
        f"with SGD, {math.sqrt(ratio):.3g} with Adam:"
    )
    changed = {
        "local_batch_size": knee,
        "scale_learning_rate": "sqrt" if FLAGS.optimizer == "adam" else "linear",
        "base_batch_size": before,
    }
    texts = [f"--{name}={value}" for name, value in changed.items()]
    print(f"  {command('train', *_given_flags(*changed), *texts)}")


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    program.run(main)
