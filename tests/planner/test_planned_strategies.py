"""The strategy that is built from a plan."""

import dataclasses

import pytest

import kdist


@pytest.fixture(scope="module")
def planned():
    return kdist.plan("resnet18", examples=60_000, epochs=2, measurements=None)


def test_the_strategy_of_a_plan_is_the_one_that_was_costed(planned):
    plan = next(plan for plan in planned.plans if plan.layout.strategy == "one_device")
    strategy = kdist.create_strategy(plan)
    assert strategy.num_replicas_in_sync == 1
    with pytest.raises(ValueError, match="the plan determines the devices"):
        kdist.create_strategy(plan, devices=2)


def test_a_plan_for_several_machines_needs_as_many_tasks(planned):
    plan = next(plan for plan in planned.plans if plan.layout.machines == 2)
    with pytest.raises(ValueError, match=r"for 2 machines .* 1 task; .*--workers=2"):
        kdist.create_strategy(plan)


def test_mirrored_on_as_many_devices_as_planned(planned):
    plan = planned.best
    two = dataclasses.replace(plan.layout, data=2, machines=1)
    strategy = kdist.create_strategy(dataclasses.replace(plan, layout=two))
    assert strategy.num_replicas_in_sync == 2


def test_a_plan_with_a_split_layout_makes_device_groups(planned):
    layout = kdist.Layout(data=2, pipeline=2, micro_batches=4)
    split = dataclasses.replace(layout, accumulate=2)
    strategy = kdist.create_strategy(dataclasses.replace(planned.best, layout=split))
    assert strategy.layout == layout


def test_memory_of_a_split_plan_covers_that_of_the_placement():
    model = kdist.models.create("lenet", input_shape=(28, 28, 1), num_classes=10)
    layout = kdist.Layout(pipeline=2, micro_batches=2)
    placed = kdist.parallel.suggest(model, layout, batch_size=64).device_gb
    job = kdist.planner.Job(kdist.planner.read_workload(model), examples=60_000, optimizer="adam")
    planned = kdist.planner.Predictor(job).memory(layout, 64)
    # The placement counts no temporaries, and no memory of CUDA.
    assert placed < (planned.total - planned.framework) / 1e9 < 2 * placed
