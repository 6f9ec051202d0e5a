"""Makes one web page of run directories; it opens from disk and asks for nothing else.

  python scripts/report.py runs/first
  python scripts/report.py runs/one_device runs/two_devices --output=comparison.html

  # with the cost of each run: all machines of the run, in US dollars an hour
  python scripts/report.py runs/one runs/two --price_usd_per_hour=one=0.4,two=2.1

  # while a run goes on: served on this machine alone, and renewed; Ctrl-C ends it
  python scripts/report.py runs/first --watch --port=8765

It prints the path of the page, or with --watch its address. The first run is the one that the
others' speed is compared with.
"""

import functools

from absl import flags

import kdist
from kdist import program

FLAGS = flags.FLAGS

flags.DEFINE_string("output", "report.html", "The page to write; one that is there is replaced.")
flags.DEFINE_list(
    "price_usd_per_hour",
    [],
    "What all machines of a run cost in US dollars an hour: one price of all runs, or "
    "NAME=2.1,NAME2=0.4 by the names that the page gives the runs. By default the cost is what the "
    "run wrote down, if it did.",
)
flags.DEFINE_bool("watch", False, "Serve the page on this machine and renew it while runs go on.")
flags.DEFINE_integer(
    "port",
    8765,
    "With --watch: where to serve; 0 is any free port.",
    lower_bound=0,
    upper_bound=65535,
)


def main(arguments):
    runs, prices = arguments[1:], kdist.report.parse_prices(FLAGS.price_usd_per_hour)
    if FLAGS.watch:
        say = functools.partial(print, flush=True)
        kdist.report.watch(
            runs, FLAGS.output, port=FLAGS.port, price_usd_per_hour=prices, on_ready=say
        )
    else:
        print(kdist.report.write(runs, FLAGS.output, prices))


if __name__ == "__main__":
    program.run(main, takes="run directories")
