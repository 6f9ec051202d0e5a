"""How long an epoch takes, of any Keras model on any backend."""

import time

import keras


class EpochSeconds(keras.callbacks.Callback):
    """Measures the training time of epochs, without validation; the first one compiles as well.

    Attributes:
        seconds: of each epoch that has ended.
    """

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        self._began, self._is_training = time.perf_counter(), True

    def on_test_begin(self, logs=None):
        self._end()

    def on_epoch_end(self, epoch, logs=None):
        self._end()

    def _end(self):
        if getattr(self, "_is_training", False):
            int(self.model.optimizer.iterations)  # what is still under way on the devices
            self.seconds.append(time.perf_counter() - self._began)
            self._is_training = False
