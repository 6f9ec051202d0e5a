"""The user's table of measured runs, which corrects the next predictions.

    table = Measurements.read("~/.kdist/measurements.csv")
    table.correction("resnet50", "V100 SXM2 16GB", "float32")    # 1.12: 12 % longer than predicted

A row is one run: the predicted compute time of a micro-step, and the one that follows from the
measured rate.
"""

import csv
import dataclasses
import math
import os
import pathlib

from kdist.planner.tables.read import number, read_table, text

DEFAULT_PATH = "~/.kdist/measurements.csv"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Measured and predicted rate of one run; a row of the table.

    The predictions are made without any measurement. `micro_step_seconds` is the compute time that
    follows from the measured rate.
    """

    as_of: str
    model: str
    gpu: str
    precision: str
    machine: str
    strategy: str
    replicas: float
    local_batch: float
    examples_per_second: float
    predicted_examples_per_second: float
    micro_step_seconds: float
    predicted_micro_step_seconds: float

    @property
    def log_error(self) -> float:
        """Logarithm of measured / predicted compute time."""
        return math.log(self.micro_step_seconds / self.predicted_micro_step_seconds)


_COLUMNS = {
    field.name: text if field.type is str else number for field in dataclasses.fields(Measurement)
}


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Table of measured runs.

    Example:

        >>> Measurements().correction("resnet50", "V100 SXM2 16GB", "float32")
        1.0

    Args:
        rows: All rows. Defaults to none.
    """

    rows: tuple[Measurement, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike = DEFAULT_PATH) -> "Measurements":
        """Reads the table at `path`; a missing file is an empty table.

        Raises:
            ValueError: If the file is no such table.
        """
        path = pathlib.Path(path).expanduser()
        if not path.exists():
            return cls()
        return cls(tuple(Measurement(**row) for row in read_table(path, _COLUMNS)))

    def correction(self, model: str, gpu: str, precision: str) -> float:
        """Returns the factor by which to multiply the predicted compute time.

        It is the geometric mean over runs of the same model, GPU, and precision. Without any, other
        models on this GPU contribute what they share: ln f = Σ ln(measured / predicted) / (n + 1),
        half of it for one run, two thirds for two.
        """
        on_gpu = [row for row in self.rows if row.gpu == gpu]
        same = [row for row in on_gpu if (row.model, row.precision) == (model, precision)]
        if same:
            return math.exp(sum(row.log_error for row in same) / len(same))
        return math.exp(sum(row.log_error for row in on_gpu) / (len(on_gpu) + 1))


def add_measurement(
    measurement: Measurement, path: str | os.PathLike = DEFAULT_PATH
) -> pathlib.Path:
    """Appends a row to the table at `path`, and creates the table if needed.

    Returns:
        The path.

    Raises:
        ValueError: If the file is no such table.
    """
    path = pathlib.Path(path).expanduser()
    Measurements.read(path)  # raises before a file of another kind is changed
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(_COLUMNS))
        if is_new:
            writer.writeheader()
        writer.writerow(dataclasses.asdict(measurement))
    return path
