"""Order in which pipeline stages process micro-batches, and how long they wait.

    for work in merged_order("1f1b", stages=2, micro_batches=4):
        ...                         # StageWork(stage=0, micro_batch=0, is_backward=False), …

Both schedules process all micro-batches before the weights are updated, so that the result is that
of the whole batch:

- `"gpipe"` (Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
  Parallelism", 2019): the forward passes of all micro-batches, then all backward passes. A stage
  holds the activations of all M micro-batches.
- `"1f1b"` (PipeDream-flush: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
  2021; used by Megatron-LM, Narayanan et al., "Efficient Large-Scale Language Model Training on
  GPU Clusters Using Megatron-LM", 2021): stage s of S starts with S - s forward passes, then
  alternates backward and forward passes. It holds the activations of at most S - s micro-batches,
  and waits as long as under GPipe.

Both can recompute activations (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016;
GPipe, section 2.1). A stage keeps only its inputs of a micro-batch, and repeats the forward pass
before the backward pass, unless one directly follows the other. It holds the activations of one
micro-batch.

Imports no TensorFlow.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from kdist.layout import SCHEDULES


@dataclasses.dataclass(frozen=True)
class StageWork:
    """One pass of a micro-batch through a stage; both are numbered from 0."""

    stage: int
    micro_batch: int
    is_backward: bool  # whether it computes gradients; otherwise activations
    is_again: bool = False  # whether it computes activations for the second time

    @property
    def kind(self) -> str:
        """One of "forward", "recompute" and "backward"; prefix of the scopes of operations."""
        return "backward" if self.is_backward else "recompute" if self.is_again else "forward"

    def __str__(self):
        return f"{self.kind[0].upper()}{self.micro_batch}@{self.stage}"

    def needs(self, stages: int) -> Iterator["StageWork"]:
        """Yields the passes that must run before this one, under any schedule."""
        if self.is_backward or self.is_again:
            yield StageWork(self.stage, self.micro_batch, False)
        elif self.stage:
            yield StageWork(self.stage - 1, self.micro_batch, False)
        if self.is_backward and self.stage + 1 < stages:
            yield StageWork(self.stage + 1, self.micro_batch, True)


@dataclasses.dataclass(frozen=True)
class TimedWork:
    """A pass, and its start and end in seconds by the same clock."""

    work: StageWork
    start: float
    end: float


def stage_order(
    schedule: str, stages: int, micro_batches: int, stage: int, recompute: bool = False
) -> list[StageWork]:
    """Returns the passes of one stage in order; stages are numbered from 0.

    A stage that recomputes repeats forward passes. Raises ValueError if the schedule is not in
    `kdist.layout.SCHEDULES`, or a number is out of range.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown. Use {' or '.join(SCHEDULES)}")
    if micro_batches < 1 or not 0 <= stage < stages:
        raise ValueError(
            f"stage {stage} of {stages} with {micro_batches} micro-batches: stages are numbered "
            "from 0, and at least one micro-batch is needed"
        )
    warmup = micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
    order = [StageWork(stage, number, False) for number in range(warmup)]
    for number in range(micro_batches):
        order.append(StageWork(stage, number, True))
        if warmup + number < micro_batches:
            order.append(StageWork(stage, warmup + number, False))
    return _with_recomputation(order) if recompute else order


def _with_recomputation(order):
    """Returns a stage's order with second forward passes, unless backward directly follows."""
    longer: list[StageWork] = []
    for work in order:
        forward = StageWork(work.stage, work.micro_batch, False)
        if work.is_backward and longer[-1] != forward:
            longer.append(dataclasses.replace(forward, is_again=True))
        longer.append(work)
    return longer


def merged_order(
    schedule: str, stages: int, micro_batches: int, recompute: bool = False
) -> list[StageWork]:
    """Returns the passes of all stages, each after those that it needs."""
    waiting = [
        stage_order(schedule, stages, micro_batches, stage, recompute) for stage in range(stages)
    ]
    merged: dict[StageWork, None] = {}
    while any(waiting):
        for own in waiting:
            if own and all(needed in merged for needed in own[0].needs(stages)):
                merged[own.pop(0)] = None
    return list(merged)


def bubble_share(stages: int, micro_batches: int) -> float:
    """Returns the fraction of the stages' time in which they wait if all take equally long.

    (S - 1) / (M + S - 1) for both schedules (GPipe, section 2.3). Megatron-LM, section 2.2, states
    the ratio to the time of work, (S - 1) / M.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def simulated_timeline(
    schedule: str,
    micro_batches: int,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    recompute: bool = False,
) -> list[TimedWork]:
    """Returns start and end of each pass if each starts as early as possible.

    Seconds of a micro-batch's forward and backward pass are given per stage. Transfers between
    stages take no time.
    """
    stages = len(forward_seconds)
    ended: dict[StageWork, float] = {}
    free = [0.0] * stages
    timeline = []
    for work in merged_order(schedule, stages, micro_batches, recompute):
        start = max([free[work.stage], *(ended[needed] for needed in work.needs(stages))])
        seconds = backward_seconds if work.is_backward else forward_seconds
        ended[work] = free[work.stage] = start + seconds[work.stage]
        timeline.append(TimedWork(work, start, ended[work]))
    return timeline


def waiting_share(timeline: Sequence[TimedWork]) -> float:
    """Returns the fraction of the stages' time, from first start to last end, spent waiting."""
    stages = {timed.work.stage for timed in timeline}
    span = max(timed.end for timed in timeline) - min(timed.start for timed in timeline)
    busy = sum(timed.end - timed.start for timed in timeline)
    return 1.0 - busy / (len(stages) * span) if span else 0.0


def overlapped_share(timeline: Sequence[TimedWork]) -> float:
    """Returns the fraction of the time, from first start to last end, when several stages work."""
    moments = sorted(moment for timed in timeline for moment in ((timed.start, 1), (timed.end, -1)))
    working, since, overlapped = 0, moments[0][0], 0.0
    for time, change in moments:
        overlapped += (time - since) * (working > 1)
        working, since = working + change, time
    span = moments[-1][0] - moments[0][0]
    return overlapped / span if span else 0.0


def peak_live(order: Sequence[StageWork]) -> int:
    """Returns the maximum number of micro-batches whose activations a stage holds at once.

    Of a micro-batch that is recomputed, it holds only the inputs until the second forward pass.
    """
    recomputed = {work.micro_batch for work in order if work.is_again}
    live = peak = 0
    for work in order:
        if work.is_backward:
            live -= 1
        elif work.is_again or work.micro_batch not in recomputed:
            live += 1
        peak = max(peak, live)
    return peak
