"""Run directories become one web page that opens from disk.

page = kdist.report.write(["runs/first", "runs/second"], "report.html")
"""

from kdist.report.page import write
from kdist.report.runs import Run, read_run, read_runs

__all__ = ["Run", "read_run", "read_runs", "write"]
