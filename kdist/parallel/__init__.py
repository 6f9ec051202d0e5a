"""Models split over devices: their layers, branches, stages and weights."""

from kdist.parallel.jax_mesh import Mesh
from kdist.parallel.plan_file import plan_as_said, read_plan, split_as, write_plan
from kdist.parallel.split_model import SplitModel, split
from kdist.parallel.split_plan import column, device, heads, row, stage
from kdist.parallel.suggest import suggest

__all__ = [
    "Mesh",
    "SplitModel",
    "column",
    "device",
    "heads",
    "plan_as_said",
    "read_plan",
    "row",
    "split",
    "split_as",
    "stage",
    "suggest",
    "write_plan",
]
