"""What all tables of fitted constants share: the fit, the check, and how values are written.

Constants are fitted as logarithms, each with a prior, so that one whose effect no row shows stays
what its prior says.
"""

import csv
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def check_above_zero(constants: Any) -> None:
    """Raises a ValueError that names the first attribute of a dataclass that is not above zero."""
    for name, value in dataclasses.asdict(constants).items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the constant {name} is a number above 0, not {value}")


def fit_logarithms(
    log_errors: Callable[[list[float]], Any],
    priors: Sequence[float],
    widths: Sequence[float],
    row_spread: float,
    **options: Any,
) -> list[float]:
    """The constants with which rows come out best; the search begins at the priors.

    Errors count by a soft absolute value, so that rows that are wrong for other reasons count
    little; that is close to what a mean absolute percentage error asks.

    Args:
        log_errors: of constants, an array of ln(predicted / measured).
        priors: what the constants are where no row says anything of them.
        widths: standard deviations of their logarithms.
        row_spread: what a row may be off by for reasons of its own.
        **options: of `scipy.optimize.least_squares`.
    """
    import numpy as np
    from scipy.optimize import least_squares

    start = np.log(priors)

    def residuals(logarithms):
        off = log_errors(np.exp(logarithms).tolist()) / row_spread
        soft = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off * off) - 1))
        return np.concatenate([soft, (logarithms - start) / np.asarray(widths)])

    return np.exp(least_squares(residuals, start, diff_step=1e-3, **options).x).tolist()


def replace_values(constants: Any, path: str | os.PathLike) -> None:
    """Writes the column `value` of a table of constants anew and leaves the others as they are.

    Args:
        constants: a dataclass with an attribute for each row.
        path: of the table, with the columns `name` and `value`.
    """
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow({**row, "value": f"{getattr(constants, row['name']):.4g}"})
