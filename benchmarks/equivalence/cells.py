"""Measures the cells of the table, each in a process of its own.

A failed collective breaks all later ones of its process, two mirrored strategies of different size
do not work in one process, and a training that hangs must be killed. A new process would spend most
of its time importing TensorFlow. So one process imports it, and all others are forked from that
process before TensorFlow has started.

    with Cells(timeout_seconds=120) as cells:
        for description in cells.features():
            row = cells.row(description.name, COLUMNS)       # {Column: Verdict}

This module imports neither TensorFlow nor Keras; the processes do.
"""

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import pickle
import tempfile
import threading

from benchmarks.equivalence.verdict import Verdict, error
from kdist.cluster import Cluster
from kdist.launch.local_engine import loopback_addresses, reserve_ports


@dataclasses.dataclass(frozen=True)
class Column:
    """A library, a number of replicas, and a layout: one column of the table.

    Attributes:
        library: `Keras` or `kdist`, the library of the model class.
        replicas: the number of replicas. 0 trains on one device without a strategy, and 1 under
            `one_device`.
        layout: `mirrored`; `multi_worker`, one process per replica; `parameter_server`, one worker
            per replica, a chief, and a parameter server, one step after the other; `local_sgd`,
            replicas of one process with two local steps per round, each on all rows, so that each
            must do what one device does.
    """

    library: str
    replicas: int
    layout: str = "mirrored"

    @property
    def title(self) -> str:
        several = "" if self.layout == "mirrored" else f" {self.layout}"
        return f"{self.library}{several} × {max(1, self.replicas)}"

    @property
    def tasks(self) -> dict[str, int]:
        """Number of processes by role. The result is that of the first process."""
        return {
            "mirrored": {"worker": 1},
            "local_sgd": {"worker": 1},
            "multi_worker": {"worker": self.replicas},
            "parameter_server": {"chief": 1, "worker": self.replicas, "ps": 1},
        }[self.layout]


REFERENCE = Column("Keras", 0)
COLUMNS = (
    Column("Keras", 2),
    Column("Keras", 4),
    Column("kdist", 1),
    Column("kdist", 2),
    Column("kdist", 4),
    Column("kdist", 2, "multi_worker"),
    Column("kdist", 2, "parameter_server"),
    Column("kdist", 2, "local_sgd"),
)


