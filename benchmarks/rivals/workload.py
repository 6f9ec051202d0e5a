"""Input and output of every rival. Needs only NumPy, which the environment of PyTorch has."""

import dataclasses
import json
import math
import os
import sys

import numpy as np

IMAGE_SHAPE, CLASSES, LEARNING_RATE = (28, 28, 1), 10, 0.01

# Number of batches that are kept in memory and repeated; reading data is not compared.
BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Workload:
    """One training run to be timed.

    Attributes:
        model: "mlp", "lenet", or "resnet18", as in `kdist.models`.
        precision: "float32", or "bfloat16" for Keras's mixed_bfloat16 and PyTorch's autocast.
        local_batch_size: examples per replica and step.
        replicas: number of replicas.
        cores: CPU cores that all replicas share.
        steps: timed steps; as many warm-up steps run before them.
        steps_per_call: steps in one call from Python, for rivals that support it.
        threads_per_operation: TensorFlow's threads for one operation, for rivals that set them; 0
            leaves it to TensorFlow.
        distributed_data: whether TensorFlow's loop uses a distributed dataset, as in guides.
        channels_last: whether PyTorch keeps the channels of images last.
        compiled: whether PyTorch compiles the model.
        profile: whether the answer includes the operations and their times.
        telemetry: destination of measurements; see `kdist_telemetry`.
        turns: number of measurements; if more than one, each waits for a line on standard input.
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
        """Returns batches of images, uint8 (N, B, 28, 28, 1), and labels, int32 (N, B).

        Args:
            replica: returns only the rows of this replica; None returns all.
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
        """Returns the steps of each call: `steps_per_call`, and the remainder in the last one."""
        full, rest = divmod(self.steps, self.steps_per_call)
        return [self.steps_per_call] * full + [rest] * bool(rest)


def read() -> Workload:
    """Returns the workload on the command line, and restricts the process to its cores.

    Call it before TensorFlow or PyTorch is imported: they count the cores when they start.
    """
    workload = Workload(**json.loads(sys.argv[1]))
    allowed = sorted(os.sched_getaffinity(0))
    if workload.cores > len(allowed):
        raise ValueError(f"--cores={workload.cores}, but only {len(allowed)} are available")
    os.sched_setaffinity(0, allowed[: workload.cores])
    return workload


def report(workload: Workload, seconds: float, loss: float, versions: dict, **more):
    """Prints the answer.

    Args:
        workload: the trained workload.
        seconds: time of all timed steps.
        loss: mean loss of the steps; a rival whose loss is not finite has not trained.
        versions: names and versions of its libraries.
        more: additional entries of the answer.

    Raises:
        ArithmeticError: the loss is not finite.
    """
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}: this training is not comparable")
    milliseconds = seconds / workload.steps * 1000
    print(
        json.dumps({"ms_per_step": milliseconds, "loss": loss, "versions": versions, **more}),
        flush=True,
    )
