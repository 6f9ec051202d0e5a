"""Times kdist on one device next to plain Keras, on 12 models of every kind.

  # all models, about half an hour on two quiet cores; from the repository's root
  python -m benchmarks.compare_one_device --save

  # some of them
  python -m benchmarks.compare_one_device --models=dense,lstm --repetitions=5

Both run `fit` on the same batch in memory, without a strategy, in processes of their own, one after
the other. The first step includes tracing. Ratios above 1 mean that kdist is faster; they are
computed within a repetition, and the table shows their median.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import time

from absl import flags

from benchmarks import tables
from kdist import program

FLAGS = flags.FLAGS
LIBRARIES = ("keras", "kdist")
_WARM_UP_STEPS = 20


def _sequential(shape, *layers):
    import keras

    return keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(10, "softmax")])


def _convolutions():
    from keras import layers

    blocks = [
        layer
        for filters in (16, 32, 64)
        for layer in (
            layers.Conv2D(filters, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
        )
    ]
    return _sequential((28, 28, 1), *blocks, layers.Flatten())


def _transformer():
    import keras
    from keras import layers

    x = inputs = keras.Input((64, 128))
    for _ in range(4):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32)(x, x))
        y = layers.Dense(128)(layers.Dense(512, "gelu")(x))
        x = layers.LayerNormalization()(x + y)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(10, "softmax")(x))


def _dense(*units):
    from keras import layers

    return [layers.Dense(number, "relu") for number in units]


def _layers(*names_and_arguments):
    import keras

    return [
        getattr(keras.layers, name)(*arguments, **options)
        for name, arguments, options in names_and_arguments
    ]


def _application(name):
    import keras

    return getattr(keras.applications, name)(input_shape=(32, 32, 3), weights=None, classes=10)


_GRUS = (("GRU", [64], {"return_sequences": True}), ("GRU", [64], {}))
_WORDS = (("Embedding", [20_000, 64], {}), ("GlobalAveragePooling1D", [], {}))
_SEPARABLE = (("SeparableConv2D", [64, 3], {"activation": "relu"}), ("Flatten", [], {}))
# Name -> (examples per step, function that builds the model).
MODELS = {
    "dense": (32, lambda: _sequential((64,), *_dense(*[64] * 100))),
    "wide": (32, lambda: _sequential((1024,), *_dense(2048, 2048))),
    "convolutions": (32, _convolutions),
    "separable": (32, lambda: _sequential((28, 28, 8), *_layers(*_SEPARABLE))),
    "lstm": (32, lambda: _sequential((32, 64), *_layers(("LSTM", [128], {})))),
    "gru": (32, lambda: _sequential((32, 64), *_layers(*_GRUS))),
    "embedding": (32, lambda: _sequential((64,), *_layers(*_WORDS))),
    "transformer": (32, _transformer),
    "mobilenet_v2": (32, lambda: _application("MobileNetV2")),
    "resnet50": (8, lambda: _application("ResNet50")),
    "densenet121": (8, lambda: _application("DenseNet121")),
    "efficientnet_b0": (8, lambda: _application("EfficientNetB0")),
}

flags.DEFINE_list("models", list(MODELS), f"Any of {', '.join(MODELS)}.")
flags.DEFINE_string("optimizer", "adam", "Optimizer, as in `compile`.")
flags.DEFINE_integer("repetitions", 3, "Processes per model and library.", lower_bound=1)
flags.DEFINE_float("seconds", 4.0, "Time of the timed steps of a process.", lower_bound=0.1)
flags.DEFINE_boolean("save", False, "Write the table to benchmarks/results.")
flags.DEFINE_string("trial", None, "Used by the program itself: LIBRARY:MODEL, in this process.")


def main(_):
    if FLAGS.trial:
        print(json.dumps(measure(*FLAGS.trial.split(":"))))
        return
    program.check_items("models", MODELS)
    head = ["model", "Keras, ms", "kdist, ms", "kdist is", "Keras, first step, s", "kdist, s"]
    rows = [[*head, "kdist is"]]
    for name in FLAGS.models:
        rows.append(_row(name))
        print(f"{rows[-1]}", file=sys.stderr, flush=True)
    text = tables.markdown(rows)
    print(text)
    if FLAGS.save:
        root = pathlib.Path(__file__).parents[1]
        about = {"optimizer": FLAGS.optimizer, "repetitions": FLAGS.repetitions}
        print(tables.save(text, root / "benchmarks/results", root, about, "One device and Keras"))


def _row(name):
    found = {library: [] for library in LIBRARIES}
    for number in range(FLAGS.repetitions):
        for library in LIBRARIES if number % 2 == 0 else reversed(LIBRARIES):
            found[library].append(_in_own_process(library, name))
    cells = [name]
    for key, factor in (("step_seconds", 1e3), ("first_seconds", 1)):
        keras, kdist = ([each[key] * factor for each in found[library]] for library in LIBRARIES)
        ratio = statistics.median(one / other for one, other in zip(keras, kdist, strict=True))
        times = [f"{statistics.median(values):.2f}" for values in (keras, kdist)]
        cells += [*times, f"{ratio:.2f} × as fast"]
    return cells


def _in_own_process(library, name):
    options = [f"--optimizer={FLAGS.optimizer}", f"--seconds={FLAGS.seconds}"]
    run = subprocess.run(
        [sys.executable, "-m", __spec__.name, f"--trial={library}:{name}", *options],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def measure(library: str, name: str) -> dict[str, float]:
    """Returns the median seconds of a step, and the seconds of the first `fit` of one step."""
    import keras
    import numpy as np
    import tensorflow as tf

    import kdist

    class Ends(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.times = []

        def on_train_batch_end(self, batch, logs=None):
            self.times.append(time.perf_counter())

    size, build = MODELS[name]
    model = build()
    if library == "kdist":
        model = kdist.Model.of(model)
    model.compile(FLAGS.optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    generator = np.random.default_rng(0)
    x = generator.random((size, *model.input_shape[1:])).astype("float32")
    y = generator.integers(0, 10, size)
    data = tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(2)
    ends = Ends()

    def fit(steps):
        model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[ends])

    began = time.perf_counter()
    fit(1)
    first = time.perf_counter() - began
    fit(_WARM_UP_STEPS)
    mean = np.diff(ends.times).mean()
    fit(max(_WARM_UP_STEPS, int(FLAGS.seconds / mean)))
    return {"step_seconds": float(np.median(np.diff(ends.times))), "first_seconds": first}


if __name__ == "__main__":
    program.run(main)
