"""Devices for batching benchmarks: Keras models on the CPU, and emulated devices that sleep."""

import collections
import time

import numpy as np

SIZES = (1, 2, 4, 8, 16, 32)


def _sleeping(milliseconds):
    def compute(arrays):
        rows = len(arrays["x"])
        time.sleep(milliseconds * 1e-3 * (1 + rows / SIZES[-1]))
        return {"y": arrays["x"]}

    return compute, {"x": np.zeros((1, 4), "float32")}


def _model(name, shape):
    import tensorflow as tf

    from kdist import models

    model = models.create(name, input_shape=shape, num_classes=10)
    function = tf.function(lambda images: model(images, training=False))

    def compute(arrays):
        return {"y": function(tf.constant(arrays["x"])).numpy()}

    return compute, {"x": np.zeros((1, *shape), "float32")}


DEVICES = {
    "sleep5": lambda: _sleeping(5),
    "sleep10": lambda: _sleeping(10),
    "sleep20": lambda: _sleeping(20),
    "lenet": lambda: _model("lenet", (28, 28, 1)),
    "mobilenet_v2": lambda: _model("mobilenet_v2", (96, 96, 3)),
}


def device_of(name: str):
    """Returns (function of named arrays, example row) of a name in `DEVICES`."""
    return DEVICES[name]()


class Timed:
    """Function of arrays that records the time of each call.

    Attributes:
        times: rows -> seconds of each call.
    """

    def __init__(self, compute):
        self._compute = compute
        self.times: dict[int, list[float]] = collections.defaultdict(list)

    def __call__(self, arrays):
        began = time.perf_counter()
        outputs = self._compute(arrays)
        self.times[len(arrays["x"])].append(time.perf_counter() - began)
        return outputs


def notify_tuner(compute, tuner, loop):
    """Returns a function that pads batches and reports them to the tuner in the event loop."""

    def computed(arrays):
        began, rows = loop.time(), len(arrays["x"])
        size = next(size for size in SIZES if size >= rows)
        padding = np.repeat(arrays["x"][:1], size - rows, axis=0)
        outputs = compute({"x": np.concatenate([arrays["x"], padding])})
        loop.call_soon_threadsafe(tuner.load.record_batch, rows, loop.time() - began)
        return {name: output[:rows] for name, output in outputs.items()}

    return computed
