"""Input and output of every rival that runs on several tasks. Needs only NumPy.

The tasks of a job run the same script with the same argument, and TF_CONFIG identifies each of
them. All of them train LeNet with SGD and momentum. The answer of the deciding task counts.
"""

import dataclasses
import json
import math
import sys
import time

import numpy as np

IMAGE_SHAPE, CLASSES, MOMENTUM = (28, 28, 1), 10, 0.9

# Kept in memory and repeated: the comparison excludes reading data.
RANDOM_EXAMPLES = 10240

# The deciding task prints this line when its timed epochs begin.
WARM = "warm"


@dataclasses.dataclass(frozen=True)
class ClusterWorkload:
    """One training run to be timed, after a warm-up epoch.

    Attributes:
        strategy: "one_device", "mirrored", "multi_worker", or "parameter_server".
        local_batch_size: examples per replica and step.
        steps: steps per epoch; under parameter_server, those of all workers together. None covers
            all examples.
        epochs: timed epochs.
        steps_per_call: steps in one call from Python (steps_per_execution).
        devices: devices per task; None leaves it to the strategy.
        local_steps: local SGD steps between two averages; None for synchronous training.
        dataset: a name for `kdist.data.load`, or "random".
        learning_rate: the peak rate; on a real dataset it decays as a cosine.
        seed: seed of the weights and the order of examples.
    """

    strategy: str
    local_batch_size: int
    steps: int | None
    epochs: int = 1
    steps_per_call: int = 1
    devices: int | None = None
    local_steps: int | None = None
    dataset: str = "random"
    learning_rate: float = 0.01
    seed: int = 0

    def arrays(self):
        """Returns random images, uint8 (N, 28, 28, 1), and labels, int32 (N,)."""
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (RANDOM_EXAMPLES, *IMAGE_SHAPE)).astype("uint8")
        return images, rng.integers(0, CLASSES, RANDOM_EXAMPLES).astype("int32")


def read() -> ClusterWorkload:
    """Returns the workload on the command line."""
    return ClusterWorkload(**json.loads(sys.argv[1]))


class Timer:
    """Measures epochs after the first, from their start until their loss is known.

    Attributes:
        seconds: total time.
        epochs: number of epochs.
        loss: loss of the last epoch.
    """

    def __init__(self):
        self.seconds, self.epochs, self.loss = 0.0, 0, math.nan

    def begin(self, epoch, logs=None):
        """Handles `on_epoch_begin`."""
        self._began = time.perf_counter()

    def end(self, epoch, logs):
        """Handles `on_epoch_end`."""
        self.loss = float(logs["loss"])  # waits for all steps
        if epoch == 0:
            print(WARM, flush=True)
        else:
            self.seconds += time.perf_counter() - self._began
            self.epochs += 1


def report(timer: Timer, steps: int, examples_per_step: int, versions: dict, **more):
    """Prints the answer.

    Args:
        timer: the timer of the epochs.
        steps: steps per epoch.
        examples_per_step: examples of all replicas per step.
        versions: names and versions of the libraries.
        more: additional entries of the answer.

    Raises:
        ArithmeticError: the loss is not finite.
    """
    if not math.isfinite(timer.loss):
        raise ArithmeticError(f"the loss is {timer.loss}: not comparable")
    seconds = timer.seconds / (steps * timer.epochs)
    answer = {
        "ms_per_step": seconds * 1000,
        "examples_per_second": examples_per_step / seconds,
        "loss": timer.loss,
        "versions": versions,
        **more,
    }
    print(json.dumps(answer), flush=True)
