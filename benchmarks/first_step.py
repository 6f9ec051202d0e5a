"""Time to the first step: kdist with a trace per replica and with `share_trace=True`, and Keras.

  python -m benchmarks.first_step --devices=1,2,8

Each number is of a process of its own. CPU seconds depend less on other load than wall time.
"""

import contextlib
import itertools
import json
import subprocess
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import kdist
from benchmarks.measuring import ROOT
from kdist.compat.tensorflow import collect_function_graphs

FLAGS = flags.FLAGS
flags.DEFINE_list("devices", ["1", "2", "8"], "Numbers of logical devices.")
flags.DEFINE_list("models", ["resnet", "transformer"], "Models to train.")
flags.DEFINE_boolean("nodes", False, "Count the graph's nodes instead, which takes time itself.")
flags.DEFINE_integer("minutes", 5, "Time limit of a process.")
flags.DEFINE_list("traces", ["Keras", "own", "shared"], "Plain Keras, and both traces of kdist.")
flags.DEFINE_string("only", None, "MODEL,DEVICES,TRACE: measure this in the present process.")

ROWS = 8  # of a replica
STEPS = 12
layers = keras.layers


def resnet():
    """Returns inputs and outputs of a residual network with 16 blocks."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(16):
        y = x
        for _ in range(2):
            y = layers.Conv2D(16, 3, padding="same", use_bias=False)(layers.ReLU()(y))
            y = layers.BatchNormalization()(y)
        x = layers.Add()([x, y])
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))


def transformer():
    """Returns inputs and outputs of a transformer with 12 blocks of width 64."""
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(256, 64)(inputs)
    for _ in range(12):
        y = layers.MultiHeadAttention(4, 16, dropout=0.1)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(y))
        y = layers.Dense(64)(layers.Dense(256, "gelu")(x))
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(y))
    return inputs, layers.Dense(256)(x)


class StepTimes(keras.callbacks.Callback):
    """Times at which steps end, in seconds."""

    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        """Records the time."""
        self.ends.append(time.perf_counter())


def compiled(name, devices, trace):
    """Returns a model on logical devices."""
    is_keras = trace == "Keras"
    if is_keras:
        names = kdist.devices.find_devices(devices)
        strategy = tf.distribute.MirroredStrategy(names) if devices > 1 else None
    else:
        strategy = kdist.create_strategy("mirrored" if devices > 1 else "one_device", devices)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model_class = keras.Model if is_keras else kdist.Model
        model = model_class(*{"resnet": resnet, "transformer": transformer}[name]())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        options = {} if is_keras else {"share_trace": trace == "shared"}
        model.compile("adam", loss, jit_compile=False, **options)
    return model


def data(model, number):
    """Returns random inputs and targets."""
    rng = np.random.default_rng(0)
    shape = model.input_shape[1:]
    x = rng.random((number, *shape)) if len(shape) > 1 else rng.integers(0, 256, (number, *shape))
    y = rng.integers(0, 10, (number, *model.output_shape[1:-1]))
    return x.astype(model.inputs[0].dtype), y


def measure(name, devices, trace):
    """Returns seconds and CPU seconds of the first step, and milliseconds of others."""
    model = compiled(name, devices, trace)
    batch_size = ROWS * devices
    first, others = data(model, batch_size), data(model, batch_size * STEPS)
    began, cpu_began = time.perf_counter(), time.process_time()
    model.fit(*first, batch_size=batch_size, verbose=0)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    times = StepTimes()
    model.fit(*others, batch_size=batch_size, verbose=0, callbacks=[times])
    return [f"{seconds:.1f}", f"{cpu_seconds:.1f}", f"{1e3 * np.median(np.diff(times.ends)):.0f}"]


def count_nodes(name, devices, trace):
    """Returns the nodes of a step's graph and of its functions, before TensorFlow changes it."""
    model = compiled(name, devices, trace)
    with collect_function_graphs() as functions:
        model.fit(*data(model, ROWS * devices), batch_size=ROWS * devices, verbose=0)
    graph = max(
        (each.pre_optimization_graph for each in functions), key=lambda each: len(each.node)
    )
    return [f"{len(graph.node):,}", f"{sum(len(f.node_def) for f in graph.library.function):,}"]


def main(_):
    """Prints a table, or with --only the numbers of one process."""
    run = count_nodes if FLAGS.nodes else measure
    if FLAGS.only:
        name, devices, trace = FLAGS.only.split(",")
        print(json.dumps(run(name, int(devices), trace)))
        return
    columns = ["nodes", "in functions"] if FLAGS.nodes else ["first step, s", "CPU s", "step, ms"]
    print("| model | devices | trace |", *(f"{column} |" for column in columns))
    print("|--|--:|--|" + "--:|" * len(columns))
    for name, devices, trace in itertools.product(FLAGS.models, FLAGS.devices, FLAGS.traces):
        if devices == "1" and trace == "shared":
            continue
        program = [sys.executable, "-m", "benchmarks.first_step"]
        options = [f"--only={name},{devices},{trace}", f"--nodes={FLAGS.nodes}"]
        try:
            result = subprocess.run(
                [*program, *options],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60 * FLAGS.minutes,
                check=True,
            )
            found = json.loads(result.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            found = [f"> {60 * FLAGS.minutes}", *("–" for _ in columns[1:])]
        print("|", " | ".join([name, devices, trace, *found]), "|", flush=True)


if __name__ == "__main__":
    app.run(main)
