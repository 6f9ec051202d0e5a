"""Training time of epochs, for any Keras model and backend."""

import time

import keras


class EpochSeconds(keras.callbacks.Callback):
    """Measures the training time of each epoch, without validation.

    The first epoch includes the compilation.

    Attributes:
        seconds: list of the seconds of each completed epoch.

    Example:

        timer = kdist.callbacks.EpochSeconds()
        model.fit(x, y, epochs=3, callbacks=[timer])
        print(timer.seconds)
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
            int(self.model.optimizer.iterations)  # waits for steps in flight on the devices
            self.seconds.append(time.perf_counter() - self._began)
            self._is_training = False
