"""Schedules of a pipeline: each pass once and in order; waiting and memory as published."""

import itertools

import pytest

from kdist.layout import SCHEDULES
from kdist.parallel.pipeline.schedule import (
    StageWork,
    TimedWork,
    bubble_share,
    merged_order,
    overlapped_share,
    peak_live,
    simulated_timeline,
    stage_order,
    waiting_share,
)

SIZES = [(stages, micro) for stages in (1, 2, 3, 4, 7) for micro in (1, 2, 3, 4, 8, 13)]
every_size = pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
both = pytest.mark.parametrize("schedule", SCHEDULES)


def all_work(stages, micro_batches):
    return {
        StageWork(stage, number, is_backward)
        for stage in range(stages)
        for number in range(micro_batches)
        for is_backward in (False, True)
    }


@both
@every_size
def test_each_piece_comes_once_and_after_what_it_needs(schedule, stages, micro_batches):
    order = merged_order(schedule, stages, micro_batches)
    assert len(order) == len(set(order))
    assert set(order) == all_work(stages, micro_batches)
    place = {work: number for number, work in enumerate(order)}
    for work in order:
        for needed in work.needs(stages):
            assert place[needed] < place[work], (needed, work)


@both
@every_size
def test_the_merged_order_keeps_that_of_each_stage(schedule, stages, micro_batches):
    order = merged_order(schedule, stages, micro_batches)
    for stage in range(stages):
        own = [work for work in order if work.stage == stage]
        assert own == stage_order(schedule, stages, micro_batches, stage)


@both
@every_size
def test_gradients_are_added_in_the_order_of_micro_batches(schedule, stages, micro_batches):
    for stage in range(stages):
        order = stage_order(schedule, stages, micro_batches, stage)
        for is_backward in (False, True):
            numbers = [work.micro_batch for work in order if work.is_backward == is_backward]
            assert numbers == list(range(micro_batches))


@every_size
def test_live_activations(stages, micro_batches):
    for stage in range(stages):
        one_by_one = stage_order("1f1b", stages, micro_batches, stage)
        assert peak_live(one_by_one) == min(stages - stage, micro_batches)
        assert peak_live(stage_order("gpipe", stages, micro_batches, stage)) == micro_batches


@both
@every_size
def test_recomputation(schedule, stages, micro_batches):
    """Just before a stage goes back, unless it has just gone forward; one micro-batch is live."""
    for stage in range(stages):
        plain = stage_order(schedule, stages, micro_batches, stage)
        order = stage_order(schedule, stages, micro_batches, stage, recompute=True)
        assert [work for work in order if not work.is_again] == plain
        for before, work in itertools.pairwise(order):
            if work.is_backward:
                assert before.kind in ("forward", "recompute")
                assert before.micro_batch == work.micro_batch
        assert peak_live(order) == 1
    merged = merged_order(schedule, stages, micro_batches, recompute=True)
    place = {work: number for number, work in enumerate(merged)}
    for work in merged:
        assert all(place[needed] < place[work] for needed in work.needs(stages))


def test_recomputation_by_hand():
    order = stage_order("1f1b", 2, 3, 0, recompute=True)
    assert [str(work)[:2] for work in order] == [
        "F0",
        "F1",
        "R0",
        "B0",
        "F2",
        "R1",
        "B1",
        "R2",
        "B2",
    ]
    timeline = simulated_timeline("gpipe", 2, [1.0], [2.0], recompute=True)
    assert [timed.start for timed in timeline] == [0, 1, 2, 3, 5, 6]


@both
@pytest.mark.parametrize("backward", [1.0, 2.0, 0.5])
@every_size
def test_equal_stages_wait_as_the_formula_says(schedule, stages, micro_batches, backward):
    timeline = simulated_timeline(schedule, micro_batches, [1.0] * stages, [backward] * stages)
    assert waiting_share(timeline) == pytest.approx(bubble_share(stages, micro_batches))
    span = max(timed.end for timed in timeline)
    assert span == pytest.approx((micro_batches + stages - 1) * (1 + backward))


@both
def test_unequal_stages(schedule):
    """The slowest stage sets the pace: 8 micro-batches of 3 + 6 s, and the others' way there."""
    timeline = simulated_timeline(schedule, 8, [1.0, 3.0, 1.0], [2.0, 6.0, 2.0])
    span = max(timed.end for timed in timeline)
    assert span >= 8 * 9.0 + 1.0 + 2.0
    assert waiting_share(timeline) > bubble_share(3, 8)
    by_stage = {}
    for timed in timeline:
        assert timed.start >= by_stage.get(timed.work.stage, 0.0)  # one after the other
        by_stage[timed.work.stage] = timed.end
    ends = {timed.work: timed.end for timed in timeline}
    for timed in timeline:
        assert all(ends[needed] <= timed.start for needed in timed.work.needs(3))


def test_a_timeline_by_hand():
    """Two stages, two micro-batches, 1 s forward and 2 s back, 1F1B."""
    timeline = {
        str(timed.work): (timed.start, timed.end)
        for timed in simulated_timeline("1f1b", 2, [1.0, 1.0], [2.0, 2.0])
    }
    assert timeline == {
        "F0@0": (0, 1),
        "F0@1": (1, 2),
        "F1@0": (1, 2),
        "B0@1": (2, 4),
        "F1@1": (4, 5),
        "B0@0": (4, 6),
        "B1@1": (5, 7),
        "B1@0": (7, 9),
    }


def test_overlap():
    def timed(stage, start, end):
        return TimedWork(StageWork(stage, 0, False), start, end)

    assert overlapped_share([timed(0, 0.0, 1.0), timed(1, 1.0, 2.0)]) == 0.0
    assert overlapped_share([timed(0, 0.0, 2.0), timed(1, 1.0, 4.0)]) == pytest.approx(0.25)
    assert overlapped_share([timed(0, 0.0, 2.0), timed(1, 0.0, 2.0)]) == 1.0
    assert overlapped_share([timed(0, 0.0, 3.0), timed(1, 0.0, 3.0), timed(2, 1.0, 3.0)]) == 1.0
    one_after_the_other = simulated_timeline("gpipe", 1, [1.0, 1.0], [2.0, 2.0])
    assert overlapped_share(one_after_the_other) == 0.0
    assert overlapped_share(simulated_timeline("gpipe", 8, [1.0, 1.0], [2.0, 2.0])) > 0.7


def test_what_is_refused():
    with pytest.raises(ValueError, match="1f1b or gpipe"):
        stage_order("interleaved", 2, 2, 0)
    with pytest.raises(ValueError, match="numbered from 0"):
        stage_order("gpipe", 2, 2, 2)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        merged_order("1f1b", 2, 0)
