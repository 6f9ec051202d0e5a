"""kdist's `fit` beside plain Keras's, same model, data and strategy, in one session.

  python benchmarks/fit.py --model=lenet --local_batch_size=16 --repetitions=5

Each variant runs in a process of its own, in turn, so that a machine that slows down slows all of
them. Prints the median milliseconds a step, the spread, and the ratio to Keras.
"""

import json
import statistics

from absl import flags

from kdist import program, testing

FLAGS = flags.FLAGS

flags.DEFINE_string("model", "lenet", "A builder of kdist.models.")
flags.DEFINE_integer("local_batch_size", 16, "Examples a replica takes in a step.", lower_bound=1)
flags.DEFINE_integer("num_devices", 2, "Replicas.", lower_bound=1)
flags.DEFINE_integer("steps", 200, "Steps that are timed, after as many to warm up.", lower_bound=1)
flags.DEFINE_integer("repetitions", 3, "Processes for each variant.", lower_bound=1)

VARIANTS = {
    "keras": {"model_class": "keras", "steps_per_execution": 1},
    "kdist": {"model_class": "kdist", "steps_per_execution": 1},
    "kdist, 20 steps a call": {"model_class": "kdist", "steps_per_execution": 20},
}

# Time is taken from on_train_begin to on_train_end: tf.data's autotuning may hold fit up after it.
TIMED_FIT = """
import json, sys, time
options = json.loads(sys.argv[1])
import kdist, keras, numpy as np, tensorflow as tf

class Clock(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.began = time.perf_counter()
    def on_train_end(self, logs=None):
        self.seconds = time.perf_counter() - self.began

devices = kdist.cluster.find_devices(options["num_devices"])
strategy = tf.distribute.MirroredStrategy(devices)
if options["model_class"] == "kdist":
    strategy = kdist.create_strategy("mirrored", options["num_devices"])
batch = kdist.Batch(options["local_batch_size"], strategy.num_replicas_in_sync)
rng = np.random.default_rng(0)
images = rng.integers(0, 256, (4 * batch.global_size, 28, 28, 1)).astype("uint8")
source = kdist.data.from_arrays(images, np.arange(len(images)) % 10)
train = kdist.data.Pipeline(source, batch).dataset()
with strategy.scope():
    model = kdist.models.create(options["model"], input_shape=(28, 28, 1), num_classes=10)
    if options["model_class"] == "keras":
        model = keras.Model.from_config(model.get_config())
    model.compile(
        keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"],
        steps_per_execution=options["steps_per_execution"],
    )
clock = Clock()
for _ in range(2):
    model.fit(train, steps_per_epoch=options["steps"], verbose=0, callbacks=[clock])
print(json.dumps(clock.seconds / options["steps"] * 1000))
"""


def main(_):
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    common = {name: FLAGS[name].value for name in ("model", "local_batch_size", "num_devices")}
    for _ in range(FLAGS.repetitions):
        for name, variant in VARIANTS.items():
            options = {**common, **variant, "steps": FLAGS.steps}
            times[name].append(testing.python(TIMED_FIT, [json.dumps(options)]))
    baseline = statistics.median(times["keras"])
    print(f"{FLAGS.model}, {FLAGS.local_batch_size} × {FLAGS.num_devices} replicas, ms a step")
    for name, measured in times.items():
        median = statistics.median(measured)
        spread = f"{min(measured):.2f}–{max(measured):.2f}"
        print(f"  {name:24} {median:7.2f}  ({spread})  {baseline / median:.2f} × Keras")


if __name__ == "__main__":
    program.run(main)
