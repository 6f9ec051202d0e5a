"""What was measured as Markdown: a table for each part, and its ratios beside their targets."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.clusters.parts import Goal, Part
from benchmarks.tables import markdown


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A goal and what became of it.

    Attributes:
        goal: what was to be reached.
        values: one for each repetition, in which the machine was the same for both.
    """

    goal: Goal
    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def verdict(self) -> str:
        """Whether the goal is met; "" if it is none that could be missed."""
        if self.goal.at_least is None:
            return ""
        return "met" if self.median >= self.goal.at_least else "missed"

    def line(self) -> str:
        """Such as "- multi_worker's rate …: 0.81 (0.79 to 0.83); target ≥ 0.7: met"."""
        spread = f"{min(self.values):.2f} to {max(self.values):.2f}"
        verdict = f": {self.verdict}" if self.verdict else ""
        return (
            f"- {self.goal.what}: {self.median:.2f} ({spread}); target {self.goal.target}{verdict}"
        )


Answers = Mapping[str, Sequence[Mapping]]


def outcomes(part: Part, answers: Answers) -> list[Outcome]:
    """What became of the part's goals; of those whose trials have all been run.

    Args:
        part: with its goals.
        answers: by the name of the trial, one for each repetition.
    """
    return [
        Outcome(goal, list(map(goal.value, answers[goal.ours], answers[goal.theirs])))
        for goal in part.goals
        if goal.ours in answers and goal.theirs in answers
    ]


def text(part: Part, answers: Answers) -> str:
    """All that there is to say about a part; arguments as of `outcomes`."""
    lines = [outcome.line() for outcome in outcomes(part, answers)]
    parts = [f"## {part.title}", part.about, table(part, answers), "\n".join(lines)]
    return "\n\n".join(filter(None, parts))


def table(part: Part, answers: Answers) -> str:
    """A row for each trial: medians of the repetitions."""
    with_accuracy = any("accuracy" in found[0] for found in answers.values())
    head = ["", "steps a call", "ms a step", "examples/s", "min–max"]
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
