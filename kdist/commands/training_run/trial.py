"""Times a training in a process of its own, for `kdist tune`.

    python -m kdist.commands.training_run.trial --model=lenet --local_batch_size=128

It has the flags of `kdist train`. After the first steps it prints a line with the number of
replicas and training examples, and whether batches are gathered from memory. Then each line on its
standard input, a number of seconds, continues the training for about as long. The answer is a line
with the seconds and steps, and the memory of the GPU that used most, if there are GPUs. Between the
turns it waits, so that several processes can be measured in turns. Lines of answers start with
`ANSWER`, as programs of users may print as well.
"""

import json
import sys
import time

from kdist import program
from kdist.commands import train  # noqa: F401  # defines the flags
from kdist.commands.training_run.on_tensorflow import prepare_training

ANSWER = "kdist-trial: "
# The first steps trace the model, and fill the queue of the input.
_SKIPPED_STEPS, _MIN_STEPS = 2, 3
# `fit` ends when the process does.
_EPOCHS = 10**9


def main(_):
    strategy, data = prepare_training()
    import keras

    from kdist.commands.training_run.compiled_model import compiled_model

    class Turns(keras.callbacks.Callback):
        """Trains while it has a turn, and waits for the next one in between."""

        def on_train_begin(self, logs=None):
            self._start, self._seconds = None, 0.0

        def on_train_batch_end(self, batch, logs=None):
            # Keras's `batch` counts groups as full ones, even if an epoch's end cuts them short.
            done = self.model.training_state.position.batch
            if self._start is not None:
                steps = done - self._done_before
                now = time.perf_counter()
                if now - self._start < self._seconds or steps < _MIN_STEPS:
                    return
                float(logs["loss"])  # waits for the devices
                _answer(
                    seconds=time.perf_counter() - self._start,
                    steps=steps,
                    gpu_bytes=_gpu_peak_bytes(),
                )
                self._start = None
            elif done < _SKIPPED_STEPS:
                return
            elif self._seconds:  # the first group of a turn, whose input was prepared before it
                float(logs["loss"])
                self._start, self._done_before = time.perf_counter(), done
                return
            else:
                _answer(
                    replicas=data.batch.replicas,
                    examples=data.num_examples,
                    in_memory=data.is_vectorized,
                )
            line = sys.stdin.readline()
            if not line:  # the search has ended
                self.model.stop_training = True
                return
            self._seconds = float(line)

    compiled_model(strategy, data).fit(data, epochs=_EPOCHS, verbose=0, callbacks=[Turns()])


def _answer(**facts):
    print(ANSWER + json.dumps(facts), flush=True)


def _gpu_peak_bytes():
    """Returns the peak memory of TensorFlow on the GPU that used most; None without GPUs."""
    import tensorflow as tf

    gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
    infos = [tf.config.experimental.get_memory_info(name.removeprefix("/device:")) for name in gpus]
    return max((info["peak"] for info in infos), default=None)


if __name__ == "__main__":
    program.run(main)
