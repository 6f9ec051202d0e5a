"""Models split over devices: their layers, branches, stages and weights."""

from kdist.parallel.joining import joined
from kdist.parallel.plan_file import read_plan, split_as, write_plan
from kdist.parallel.split_model import SplitModel, split
from kdist.parallel.split_plan import column, device, heads, row, stage
from kdist.parallel.suggest import suggest

__all__ = [
    "SplitModel",
    "column",
    "device",
    "heads",
    "joined",
    "read_plan",
    "row",
    "split",
    "split_as",
    "stage",
    "suggest",
    "write_plan",
]
