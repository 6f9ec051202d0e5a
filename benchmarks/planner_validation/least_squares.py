"""Fits constants to measured rates, and writes fitted constants to their tables.

The logarithms of constants are fitted, each with a prior: a constant that no row depends on keeps
the value of its prior.
"""

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kdist.program import check_installed


def fit_logarithms(
    log_errors: Callable[[list[float]], Any],
    priors: Sequence[float],
    widths: Sequence[float],
    row_spread: float,
    **options: Any,
) -> list[float]:
    """Returns the constants that minimize the errors of all rows, starting at the priors.

    A soft absolute value limits the influence of outliers; it is close to minimizing the mean
    absolute percentage error.

    Args:
        log_errors: constants -> array of ln(predicted / measured).
        priors: values of the constants without any rows.
        widths: standard deviations of the logarithms of the priors.
        row_spread: relative error of a row for reasons outside of the model.
        **options: arguments of `scipy.optimize.least_squares`.
    """
    check_installed("scipy", "calibrate")
    import numpy as np
    from scipy.optimize import least_squares

    start = np.log(priors)

    def residuals(logarithms):
        scaled = log_errors(np.exp(logarithms).tolist()) / row_spread
        soft = np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled * scaled) - 1))
        return np.concatenate([soft, (logarithms - start) / np.asarray(widths)])

    return np.exp(least_squares(residuals, start, diff_step=1e-3, **options).x).tolist()


def replace_values(constants: Any, path: str | os.PathLike) -> None:
    """Replaces the column `value` of a table of constants; keeps the other columns.

    Args:
        constants: a dataclass with an attribute for each row.
        path: path of the table, which has the columns `name` and `value`.
    """
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow({**row, "value": f"{getattr(constants, row['name']):.4g}"})
