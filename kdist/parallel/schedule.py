"""In which order the stages of a pipeline work on micro-batches, and how long they wait.

    for work in merged_order("1f1b", stages=2, micro_batches=4):
        ...                              # Work(stage=0, micro_batch=0, is_backward=False), …

Two schedules, both of which go through all micro-batches before the weights are updated, so that
the result is that of the whole batch:

- `"gpipe"` (Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
  Parallelism", 2019): all micro-batches forward, then all back. A stage holds the activations of
  all M micro-batches.
- `"1f1b"` (PipeDream-flush: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
  2021; used by Megatron-LM, Narayanan et al., "Efficient Large-Scale Language Model Training on
  GPU Clusters Using Megatron-LM", 2021): stage s of S goes forward S - s times, then back and
  forward in turn. It holds the activations of at most S - s micro-batches, and waits as long.

Either can recompute (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; GPipe,
section 2.1): a stage keeps what a micro-batch brings to it, and goes forward with that again before
it goes back, but for where it goes back at once. It holds the activations of one micro-batch.

Imports no TensorFlow.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from kdist.layout import SCHEDULES


@dataclasses.dataclass(frozen=True)
class Work:
    """What a stage does with a micro-batch.

    Attributes:
        stage: from 0.
        micro_batch: from 0.
        is_backward: it computes gradients; otherwise activations.
        is_again: it computes activations for the second time.
    """

    stage: int
    micro_batch: int
    is_backward: bool
    is_again: bool = False

    @property
    def kind(self) -> str:
        """One of "forward", "recompute" and "backward"; scopes of operations begin with it."""
        return "backward" if self.is_backward else "recompute" if self.is_again else "forward"

    def __str__(self):
        return f"{self.kind[0].upper()}{self.micro_batch}@{self.stage}"

    def needs(self, stages: int) -> Iterator["Work"]:
        """What has to be done before it, whatever the schedule."""
        if self.is_backward or self.is_again:
            yield Work(self.stage, self.micro_batch, False)
        elif self.stage:
            yield Work(self.stage - 1, self.micro_batch, False)
        if self.is_backward and self.stage + 1 < stages:
            yield Work(self.stage + 1, self.micro_batch, True)


@dataclasses.dataclass(frozen=True)
class TimedWork:
    """When a piece of work was done.

    Attributes:
        work: what was done.
        start: seconds.
        end: seconds, by the same clock.
    """

    work: Work
    start: float
    end: float


def stage_order(
    schedule: str, stages: int, micro_batches: int, stage: int, recompute: bool = False
) -> list[Work]:
    """What one stage does, one after the other.

    Args:
        schedule: one of `kdist.layout.SCHEDULES`.
        stages: S, from 1 on.
        micro_batches: M, from 1 on.
        stage: which one, from 0.
        recompute: it goes forward again before it goes back.

    Raises:
        ValueError: an unknown schedule, or a number that is too small or too large.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: there are {' and '.join(SCHEDULES)}")
    if micro_batches < 1 or not 0 <= stage < stages:
        raise ValueError(
            f"stage {stage} of {stages} with {micro_batches} micro-batches: stages are numbered "
            "from 0, and there is one micro-batch at least"
        )
    ahead = micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
    order = [Work(stage, number, False) for number in range(ahead)]
    for number in range(micro_batches):
        order.append(Work(stage, number, True))
        if ahead + number < micro_batches:
            order.append(Work(stage, ahead + number, False))
    return _with_recomputation(order) if recompute else order


def _with_recomputation(order):
    """A stage's order in which it goes forward again, where it would not go back at once."""
    longer: list[Work] = []
    for work in order:
        forward = Work(work.stage, work.micro_batch, False)
        if work.is_backward and longer[-1] != forward:
            longer.append(dataclasses.replace(forward, is_again=True))
        longer.append(work)
    return longer


def merged_order(
    schedule: str, stages: int, micro_batches: int, recompute: bool = False
) -> list[Work]:
    """The work of all stages, each piece after all that it needs; arguments as `stage_order`'s."""
    waiting = [
        stage_order(schedule, stages, micro_batches, stage, recompute) for stage in range(stages)
    ]
    merged: dict[Work, None] = {}
    while any(waiting):
        for own in waiting:
            if own and all(needed in merged for needed in own[0].needs(stages)):
                merged[own.pop(0)] = None
    return list(merged)


def bubble_share(stages: int, micro_batches: int) -> float:
    """The share of the stages' time in which they wait, if all take equally long.

    (S - 1) / (M + S - 1), for both schedules (GPipe, section 2.3; Megatron-LM, section 2.2, gives
    the ratio to the time of work, (S - 1) / M).

    Args:
        stages: S.
        micro_batches: M.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def simulated_timeline(
    schedule: str,
    micro_batches: int,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    recompute: bool = False,
) -> list[TimedWork]:
    """When each piece of work begins and ends, if each begins as soon as it can.

    What it takes to send something from stage to stage counts nothing.

    Args:
        schedule: one of `kdist.layout.SCHEDULES`.
        micro_batches: M.
        forward_seconds: of each stage, for one micro-batch.
        backward_seconds: as long.
        recompute: stages go forward again before they go back.
    """
    stages = len(forward_seconds)
    ended: dict[Work, float] = {}
    free = [0.0] * stages
    timeline = []
    for work in merged_order(schedule, stages, micro_batches, recompute):
        start = max([free[work.stage], *(ended[needed] for needed in work.needs(stages))])
        seconds = backward_seconds if work.is_backward else forward_seconds
        ended[work] = free[work.stage] = start + seconds[work.stage]
        timeline.append(TimedWork(work, start, ended[work]))
    return timeline


def waiting_share(timeline: Sequence[TimedWork]) -> float:
    """The share of the stages' time, from the first start to the last end, in which they wait."""
    stages = {timed.work.stage for timed in timeline}
    span = max(timed.end for timed in timeline) - min(timed.start for timed in timeline)
    busy = sum(timed.end - timed.start for timed in timeline)
    return 1.0 - busy / (len(stages) * span) if span else 0.0


def overlapped_share(timeline: Sequence[TimedWork]) -> float:
    """The share of the time, from first start to last end, in which two stages or more work."""
    moments = sorted(moment for timed in timeline for moment in ((timed.start, 1), (timed.end, -1)))
    working, since, overlapped = 0, moments[0][0], 0.0
    for time, change in moments:
        overlapped += (time - since) * (working > 1)
        working, since = working + change, time
    span = moments[-1][0] - moments[0][0]
    return overlapped / span if span else 0.0


def peak_live(order: Sequence[Work]) -> int:
    """The most micro-batches whose activations a stage holds, by its order of work.

    Of one that it will go forward with again, it holds only what it has taken.
    """
    repeated = {work.micro_batch for work in order if work.is_again}
    live = peak = 0
    for work in order:
        if work.is_backward:
            live -= 1
        elif work.is_again or work.micro_batch not in repeated:
            live += 1
        peak = max(peak, live)
    return peak
