"""What runs have measured, in the user's own table: it sharpens the next prediction.

    table = Measurements.read("~/.kdist/measurements.csv")
    table.correction("resnet50", "V100 SXM2 16GB", "float32")    # 1.12: it takes 12 % longer

A row is one run: what its plan predicted for the computation of a micro-step, and what the measured
rate says that it took.
"""

import csv
import dataclasses
import datetime
import math
import os
import pathlib

from kdist.planner.tables import number, read_table, text

DEFAULT_PATH = "~/.kdist/measurements.csv"
_COLUMNS = {
    "as_of": text,
    "model": text,
    "gpu": text,
    "precision": text,
    "machine": text,
    "strategy": text,
    "replicas": number,
    "local_batch": number,
    "examples_per_second": number,
    "predicted_examples_per_second": number,
    "micro_step_seconds": number,
    "predicted_micro_step_seconds": number,
}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A run's measured rate, beside what was predicted. See the columns of the table.

    Attributes:
        as_of: the date.
        model: its name.
        gpu: that it ran on.
        precision: a Keras dtype policy.
        machine: the kind of machine.
        strategy: the name of the strategy.
        replicas: in all.
        local_batch: examples of a replica in a micro-step.
        examples_per_second: measured.
        predicted_examples_per_second: by kdist alone, without any measurement.
        micro_step_seconds: of the computation, as the measured rate says.
        predicted_micro_step_seconds: by kdist alone.
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
        """ln(measured / predicted) of the computation."""
        return math.log(self.micro_step_seconds / self.predicted_micro_step_seconds)


@dataclasses.dataclass(frozen=True)
class Measurements:
    """All rows of a table."""

    rows: tuple[Measurement, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike = DEFAULT_PATH) -> "Measurements":
        """The table at `path`; none where there is no such file.

        Raises:
            ValueError: the file is no such table.
        """
        path = pathlib.Path(path).expanduser()
        if not path.exists():
            return cls()
        return cls(tuple(Measurement(**row) for row in read_table(path, _COLUMNS)))

    def correction(self, model: str, gpu: str, precision: str) -> float:
        """By what the predicted computation is to be multiplied.

        Runs of the same model, GPU and precision say it alone: their geometric mean. Without any,
        those of other models on this GPU say it for what they share, half of it for one run, two
        thirds for two, as ln f = Σ ln(measured / predicted) / (n + 1).
        """
        on_gpu = [row for row in self.rows if row.gpu == gpu]
        same = [row for row in on_gpu if (row.model, row.precision) == (model, precision)]
        if same:
            return math.exp(sum(row.log_error for row in same) / len(same))
        return math.exp(sum(row.log_error for row in on_gpu) / (len(on_gpu) + 1))


def add(measurement: Measurement, path: str | os.PathLike = DEFAULT_PATH) -> pathlib.Path:
    """Adds a row to the table at `path`, which is made if it is not there; gives its path."""
    path = pathlib.Path(path).expanduser()
    Measurements.read(path)  # what is no such table is not written to
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(_COLUMNS))
        if is_new:
            writer.writeheader()
        writer.writerow(dataclasses.asdict(measurement))
    return path


def today() -> str:
    """The date of a row."""
    return datetime.date.today().isoformat()
