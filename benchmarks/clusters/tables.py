"""Results as Markdown: a table per part, with ratios and targets."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.clusters.parts import Goal, Part
from benchmarks.tables import markdown


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A goal and its measured values.

    Attributes:
        goal: the goal.
        values: one value per repetition, during which the machine is the same for both trials.
    """

    goal: Goal
    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def verdict(self) -> str:
        """Returns whether the goal is met; "" if it has no target."""
        if self.goal.at_least is None:
            return ""
        return "met" if self.median >= self.goal.at_least else "missed"

    def line(self) -> str:
        """Returns "- multi_worker's rate …: 0.81 (0.79 to 0.83); target ≥ 0.7: met"."""
        spread = f"{min(self.values):.2f} to {max(self.values):.2f}"
        verdict = f": {self.verdict}" if self.verdict else ""
        return (
            f"- {self.goal.what}: {self.median:.2f} ({spread}); target {self.goal.target}{verdict}"
        )


Answers = Mapping[str, Sequence[Mapping]]


def outcomes(part: Part, answers: Answers) -> list[Outcome]:
    """Returns the outcomes of those goals of the part whose trials have all been run.

    Args:
        part: the part with its goals.
        answers: answers by the name of the trial, one per repetition.
    """
    return [
        Outcome(goal, list(map(goal.value, answers[goal.ours], answers[goal.theirs])))
        for goal in part.goals
        if goal.ours in answers and goal.theirs in answers
    ]


def text(part: Part, answers: Answers) -> str:
    """Returns the complete text about a part; arguments as for `outcomes`."""
    lines = [outcome.line() for outcome in outcomes(part, answers)]
    parts = [f"## {part.title}", part.about, table(part, answers), "\n".join(lines)]
    return "\n\n".join(filter(None, parts))


def table(part: Part, answers: Answers) -> str:
    """Returns a row for each trial: medians of the repetitions."""
    with_accuracy = any("accuracy" in found[0] for found in answers.values())
    head = ["", "steps per call", "ms per step", "examples/s", "min–max"]
    head += ["test accuracy"] if with_accuracy else []
    return markdown([head, *(_row(part, name, found) for name, found in answers.items())])


def _row(part, name, found):
    rates = [answer["examples_per_second"] for answer in found]
    milliseconds = statistics.median(answer["ms_per_step"] for answer in found)
    cells = [
        name,
        str(part.trials[name].workload.steps_per_call),
        f"{milliseconds:.2f}",
        f"{statistics.median(rates):,.0f}",
        f"{min(rates):,.0f}–{max(rates):,.0f}",
    ]
    if "accuracy" in found[0]:
        cells.append(f"{statistics.median(answer['accuracy'] for answer in found):.4f}")
    return cells
