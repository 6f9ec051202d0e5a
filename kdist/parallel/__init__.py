"""Models split over devices: their layers, branches, stages and weights."""

from kdist.parallel.jax_mesh import Mesh
from kdist.parallel.joining import joined
from kdist.parallel.measured_costs import measure_costs
from kdist.parallel.plan_file import plan_as_said, read_plan, split_as, write_plan
from kdist.parallel.split_model import SplitModel, split
from kdist.parallel.split_plan import column, device, heads, row, stage
from kdist.parallel.suggesting import Suggestion, suggest

__all__ = [
    "Mesh",
    "SplitModel",
    "Suggestion",
    "column",
    "device",
    "heads",
    "joined",
    "measure_costs",
    "plan_as_said",
    "read_plan",
    "row",
    "split",
    "split_as",
    "stage",
    "suggest",
    "write_plan",
]
