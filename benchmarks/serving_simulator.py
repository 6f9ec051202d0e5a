"""Compares the batching simulator, its choices, and the tuner with a real batcher.

  # about a quarter of an hour; from the repository root, on an otherwise idle machine
  python -m benchmarks.serving_simulator --save

  # emulated devices only, shorter
  python -m benchmarks.serving_simulator --devices=sleep5,sleep20 --seconds=3

A device is a Keras model or a sleep: `sleep5` takes 5 ms for a batch of one row and twice as long
for the largest batch. Requests of one row are sent to a `kdist.serving.engine.batcher.Batcher` in
this process. The simulator receives the times at which they were sent, and the measured latency
curve. The output shows the errors of the mean and the 99th percentile, whether settings that differ
by more than a tenth are ranked correctly, how far the chosen timeout is from the best measured one,
and how fast the tuner adapts to ten times the load.
"""

import asyncio
import pathlib
import sys

from absl import flags

from benchmarks import tables
from benchmarks.serving_devices import DEVICES, device_of
from kdist import program

FLAGS = flags.FLAGS

flags.DEFINE_list("devices", list(DEVICES), f"Devices to measure: {', '.join(DEVICES)}.")
flags.DEFINE_list(
    "shares", ["0.1", "0.4", "0.7"], "Request rates, as fractions of the device's capacity."
)
flags.DEFINE_list("timeouts_ms", ["0", "2", "8", "32"], "Timeouts to measure, in milliseconds.")
flags.DEFINE_float("seconds", 3.0, "Seconds of requests for each setting.", lower_bound=0.5)
flags.DEFINE_integer(
    "most_requests", 3000, "Largest number of requests for each setting.", lower_bound=50
)
flags.DEFINE_integer("turns", 2, "Measurements of each setting; the fastest counts.", lower_bound=1)
flags.DEFINE_boolean("retune", True, "Also measure the tuner at ten times the load.")
flags.DEFINE_boolean("save", False, "Write the tables to --results_dir, with commit and machine.")
flags.DEFINE_string(
    "results_dir",
    str(pathlib.Path(__file__).parent / "results"),
    "Directory that --save writes to.",
)


def main(_):
    program.check_items("devices", DEVICES)
    from benchmarks import serving_comparison

    texts = []
    for name in FLAGS.devices:
        compute, example = device_of(name)
        comparison = serving_comparison.Comparison(
            compute,
            example,
            [float(share) for share in FLAGS.shares],
            [float(timeout) for timeout in FLAGS.timeouts_ms],
            FLAGS.seconds,
            FLAGS.most_requests,
            FLAGS.turns,
        )
        lines = asyncio.run(comparison.run(FLAGS.retune))
        texts.append(f"## {name}\n\n{lines}")
        print(f"{texts[-1]}\n", flush=True)
    if FLAGS.save:
        root = pathlib.Path(__file__).parents[1]
        about = {"seconds per setting": FLAGS.seconds}
        title = "Simulated and measured batching"
        path = tables.save("\n\n".join(texts), pathlib.Path(FLAGS.results_dir), root, about, title)
        print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    program.run(main)
