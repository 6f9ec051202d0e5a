"""Times a few steps of a training in a process of its own, for `kdist tune`.

    python -m kdist.commands.training_run.trial --model=lenet --local_batch_size=128

It has the flags of `kdist train`. The last line of the output is a JSON object with the seconds of
a step, the number of replicas and training examples, and the memory of the GPU that used most, if
there are GPUs.
"""

import itertools
import json
import statistics
import time

from absl import flags

import kdist
from kdist import program
from kdist.commands import train  # noqa: F401  # defines the flags
from kdist.commands.training_run.backend_and_plan import choose_backend
from kdist.commands.training_run.flag_checks import check_flags
from kdist.commands.training_run.on_tensorflow import strategy_spec

FLAGS = flags.FLAGS
# The first steps trace the model, and fill the queue of the input.
_SKIPPED_STEPS, _MIN_STEPS, _SECONDS = 2, 5, 4.0


def main(_):
    choose_backend()
    spec = strategy_spec(None)
    check_flags(spec)
    import keras  # after the checks, which are to fail early

    from kdist.commands.training_run.compiled_model import compiled_model
    from kdist.commands.training_run.datasets import load_data

    class Stopwatch(keras.callbacks.Callback):
        """Ends the training after enough steps."""

        def __init__(self):
            super().__init__()
            self.ends: list[float] = []

        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])  # waits for the devices
            self.ends.append(time.perf_counter())
            timed = len(self.ends) - _SKIPPED_STEPS
            if timed >= _MIN_STEPS and self.ends[-1] - self.ends[_SKIPPED_STEPS] >= _SECONDS:
                self.model.stop_training = True

    strategy = kdist.strategies.build(spec)
    batch = kdist.Batch(FLAGS.local_batch_size, strategy.num_replicas_in_sync, FLAGS.accumulate)
    keras.utils.set_random_seed(FLAGS.seed)
    _, data, _ = load_data(batch)
    stopwatch = Stopwatch()
    epochs = 1000 * (_SKIPPED_STEPS + _MIN_STEPS)
    compiled_model(strategy, data).fit(data, epochs=epochs, verbose=0, callbacks=[stopwatch])
    ends = stopwatch.ends[_SKIPPED_STEPS - 1 :]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    result = {
        "step_seconds": statistics.median(seconds),
        "replicas": batch.replicas,
        "examples": data.num_examples,
        "gpu_bytes": _gpu_peak_bytes(),
    }
    print(json.dumps(result), flush=True)


def _gpu_peak_bytes():
    """Returns the peak memory of TensorFlow on the GPU that used most; None without GPUs."""
    import tensorflow as tf

    gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
    infos = [tf.config.experimental.get_memory_info(name.removeprefix("/device:")) for name in gpus]
    return max((info["peak"] for info in infos), default=None)


if __name__ == "__main__":
    program.run(main)
