"""Web pages about training runs, made from their run directories.

Example:

    kdist.report.write(["runs/first", "runs/second"], "report.html")
    kdist.report.show(["runs/first"])   # in a notebook
    kdist.report.watch(["runs/first"])  # served on this host, updated while the run continues

Public names are imported on demand.
"""

from kdist.public_names import import_on_demand

# Public name -> the module that holds it.
_PUBLIC = {
    "Run": "runs",
    "parse_prices": "runs",
    "read_run": "runs",
    "read_runs": "runs",
    "show": "page",
    "watch": "live",
    "write": "page",
}

__all__ = sorted(_PUBLIC)


__getattr__ = import_on_demand(__name__, _PUBLIC)


def __dir__():
    return __all__
