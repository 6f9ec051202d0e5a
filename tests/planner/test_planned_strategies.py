"""The strategy that is built from a plan, and what its devices hold."""

import dataclasses

import keras
import pytest

import kdist
from kdist.layout import SHARDS
from kdist.planner.cost.memory import OPTIMIZERS
from kdist.training.optimizers import check_elementwise
from kdist.training.sharding.memory import state_bytes


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


def test_a_plan_with_shards_makes_sharded_replicas(planned):
    layout = kdist.Layout(data=2, shard="weights", accumulate=2)
    strategy = kdist.create_strategy(dataclasses.replace(planned.best, layout=layout))
    assert strategy.num_replicas_in_sync == 2
    assert strategy.layout == dataclasses.replace(layout, accumulate=1)


def odd_network():
    """Returns a model with weights that two and four devices cannot divide evenly."""
    layers = keras.layers
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(51, 7)(inputs))
    x = layers.BatchNormalization()(layers.Dense(37)(x))
    return kdist.Model(inputs, layers.Dense(5)(layers.Dense(1001)(x)))


def transformer():
    return kdist.models.transformer((16,), 10, vocabulary_size=997, width=64, depth=2)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("build", "smallest"), [(odd_network, 64), (transformer, 64 * 1024)])
def test_planned_bytes_of_state_are_those_of_the_devices(build, smallest):
    workload = kdist.planner.read_workload(build())
    predictor = kdist.planner.Predictor(kdist.planner.Job(workload, examples=100, optimizer="adam"))
    for devices, shard in [(2, "weights"), *((4, shard) for shard in SHARDS)]:
        layout = kdist.Layout(data=devices, shard=shard, min_shard_bytes=smallest)
        with kdist.create_strategy(layout).scope():
            model = build()
            model.compile("adam")
            model.optimizer.build(model.trainable_variables)
        planned = predictor.memory(layout, 8)
        numbers = [v for v in model.optimizer.variables if len(v.shape) == 0]
        seeds = [v for v in model.variables if "seed" in v.path]
        for held in state_bytes(model).values():
            assert planned.weights == held.weights - bytes_of(seeds), (shard, devices)
            assert planned.slots == held.optimizer - bytes_of(numbers), (shard, devices)
            assert planned.gathered == held.gathered, (shard, devices)


def bytes_of(variables):
    return sum(v.shape.num_elements() * v.value.dtype.size for v in variables)


def test_optimizers_that_replicas_can_divide_are_those_that_training_accepts():
    named = {name.lower(): name for name in dir(keras.optimizers)}
    for name, memory in OPTIMIZERS.items():
        kind = "sgd" if name in ("momentum", "nesterov") else name
        try:
            check_elementwise(getattr(keras.optimizers, named[kind])(), "", "")
            is_accepted = True
        except ValueError:
            is_accepted = False
        assert memory.is_elementwise == is_accepted, name
