"""Step time, memory, and traffic of sharded replicas, next to replicas that are not sharded.

  python -m benchmarks.sharding                    # a transformer with 12 blocks on 2 devices
  python -m benchmarks.sharding --devices=4 --depth=4
  python -m benchmarks.sharding --optimizer=muon
  kdist launch --workers=2 -- python -m benchmarks.sharding --devices=1
  python -m benchmarks.sharding --logical_gpu_megabytes=8000    # 2 devices that share one GPU

The models train in the same processes, in turns, so that the ratios of their step times hardly
depend on what else the machine does. A ratio above 1 means that sharded steps are slower. The bytes
between devices are read from the optimized graph of a step; those of rows that are looked up are
unknown between processes. Next to them is the formula of the ZeRO paper (arXiv:1910.02054, section
7): an all-reduce, and a reduce-scatter with an all-gather, both move 2 (N - 1) times the bytes of
the gradients in all. Sharded weights are gathered twice: 3 (N - 1) on N devices of one process, or
on N processes of one device. P processes of N devices each do so within, and all-reduce gradients
between them: 2 (P - 1). Muon needs whole weights, which moves up to twice as many.
"""

import contextlib
import dataclasses
import statistics
import time

from absl import flags

from kdist import program
from kdist.cluster import Cluster
from kdist.layout import SHARDS

FLAGS = flags.FLAGS
flags.DEFINE_integer("devices", 2, "Devices of each process; logical CPUs without GPUs.", 1, 16)
flags.DEFINE_integer(
    "logical_gpu_megabytes",
    None,
    "Memory of each device. The first GPU is divided into --devices of them, to see the memory "
    "that a replica takes: their speed is not that of several GPUs.",
    lower_bound=1,
)
flags.DEFINE_multi_enum("shards", ["optimizer", "weights"], SHARDS, "What replicas divide.")
flags.DEFINE_enum("optimizer", "adam", ("adam", "muon"), "Optimizer of all models.")
flags.DEFINE_integer("depth", 12, "Number of blocks of the transformer.", lower_bound=1)
flags.DEFINE_integer("width", 128, "Features of a token, a multiple of 4.", lower_bound=4)
flags.DEFINE_integer("tokens", 64, "Tokens of an example.", lower_bound=1)
flags.DEFINE_integer("local_batch_size", 8, "Examples of a replica.", lower_bound=1)
flags.DEFINE_integer("turns", 15, "Turns of all models.", lower_bound=1)
flags.DEFINE_integer("steps", 4, "Steps of a turn.", lower_bound=1)


def main(_):
    """Prints a table with all models."""
    import numpy as np

    from kdist.training.sharding.memory import state_bytes

    cluster = Cluster.resolve()
    workers = cluster.num_workers or 1
    rows = FLAGS.local_batch_size * FLAGS.devices * workers
    random = np.random.default_rng(0)
    data = random.integers(0, 1000, (rows, FLAGS.tokens)), random.integers(0, 10, rows)
    models, sent, peaks = {}, {}, {}
    strategy = create_strategy(cluster)
    for shard in (None, *FLAGS.shards):
        divide(strategy, shard)
        with peak_memory() as peaks[shard]:
            models[shard], sent[shard] = first_step(strategy, data)
    seconds = {shard: [] for shard in models}
    for _turn in range(FLAGS.turns):
        for shard, model in models.items():
            divide(strategy, shard)
            started = time.perf_counter()
            fit(model, data, FLAGS.steps)
            seconds[shard].append((time.perf_counter() - started) / FLAGS.steps)
    if cluster.index:
        return
    parameters = sum(weight.shape.num_elements() for weight in models[None].trainable_variables)
    print(
        f"{FLAGS.depth} blocks of width {FLAGS.width}, {parameters:,} parameters, {FLAGS.optimizer}"
    )
    print(
        "| shard | step ms | weights MB per device | optimizer MB per device | peak MB per device "
        "| MB between devices | formula MB |"
    )
    print("|--|--:|--:|--:|--:|--:|--:|")
    for shard, model in models.items():
        held = state_bytes(model).values()
        weights, slots = max(each.weights for each in held), max(each.optimizer for each in held)
        copies = (3 if shard == "weights" else 2) * (FLAGS.devices * workers - 1)
        if shard == "weights" and FLAGS.devices > 1:
            copies = 3 * (FLAGS.devices - 1) * workers + 2 * (workers - 1)
        formula = copies * 4 * parameters
        peak = f"{max(peaks[shard]) / 1e6:.2f}" if peaks[shard] else "–"
        print(
            f"| {shard} | {1000 * statistics.median(seconds[shard]):.1f} | {weights / 1e6:.2f} | "
            f"{slots / 1e6:.2f} | {peak} | {sent[shard]} | {formula / 1e6:.2f} |"
        )
    for shard in FLAGS.shards:
        ratios = [a / b for a, b in zip(seconds[shard], seconds[None], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(
            f"step with shard={shard} / unsharded: {statistics.median(ratios):.3f} (quartiles "
            f"{quartiles[0]:.3f} to {quartiles[2]:.3f})"
        )


def create_strategy(cluster):
    """Returns the strategy of this process. A process joins a job once, with one strategy."""
    import tensorflow as tf

    import kdist

    if FLAGS.logical_gpu_megabytes:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("GPU")[0],
            [tf.config.LogicalDeviceConfiguration(FLAGS.logical_gpu_megabytes)] * FLAGS.devices,
        )
    name = "mirrored" if cluster.is_alone else "multi_worker"
    return kdist.create_strategy(name, FLAGS.devices, shard=FLAGS.shards[0])


def divide(strategy, shard):
    """Sets what the replicas of a strategy divide."""
    strategy.layout = dataclasses.replace(strategy.layout, shard=shard)


@contextlib.contextmanager
def peak_memory():
    """Yields a list; at the end it has the bytes that each GPU held beyond those it held before."""
    import tensorflow as tf

    gpus = [device.name.rsplit("device:")[-1] for device in tf.config.list_logical_devices("GPU")]
    before = []
    for gpu in gpus:
        tf.config.experimental.reset_memory_stats(gpu)
        before.append(tf.config.experimental.get_memory_info(gpu)["current"])
    added: list[int] = []
    yield added
    for gpu, bytes_before in zip(gpus, before, strict=True):
        added.append(tf.config.experimental.get_memory_info(gpu)["peak"] - bytes_before)


def first_step(strategy, data):
    """Returns a model after its first steps, and the megabytes that devices exchange in one."""
    import keras

    import kdist
    from kdist.parallel.inspect.traffic import watched_graphs

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = kdist.models.transformer(
            (FLAGS.tokens,), 10, vocabulary_size=1000, width=FLAGS.width, depth=FLAGS.depth
        )
        model.compile(FLAGS.optimizer, "sparse_categorical_crossentropy")
    with watched_graphs() as graphs:
        fit(model, data, 1)
    fit(model, data, FLAGS.steps)
    replicas = strategy.num_replicas_in_sync
    sent = graphs.sharded_bytes(FLAGS.local_batch_size, replicas)
    return model, f"{sum(sent.values()) / 1e6:.2f}" if sent else "unknown"


def fit(model, data, steps):
    """Trains some steps on the same batch."""
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensors(data).repeat(steps)
    model.fit(batches, verbose=0)


if __name__ == "__main__":
    program.run(main)
