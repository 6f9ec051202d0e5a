"""Measurements as Markdown tables, which are readable in a terminal, too."""

import dataclasses
import datetime
import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence

from benchmarks.rivals.workload import Workload

OURS = "kdist fit"


@dataclasses.dataclass(frozen=True)
class Row:
    """Measurements of one variant.

    Attributes:
        rival: the rival that the variant belongs to; `OURS` is kdist.
        name: name of the variant.
        steps_per_call: steps in one call from Python.
        times: milliseconds per step, one value per repetition.
    """

    rival: str
    name: str
    steps_per_call: int
    times: Sequence[float]

    @property
    def full_name(self) -> str:
        return f"{self.name}, {self.steps_per_call} per call"

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def times_as_fast_as(self, other: "Row") -> float:
        """Returns the median of the ratios within each repetition."""
        pairs = zip(other.times, self.times, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def title(workload: Workload) -> str:
    """Returns model, local batch size × replicas, and precision."""
    batch = f"{workload.local_batch_size} × {workload.replicas}"
    return f"## {workload.model}, {batch}, {workload.precision}"


def comparison(workload: Workload, rows: Sequence[Row]) -> str:
    """Returns the table of one workload: a row per variant, and the relative speed of kdist."""
    ours = [row for row in rows if row.rival == OURS]
    head = ["", "steps per call", "ms per step", "min–max"]
    head += [f"kdist, {row.steps_per_call} per call, is" for row in ours]
    lines = [_line(row, ours) for row in rows]
    return "\n\n".join([title(workload), markdown([head, *lines]), *_best(rows, ours)])


def _line(row, ours):
    spread = f"{min(row.times):.2f}–{max(row.times):.2f}"
    ratios = [f"{our.times_as_fast_as(row):.2f} × as fast" for our in ours]
    return [row.name, str(row.steps_per_call), f"{row.median:.2f}", spread, *ratios]


def _best(rows, ours):
    """Returns a line of ratios between the fastest variants, or nothing to compare."""
    rivals = dict.fromkeys(row.rival for row in rows if row.rival != OURS)
    if not ours or not rivals:
        return []
    our_best = min(ours, key=lambda row: row.median)
    ratios = []
    for rival in rivals:
        best = min((row for row in rows if row.rival == rival), key=lambda row: row.median)
        ratios.append(f"{our_best.times_as_fast_as(best):.2f} × as fast as {best.full_name}")
    return [f"Fastest variants: {our_best.full_name}, is {'; '.join(ratios)}."]


def operations(answer: Mapping, workload: Workload, most: int = 20) -> str:
    """Returns the table of the operations that take longest.

    Args:
        answer: a rival's answer under the profiler.
        workload: the profiled workload.
        most: maximum number of operations.
    """
    steps, found = workload.steps, answer["operations"]
    total = sum(milliseconds for _, _, milliseconds in found) / steps
    lines = [
        [kind, f"{calls / steps:.1f}", f"{ms / steps:.3f}", f"{ms / steps / total:.0%}"]
        for kind, calls, ms in found[:most]
    ]
    spent = (
        f"{answer['ms_per_step']:.2f} ms per step under the profiler on {workload.cores} cores; "
        f"these take {total:.2f} ms, counted on each core. The rest is operations too small for "
        "TensorFlow to trace, their scheduling, tf.data, Python, and waiting."
    )
    head = ["operation", "calls per step", "ms per step", "of all operations"]
    return f"{markdown([head, *lines])}\n\n{spent}"


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table. The first row is the head; later columns align right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(texts):
        first, *others = zip(texts, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = "|--|" + "--:|" * (len(widths) - 1)
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def save(
    text: str,
    directory: pathlib.Path,
    root: pathlib.Path,
    about: Mapping[str, object],
    title: str = "Training compared",
) -> pathlib.Path:
    """Writes the tables to a file named after day and commit, or appends them to it.

    Args:
        text: the tables.
        directory: directory of the file; created if it does not exist.
        root: repository whose commit was measured.
        about: what the reader has to know besides commit and machine.
        title: heading of the file.

    Returns:
        The file.
    """
    now, name = datetime.datetime.now(), commit(root)
    facts = {"commit": name, "machine": machine(), **about}
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{now:%Y-%m-%d}-{name.split()[0]}.md"
    with path.open("a") as file:
        file.write(f"# {title}, {now:%Y-%m-%d %H:%M}\n\n{lines}\n\n{text}\n\n")
    return path


def machine() -> str:
    """Returns the processor's name and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    information = pathlib.Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def commit(root: pathlib.Path) -> str:
    """Returns the commit's short name, with a remark if files were modified."""

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "kdist", "benchmarks/*.py")
        return git("rev-parse", "--short", "HEAD") + " with changes" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
