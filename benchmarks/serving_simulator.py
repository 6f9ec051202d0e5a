"""The simulator of batching, its choices and the tuner, beside a real batcher.

  # about a quarter of an hour; from the repository's root, on a machine that does nothing else
  python -m benchmarks.serving_simulator --save

  # emulated devices only, shorter
  python -m benchmarks.serving_simulator --devices=sleep5,sleep20 --seconds=3

A device is a Keras model, or a sleep: `sleep5` takes 5 ms for a batch of one row and twice as long
for the largest. Requests of one row are sent to a `kdist.serving.batcher.Batcher` in this process;
the simulator is given the times at which they were sent, and the curve as measured with as many
concurrent requests. Printed are the errors of mean and 99th percentile, whether the faster of two
settings is the simulated one where they differ by more than a tenth, how far the chosen timeout is
from the best measured one, and how fast the tuner is there after ten times the load.
"""

import asyncio
import pathlib
import sys

from absl import flags

from benchmarks import tables
from benchmarks.serving_devices import DEVICES, device_of
from kdist import program

FLAGS = flags.FLAGS

flags.DEFINE_list("devices", list(DEVICES), f"Of {', '.join(DEVICES)}.")
flags.DEFINE_list("shares", ["0.1", "0.4", "0.7"], "Rates, of the device's capacity.")
flags.DEFINE_list("timeouts_ms", ["0", "2", "8", "32"], "Timeouts measured.")
flags.DEFINE_float("seconds", 3.0, "Of requests at each setting.", lower_bound=0.5)
flags.DEFINE_integer("most_requests", 3000, "At each setting.", lower_bound=50)
flags.DEFINE_integer("turns", 2, "Of each setting; the faster counts.", lower_bound=1)
flags.DEFINE_boolean("retune", True, "Also time the tuner after ten times the load.")
flags.DEFINE_boolean("save", False, "Write the tables to --results_dir, with commit and machine.")
flags.DEFINE_string(
    "results_dir", str(pathlib.Path(__file__).parent / "results"), "Where --save writes to."
)


def main(_):
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
        about = {"seconds a setting": FLAGS.seconds}
        title = "Simulated and measured batching"
        path = tables.save("\n\n".join(texts), pathlib.Path(FLAGS.results_dir), root, about, title)
        print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    program.run(main)
