"""Share of a step that waits for input, with and without data workers, next to its prediction.

  python -m benchmarks.data_workers                 # 0 and 2 data workers
  python -m benchmarks.data_workers --workers=0,2,4 --latency_ms=100 --step_ms=300

It trains on JPEGs in a folder, and each read takes --latency_ms, as on storage at the other end of
a network. Waiting takes no core, so that data workers on the same machine show what they do on
others. With --step_ms, a step waits as well, as for an accelerator, and the results depend little
on what else the machine does; without, it trains MobileNetV2. The images of an epoch are compared
with those without data workers.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_list("workers", ["0", "2"], "Numbers of data workers.")
flags.DEFINE_float("latency_ms", 30.0, "Milliseconds that each read takes.")
flags.DEFINE_float("step_ms", 0.0, "Milliseconds of a step of a small network; 0: MobileNetV2.")
flags.DEFINE_integer("images", 240, "Number of images.")
flags.DEFINE_integer("epochs", 3, "Epochs that are measured, after a first one.")
flags.DEFINE_string("folder", None, "Folder of images; only the measured program has it.")

_SIZE, _BATCH = (300, 400), 8


def main(_):
    if FLAGS.folder:
        print(json.dumps(measure(FLAGS.folder)))
        return
    with tempfile.TemporaryDirectory() as directory:
        write_images(pathlib.Path(directory))
        results = {int(n): run(int(n), directory) for n in FLAGS.workers}
    from kdist.telemetry.steps.verdict import predicted_input_share

    alone = results[0]
    print("| data workers | examples/s | waiting for input | predicted | examples of an epoch |")
    print("|--:|--:|--:|--:|--|")
    for number, found in results.items():
        share = alone["input_share"]
        predicted = predicted_input_share(share, number) if number else share
        same = "equal" if found["numbers"] == alone["numbers"] else "DIFFERENT"
        print(
            f"| {number} | {found['examples_per_second']:.1f} | {found['input_share']:.0%} | "
            f"{predicted:.0%} | {same} |"
        )
    print(*alone["verdict"], sep="\n")


def write_images(directory):
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(FLAGS.images):
        path = directory / ("birds", "cats", "dogs")[number % 3] / f"{number:04d}.jpg"
        path.parent.mkdir(exist_ok=True)
        small = generator.integers(0, 256, (*(n // 20 for n in _SIZE), 3), "uint8")
        Image.fromarray(small).resize(_SIZE[::-1]).save(path)


def run(workers, folder):
    """Returns the results of `measure` in a job with data workers."""
    given = [f"--{name}={FLAGS[name].value}" for name in ("latency_ms", "step_ms", "epochs")]
    with tempfile.TemporaryDirectory() as run_dir:
        launch = [f"--data_workers={workers}", f"--run_dir={run_dir}", "--hang_seconds=0"]
        command = [sys.executable, "-m", "kdist", "launch", *launch, "--", __file__]
        done = subprocess.run(
            [*command, f"--folder={folder}", *given], stdout=subprocess.PIPE, text=True, check=True
        )
    line = next(line for line in done.stdout.splitlines() if '"input_share"' in line)
    return json.loads(line[line.index("{") :])


def measure(folder):
    """Trains in this process; returns the share of waiting, and the examples of an epoch."""
    import tensorflow as tf

    import kdist
    from kdist.data.image_folder import ImageFolderSource, load_image_folder

    class Distant(ImageFolderSource):
        """Image files whose reading takes a time, in which the process waits."""

        def example(self, index):
            late = tf.data.Dataset.from_tensors(index)
            spec = {"output_types": [late.element_spec.dtype], "output_shapes": [[]]}
            late = tf.raw_ops.SleepDataset(
                input_dataset=late._variant_tensor,
                sleep_microseconds=tf.constant(int(FLAGS.latency_ms * 1e3), tf.int64),
                **spec,
            )
            return super().example(tf.raw_ops.DatasetToSingleElement(dataset=late, **spec)[0])

    source, _ = load_image_folder(folder, test_fraction=0.05)
    source = Distant(source._paths, source._labels, source.class_names)
    addresses = os.environ.get("KDIST_DATA_WORKERS", "")
    train = kdist.data.Pipeline(
        source,
        kdist.Batch(_BATCH),
        operations="resize(96, 96)|random_flip()",
        cache=False,
        data_workers=addresses,
    )
    strategy = kdist.create_strategy("one_device")
    with strategy.scope():
        if FLAGS.step_ms:
            model = waiting_model(train)
        else:
            model = kdist.models.mobilenet_v2(train.image_shape, train.num_classes)
        model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(train, epochs=1, verbose=0)
    with tempfile.TemporaryDirectory() as directory:
        telemetry = kdist.callbacks.Telemetry(
            directory, window_seconds=1.0, device_seconds=None, profiles=False, report=False
        )
        model.fit(train, epochs=FLAGS.epochs, callbacks=[telemetry], verbose=0)
    summary = telemetry.summary()
    sums = [
        np.round(x.numpy().astype("float64").sum((1, 2, 3)), 3).tolist()
        for x, _ in train.dataset().take(train.steps_per_epoch)
    ]
    return {
        "input_share": summary["breakdown"]["input"],
        "examples_per_second": summary["examples_per_second"],
        "verdict": summary["verdict"],
        "numbers": sums,
    }


def waiting_model(train):
    """Returns a small network whose forward pass waits for --step_ms."""
    import keras
    import tensorflow as tf

    import kdist

    def wait(values):
        time.sleep(FLAGS.step_ms * 1e-3)
        return values

    class Waiting(keras.layers.Layer):
        def call(self, x):
            late = tf.numpy_function(wait, [x], x.dtype, stateful=True)
            return x + tf.stop_gradient(tf.ensure_shape(late, x.shape) - x)

    inputs = keras.Input(train.image_shape)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Rescaling(1 / 255)(inputs))
    outputs = keras.layers.Dense(train.num_classes, "softmax")(Waiting()(x))
    return kdist.Model(inputs, outputs)


if __name__ == "__main__":
    app.run(main)
