"""Modes in which programs run, and the process that runs them one after the other.

    python -m tests.programs.modes MODE DIRECTORY [PROGRAM …]

runs programs (all by default) in one process, and writes a file for each to DIRECTORY.
"""

import contextlib
import dataclasses
import os
import pathlib
import pickle
import sys
import tempfile
import time
import traceback

SEED = 3


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to run programs.

    Args:
        title: heading of its column in the table.
        strategy: name of a strategy of kdist; `keras` is Keras's MirroredStrategy; None is none.
        devices: number of devices.
        options: arguments that are added to each `compile`.
        tasks: tasks of its job; empty for one process.
        shard: what the replicas divide, as `kdist.Layout(shard=…)`.
    """

    title: str
    strategy: str | None
    devices: int
    options: dict = dataclasses.field(default_factory=dict)
    tasks: dict = dataclasses.field(default_factory=dict)
    shard: str | None = None

    @property
    def is_plain(self):
        """True if the programs run on Keras alone."""
        return self.strategy in (None, "keras")


MODES = {
    "plain": Mode("Keras, one device", None, 1),
    "keras": Mode("Keras, MirroredStrategy × 2", "keras", 2),
    "two": Mode("kdist × 2", "mirrored", 2),
    "four": Mode("kdist × 4", "mirrored", 4),
    "groups": Mode("steps_per_execution=3", "mirrored", 2, {"steps_per_execution": 3}),
    "accumulate": Mode("accumulate=2", "mirrored", 2, {"accumulate": 2}),
    "workers": Mode("multi_worker × 2", "multi_worker", 1, tasks={"worker": 2}),
    "servers": Mode(
        "parameter_server × 2", "parameter_server", 1, {"max_staleness": 0},
        {"chief": 1, "worker": 2, "ps": 1},
    ),
    "optimizer": Mode("shard=optimizer", "mirrored", 2, shard="optimizer"),
    "weights": Mode("shard=weights", "mirrored", 2, shard="weights"),
    "weights_workers": Mode(
        "shard=weights, multi_worker × 2", "multi_worker", 1, tasks={"worker": 2}, shard="weights"
    ),
}  # fmt: skip


def create_strategy(mode):
    """Returns the strategy of a mode, or None; patches Keras for modes of kdist."""
    import tensorflow as tf

    if mode.is_plain:
        cpu = tf.config.list_physical_devices("CPU")[0]
        devices = [tf.config.LogicalDeviceConfiguration()] * mode.devices
        tf.config.set_logical_device_configuration(cpu, devices)
        if mode.strategy is None:
            return None
        return tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(mode.devices)])
    import kdist

    kdist.patch_keras()  # The one line.
    timeouts = {"cluster_timeout_seconds": 60} if mode.tasks else {}
    name, devices = mode.strategy, mode.devices
    if mode.shard:
        # The models are small. All but their smallest weights are divided.
        replicas = devices * mode.tasks.get("worker", 1)
        layout = kdist.Layout(data=replicas, shard=mode.shard, min_shard_bytes=64)
        name, devices = layout, None
    strategy = kdist.create_strategy(name, devices, **timeouts)
    _add_to_compile(mode.options)
    return strategy


def _add_to_compile(options):
    """Adds options to each call of `compile`, as a user would who edits the program."""
    import keras

    if options:
        trainer = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
        plain = trainer.compile
        trainer.compile = lambda self, *args, **kwargs: plain(self, *args, **{**options, **kwargs})


def run(program, strategy, shared=None):
    """Runs a program in a strategy's scope, in a directory of its own.

    Args:
        program: a `Program`.
        strategy: a strategy, or None.
        shared: directory that all tasks of a job see, as programs need that read what they have
            written; None for a new one.

    Returns:
        What `outcome` returned, or the text of an error.
    """
    import keras

    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    with contextlib.ExitStack() as stack:
        if shared is None:
            shared = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.chdir(shared))
        try:
            with strategy.scope() if strategy else contextlib.nullcontext():
                return program.main()
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"


def serve(mode, results, names):
    """Runs programs as their names arrive; writes each result to a file in `results`.

    Args:
        mode: a key of `MODES`.
        results: a directory.
        names: names of programs, or one `@PATH` of a file or pipe that has a name per line.
    """
    from tests.programs.program import programs

    strategy = create_strategy(MODES[mode])
    known = programs()
    is_job, is_followed = bool(MODES[mode].tasks), names[0].startswith("@")
    if is_followed:
        names = _lines(names[0][1:])
    for name in names:
        print(f"--- {name}", file=sys.stderr, flush=True)
        start = time.monotonic()
        shared = pathlib.Path(results).with_name(f"{mode}-files") / name if is_job else None
        if shared:
            shared.mkdir(parents=True, exist_ok=True)
        found = run(known[name], strategy, shared)
        if _writes(strategy):
            write(pathlib.Path(results, name), (found, time.monotonic() - start))
        if is_job and isinstance(found, str) and not is_followed:
            break  # an error leaves the tasks of a job out of step; the next one needs a new job


def _lines(path):
    """Yields the lines of a file as they are written."""
    with open(path) as file:
        yield from map(str.strip, file)


def _writes(strategy):
    """Returns True in the task whose results count."""
    if "TF_CONFIG" not in os.environ:
        return True
    from kdist.strategies import is_chief

    return is_chief(strategy)


def write(path, value):
    """Writes a value at once, so that a reader sees all of it or no file."""
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.replace(path)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tests.programs.program import programs as _programs

    serve(sys.argv[1], sys.argv[2], sys.argv[3:] or list(_programs()))
