"""What every rival is given, and what it answers. Needs NumPy alone, so that PyTorch's venv can."""

import dataclasses
import json
import math
import os
import sys

import numpy as np

IMAGE_SHAPE, CLASSES, LEARNING_RATE = (28, 28, 1), 10, 0.01

# So many batches are in memory and come again and again: reading data is not what is compared.
BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Workload:
    """One training run to be timed.

    Attributes:
        model: "mlp", "lenet" or "resnet18", as in `kdist.models`.
        precision: "float32", or "bfloat16" for Keras's mixed_bfloat16 and PyTorch's autocast.
        local_batch_size: examples that a replica takes in a step.
        replicas: how many there are.
        cores: CPU cores that all replicas together may use.
        steps: steps that are timed; as many are run before them.
        steps_per_call: steps in one call from Python, for rivals that can do so.
        threads_per_operation: TensorFlow's threads for one operation, where the rival sets them;
            0 leaves it to TensorFlow.
        distributed_data: whether TensorFlow's loop takes a distributed data set, as in guides.
        channels_last: whether PyTorch keeps the channels of images last.
        compiled: whether PyTorch compiles the model.
        profile: whether to answer with the operations and their times as well.
        telemetry: where measurements go; see `kdist_telemetry`.
        turns: how often it is timed; if more than once, each time after a line on standard input.
    """

    model: str
    precision: str
    local_batch_size: int
    replicas: int
    cores: int
    steps: int
    steps_per_call: int = 1
    threads_per_operation: int = 0
    distributed_data: bool = False
    channels_last: bool = False
    compiled: bool = False
    profile: bool = False
    telemetry: str = "off"
    turns: int = 1

    def arrays(self, replica: int | None = None):
        """Batches of images, uint8 (N, B, 28, 28, 1), and labels, int32 (N, B).

        Args:
            replica: gives only what this replica has of each batch; None gives all.
        """
        rng = np.random.default_rng(0)
        shape = (BATCHES, self.local_batch_size * self.replicas)
        images = rng.integers(0, 256, (*shape, *IMAGE_SHAPE)).astype("uint8")
        labels = rng.integers(0, CLASSES, shape).astype("int32")
        if replica is None:
            return images, labels
        rows = slice(replica * self.local_batch_size, (replica + 1) * self.local_batch_size)
        return images[:, rows], labels[:, rows]

    def calls(self) -> list[int]:
        """Steps of each call: `steps_per_call`, and what is left in the last one."""
        full, rest = divmod(self.steps, self.steps_per_call)
        return [self.steps_per_call] * full + [rest] * bool(rest)


def read() -> Workload:
    """The workload on the command line; the process keeps to its cores from then on.

    To be called before TensorFlow or PyTorch is imported: they count the cores when they start.
    """
    workload = Workload(**json.loads(sys.argv[1]))
    allowed = sorted(os.sched_getaffinity(0))
    if workload.cores > len(allowed):
        raise ValueError(f"--cores={workload.cores}, but only {len(allowed)} are to be had")
    os.sched_setaffinity(0, allowed[: workload.cores])
    return workload


def report(workload: Workload, seconds: float, loss: float, versions: dict, **more):
    """Prints the answer.

    Args:
        workload: what was trained.
        seconds: what all timed steps took.
        loss: their mean; a rival whose loss is not finite has not trained.
        versions: names and versions of its libraries.
        more: what else there is to say.

    Raises:
        ArithmeticError: the loss is not finite.
    """
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}: this is no training that could be compared")
    milliseconds = seconds / workload.steps * 1000
    print(
        json.dumps({"ms_per_step": milliseconds, "loss": loss, "versions": versions, **more}),
        flush=True,
    )
