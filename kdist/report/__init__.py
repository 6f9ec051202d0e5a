"""Run directories become one web page that opens from disk.

page = kdist.report.write(["runs/first", "runs/second"], "report.html")
kdist.report.show(["runs/first"])     # the same in a notebook
kdist.report.watch(["runs/first"])    # the same served on this machine, renewed as the run goes on
"""

from kdist.report.costs import parse_prices
from kdist.report.notebook import show
from kdist.report.page import write
from kdist.report.runs import Run, read_run, read_runs
from kdist.report.watch import watch

__all__ = ["Run", "parse_prices", "read_run", "read_runs", "show", "watch", "write"]
