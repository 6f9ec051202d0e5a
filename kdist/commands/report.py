"""Writes a self-contained web page about one or several runs.

  kdist report runs/first
  kdist report runs/one_device runs/two_devices --output=comparison.html

  # with the cost of each run; prices are for all machines of a run, in US dollars per hour
  kdist report runs/one runs/two --price_usd_per_hour=one=0.4,two=2.1

  # a run that is copied to object storage by kdist train --mirror
  kdist report gs://bucket/cats/a

  # during a run: serves the page on this machine and refreshes it, until Ctrl-C
  kdist report runs/first --watch --port=8765

It prints the path of the page, or with --watch its address. Speeds are relative to the first run.
"""

import functools

from absl import flags

import kdist
from kdist import program

FLAGS = flags.FLAGS

with program.flag_group("Page"):
    flags.DEFINE_string("output", "report.html", "Page to write; an existing file is replaced.")
    flags.DEFINE_list(
        "price_usd_per_hour",
        [],
        "Price of all machines of a run, in US dollars per hour: one price for all runs, or "
        "NAME=2.1,NAME2=0.4 with the names of the runs on the page. By default the cost that the "
        "run recorded, if any.",
    )

with program.flag_group("Live page"):
    flags.DEFINE_bool("watch", False, "Serve the page on this machine and refresh it.")
    flags.DEFINE_integer(
        "port",
        8765,
        "Port for --watch; 0 is any free port.",
        lower_bound=0,
        upper_bound=65535,
    )

program.writes_file("output")


def main(arguments):
    runs, prices = arguments[1:], kdist.report.parse_prices(FLAGS.price_usd_per_hour)
    if FLAGS.watch:
        report_address = functools.partial(print, flush=True)
        kdist.report.watch(
            runs, FLAGS.output, port=FLAGS.port, price_usd_per_hour=prices, on_ready=report_address
        )
    else:
        print(kdist.report.write(runs, FLAGS.output, prices))


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    program.run(main, positional="run directories or URLs")
