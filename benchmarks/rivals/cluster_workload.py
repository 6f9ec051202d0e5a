"""What every rival on several tasks is given, and what it answers. Needs NumPy alone.

The tasks of a job run the same script with the same argument, and TF_CONFIG says which one each is.
All of them train LeNet by SGD with momentum. What the deciding task answers counts.
"""

import dataclasses
import json
import math
import sys
import time

import numpy as np

IMAGE_SHAPE, CLASSES, MOMENTUM = (28, 28, 1), 10, 0.9

# In memory, again and again: reading data is not what is compared.
RANDOM_EXAMPLES = 10240

# The deciding task writes it on a line of its own when its timed epochs begin.
WARM = "warm"


@dataclasses.dataclass(frozen=True)
class ClusterWorkload:
    """One training run to be timed, after an epoch to warm up.

    Attributes:
        strategy: "one_device", "mirrored", "multi_worker" or "parameter_server".
        local_batch_size: examples that a replica takes in a step.
        steps: an epoch has; under parameter_server, those of all workers together. None is as many
            as see all examples.
        epochs: that are timed.
        steps_per_call: steps in one call from Python (steps_per_execution).
        devices: of each task; None leaves it to the strategy.
        local_steps: of local SGD, after which replicas meet; None for synchronous training.
        dataset: a name for `kdist.data.load`, or "random".
        learning_rate: the highest; on a real data set it falls as a cosine.
        seed: of weights and the order of examples.
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
        """Random images, uint8 (N, 28, 28, 1), and labels, int32 (N,)."""
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (RANDOM_EXAMPLES, *IMAGE_SHAPE)).astype("uint8")
        return images, rng.integers(0, CLASSES, RANDOM_EXAMPLES).astype("int32")


def read() -> ClusterWorkload:
    """The workload on the command line."""
    return ClusterWorkload(**json.loads(sys.argv[1]))


class Timer:
    """Measures epochs but the first, from their begin until their loss is known.

    Attributes:
        seconds: of all of them.
        epochs: how many there were.
        loss: the last one's.
    """

    def __init__(self):
        self.seconds, self.epochs, self.loss = 0.0, 0, math.nan

    def begin(self, epoch, logs=None):
        """For `on_epoch_begin`."""
        self._began = time.perf_counter()

    def end(self, epoch, logs):
        """For `on_epoch_end`."""
        self.loss = float(logs["loss"])  # waits for all steps
        if epoch == 0:
            print(WARM, flush=True)
        else:
            self.seconds += time.perf_counter() - self._began
            self.epochs += 1


def report(timer: Timer, steps: int, examples_per_step: int, versions: dict, **more):
    """Prints the answer.

    Args:
        timer: that has timed the epochs.
        steps: of an epoch.
        examples_per_step: that all replicas took in a step.
        versions: names and versions of the libraries.
        more: what else there is to say.

    Raises:
        ArithmeticError: the loss is not finite.
    """
    if not math.isfinite(timer.loss):
        raise ArithmeticError(f"the loss is {timer.loss}: no training that could be compared")
    seconds = timer.seconds / (steps * timer.epochs)
    answer = {
        "ms_per_step": seconds * 1000,
        "examples_per_second": examples_per_step / seconds,
        "loss": timer.loss,
        "versions": versions,
        **more,
    }
    print(json.dumps(answer), flush=True)
