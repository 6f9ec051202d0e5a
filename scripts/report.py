"""Makes one web page of run directories; it opens from disk and asks for nothing else.

  python scripts/report.py runs/first
  python scripts/report.py runs/one_device runs/two_devices --output=comparison.html

It prints the path of the page. The first run is the one that the others' speed is compared with.
"""

from absl import flags

import kdist
from kdist import program

FLAGS = flags.FLAGS

flags.DEFINE_string("output", "report.html", "The page to write; one that is there is replaced.")


def main(arguments):
    print(kdist.report.write(arguments[1:], FLAGS.output))


if __name__ == "__main__":
    program.run(main, takes="run directories")
