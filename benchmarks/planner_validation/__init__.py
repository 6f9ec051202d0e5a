"""Compares the planner with published rates and trainings, and fits its constants to them.

    kdist plan --validate=benchmarks/planner_validation/tables/scaling.csv
    kdist plan --trainings=benchmarks/planner_validation/tables/time_to_accuracy.csv
    python -m benchmarks.planner_validation.fitting          # constants of exchange and input
    python -m benchmarks.planner_validation.compute_fitting  # constants of computation

Published measurements are in `tables`, the fitted constants in `kdist/planner/tables`.
"""

import pathlib

TABLES = pathlib.Path(__file__).parent / "tables"