# Features that are not compared in a layout.
_NOT_ASKED = {
    # Each replica trains on all rows, so its sum is that of all rows.
    ("local_sgd", "loss reduction sum"),
    ("local_sgd", "loss reduction sum, uneven batch"),
    # kdist rejects it: replicas would have to communicate in every step.
    ("local_sgd", "synchronised BatchNorm"),
    ("local_sgd", "synchronised BatchNorm, uneven batch"),
    # The test reads masks from the weights, which are the mean of two replicas with other masks.
    ("local_sgd", "dropout"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Devices and precision of all trainings of a table.

    Attributes:
        device: "CPU" or "GPU". Replicas are logical devices of the first one.
        floatx: Keras's default type. float32 on a GPU is computed without TF32.
    """

    device: str = "CPU"
    floatx: str = "float32"


# Largest difference in float64, where a wrong layout cannot hide behind rounding. Features in 16
# bits keep their own.
_FLOAT64_TOLERANCE = 1e-9

# Memory of each logical GPU. A CUDA context takes half a gigabyte more.
_LOGICAL_GPU_MEGABYTES = 1024


@dataclasses.dataclass(frozen=True)
class Description:
    """Name and text of a feature in the table."""

    name: str
    text: str
    in_keras: bool


class Cells:
    """The process from which all others are forked, and a directory for their files.

    Args:
        timeout_seconds: limit of one process. It is then killed, and its cell is an error.
        setting: devices and precision. Defaults to logical CPU devices and float32.
    """

    def __init__(self, timeout_seconds: float, setting: Setting | None = None):
        self._timeout_seconds = timeout_seconds
        self._setting = setting or Setting()
        self._number = 0
        self._ended, self._running = False, set()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["benchmarks.equivalence.tied", "benchmarks.equivalence.features"]
        )
        # Processes find this package also where the checkout is not the working directory.
        root = str(pathlib.Path(__file__).parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        if self._setting.device == "CPU":  # Also on machines with GPUs.
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    def __enter__(self):
        self._directory = tempfile.TemporaryDirectory(prefix="kdist-compare-")
        self._start()
        return self

    def __exit__(self, *_):
        self._directory.cleanup()

    def _start(self):
        """Starts the process that all others are forked from. Its log goes to a file."""
        terminal = os.dup(2)
        with open(pathlib.Path(self._directory.name) / "start.log", "w") as file:
            os.dup2(file.fileno(), 2)
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)

    def end(self):
        """Kills all trainings, and lets no further one begin."""
        self._ended = True
        for process in list(self._running):
            process.kill()

    def features(self) -> list[Description]:
        """Returns all features, in the order of the table."""
        answer = self._in_a_process("features", _describe, ())
        if isinstance(answer, Verdict):
            raise RuntimeError(f"the features cannot be loaded: {answer.says}")
        return answer

    def row(self, feature: Description, columns=COLUMNS) -> dict[Column, Verdict]:
        """Trains the reference and every column; returns a verdict for each."""
        reference = pathlib.Path(self._directory.name) / f"{_file_name(feature.name)}.pickle"
        failed = self._in_a_process(
            feature.name, _train_reference, (feature.name, reference, self._setting)
        )
        if failed:
            return {
                column: Verdict("error", says=f"reference: {failed.says}") for column in columns
            }
        row = {}
        for column in columns:
            is_asked = (column.layout, feature.name) not in _NOT_ASKED
            if not is_asked or (column.library == "Keras" and not feature.in_keras):
                row[column] = Verdict("not there")
            else:
                row[column] = self._cell(feature.name, column, reference)
        reference.unlink()
        return row

    def _cell(self, name, column, reference):
        """Returns the verdict of the first task."""
        number = sum(column.tasks.values())
        with reserve_ports(number) as ports, contextlib.ExitStack() as others:
            everyone = _tasks(column, ports)
            for cluster in everyone[1:]:
                others.enter_context(
                    self._process(
                        name, _train_cell, (name, column, reference, self._setting, cluster)
                    )
                )
            first = (name, column, reference, self._setting, everyone[0])
            return self._in_a_process(name, _train_cell, first)

    def _in_a_process(self, name, function, arguments):
        """Returns the result of `function`, or a verdict if it fails or takes too long."""
        with self._process(name, function, arguments) as (process, receiver, log):
            try:
                if not receiver.poll(self._timeout_seconds):
                    return Verdict("error", says=f"no answer within {self._timeout_seconds:g} s")
                return receiver.recv()
            except EOFError:
                process.join()
                return Verdict("error", says=f"process ended with {process.exitcode}: {_tail(log)}")

    @contextlib.contextmanager
    def _process(self, name, function, arguments):
        """Yields a process that calls `function`, a pipe with its result, and its log file."""
        self._number += 1
        log = pathlib.Path(self._directory.name) / f"{_file_name(name)}-{self._number}.log"
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_answer, args=(sender, log, function, arguments), daemon=True
        )
        process.start()
        self._running.add(process)
        sender.close()
        try:
            if self._ended:
                raise InterruptedError("the comparison has ended")
            yield process, receiver, log
        finally:
            self._running.discard(process)
            process.kill()
            process.join()
            receiver.close()


def _tasks(column, ports):
    """Returns the cluster of each task of a column. The result is that of the first."""
    tasks = loopback_addresses(column.tasks, ports)
    return Cluster(tasks, next(iter(tasks)), 0).all_tasks()


def _file_name(name):
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _tail(log):
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "no output"


# Functions of the processes.


def _answer(sender, log, function, arguments):
    """Calls `function` with its output redirected to `log`, and sends the result."""
    threading.Thread(target=_end_with_program, daemon=True).start()
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        sender.send(function(*arguments))
    except Exception as exception:
        sender.send(error(exception))


def _end_with_program():
    """Ends this process when the program does, which has no time for that after some signals."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _describe():
    from benchmarks.equivalence.features import FEATURES

    return [Description(name, f.description, f.in_keras) for name, f in FEATURES.items()]


def _train_reference(name, file, setting):
    """Writes the outcome of plain Keras on one device, without a strategy, to `file`."""
    file.write_bytes(pickle.dumps(_train(name, REFERENCE, setting)))


def _train_cell(name, column, reference_file, setting, cluster):
    from benchmarks.equivalence.feature import Feature
    from benchmarks.equivalence.features import FEATURES

    reference = pickle.loads(reference_file.read_bytes())
    feature = FEATURES[name]
    if setting.floatx == "float64" and feature.tolerance == Feature.tolerance:
        feature = dataclasses.replace(feature, tolerance=_FLOAT64_TOLERANCE)
    return feature.judge(_train(name, column, setting, cluster), reference)


def _train(name, column, setting, cluster=None):
    import keras

    import kdist
    from benchmarks.equivalence import trial
    from benchmarks.equivalence.features import FEATURES

    keras.config.set_floatx(setting.floatx)
    model_class = keras.Model if column.library == "Keras" else kdist.Model
    return trial.run(FEATURES[name], model_class, _strategy(column, setting, cluster))


def _strategy(column, setting, cluster):
    """For Keras the strategy as TensorFlow makes it, for kdist as kdist does."""
    import tensorflow as tf

    import kdist
    from benchmarks.equivalence import defaults
    from kdist.devices import find_devices

    if column.layout == "local_sgd":
        defaults.train_locally()
    if column.layout == "parameter_server":
        defaults.train_one_after_the_other()
    if column.layout in ("multi_worker", "parameter_server"):
        return kdist.create_strategy(column.layout, cluster=cluster)
    number = max(1, column.replicas)
    if setting.device == "GPU":
        tf.config.experimental.enable_tensor_float_32_execution(False)
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("GPU")[0],
            [tf.config.LogicalDeviceConfiguration(_LOGICAL_GPU_MEGABYTES)] * number,
        )
    devices = find_devices([f"{setting.device}:{index}" for index in range(number)])
    if column.replicas == 0:
        return None
    if column.library == "Keras":
        return tf.distribute.MirroredStrategy(devices)
    return kdist.create_strategy("one_device" if len(devices) == 1 else "mirrored", devices)
