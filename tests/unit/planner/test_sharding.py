"""Replicas that divide training state: memory and time by hand, and when a plan chooses them."""

import dataclasses
import itertools
import math
import random
import re

import pytest

from kdist.cluster import Cluster
from kdist.layout import SHARDS, Layout, supported_shards
from kdist.planner import (
    Constraints,
    Job,
    LayerWork,
    Machine,
    Plan,
    Predictor,
    Workload,
    known_workload,
    search,
)
from kdist.planner.cost.memory import estimate_memory
from kdist.planner.cost.sharding import divide_state
from kdist.planner.plans import train_command
from kdist.planner.tables.gpus import find_gpu
from kdist.planner.tables.prices import Offer
from kdist.strategy_spec import resolve

V100 = Machine("v100s", "V100 SXM2 16GB", 4, "nvlink2", True, 100.0, 48.0)
TOLERANCE = 1.02


def offer(machine=V100, usd=20.0):
    return Offer("test", machine.name, machine, usd, usd / 3, "2026", "test")


def dense(number, rows, columns, kept=1e5):
    """A layer with a kernel and a bias."""
    size = float(rows * columns + columns)
    flops = 2.0 * rows * columns
    shapes = ((rows, columns), (columns,))
    return LayerWork(
        f"dense{number}",
        "matmul",
        *(flops, 2 * flops, size, size, kept, 3 * kept, False),
        weight_shapes=shapes,
    )


def network(*layers):
    kept = sum(layer.kept_bytes for layer in layers)
    gradients = 4 * sum(layer.trainable_parameters for layer in layers)
    peaks = ((kept, 0.0), (1e4, gradients))
    applied = ((kept, 0.0), (1e4, gradients / len(layers)))
    return Workload("net", (100,), layers, 400.0, peaks=peaks, peaks_applied=applied)


SMALL = network(dense(0, 1000, 100), dense(1, 1000, 20), dense(2, 200, 30_000))
DIVIDED = 1000 * 100 + 1000 * 20 + 200 * 30_000 + 30_000  # not the biases of 100 and 20
WHOLE = 100 + 20


@pytest.mark.parametrize("shard", SHARDS)
def test_bytes_of_state_by_hand(shard):
    layout = Layout(data=4, shard=shard)
    divided = divide_state(SMALL, layout, 4)
    memory = estimate_memory(SMALL, 8, optimizer="adam", accumulate=2, devices=4, divided=divided)
    whole, part = 4 * (DIVIDED + WHOLE), 4 * (DIVIDED / 4 + WHOLE)
    assert divided.divided == DIVIDED
    assert memory.weights == (part if shard == "weights" else whole)
    assert memory.slots == 2 * part + (0 if shard == "weights" else DIVIDED)
    assert memory.accumulated == (whole if shard == "optimizer" else part)
    gathered = 4 * (200 * 30_000 + 1000 * 100 + 30_000)  # two matrices, and a bias of 120 KB
    assert memory.gathered == (gathered if shard == "weights" else 0)


def test_parts_are_padded():
    work = network(dense(0, 25, 4001), dense(1, 5, 40_001))
    divided = divide_state(work, Layout(data=4, shard="weights"), 4)
    # 25 rows cannot be divided without much padding; elements can. 40,001 is one too many.
    assert divided.own == -(-25 * 4001 // 4) + -(-5 * 40_001 // 4) + -(-40_001 // 4)
    divided = divide_state(network(dense(0, 1001, 100)), Layout(data=4, shard="weights"), 4)
    assert divided.own == 251 * 100


@pytest.mark.parametrize(
    ("shard", "weights", "optimizer", "gathered"),
    [(None, 44.73, 89.41, 0), ("optimizer", 44.73, 33.66, 0), ("weights", 11.29, 22.51, 18.87)],
)
def test_megabytes_are_those_of_kdist_check(shard, weights, optimizer, gathered):
    """Compares with `kdist check --layout=data=4 --model=resnet18` in docs/guides/large_models."""
    divided = divide_state(known_workload("resnet18"), Layout(data=4, shard=shard), 4)
    work = known_workload("resnet18")
    memory = estimate_memory(work, 8, optimizer="adam", devices=4, divided=divided)
    sizes = [memory.weights, memory.slots, memory.gathered]
    assert [size / 1e6 for size in sizes] == pytest.approx(
        [weights, optimizer, gathered], abs=0.006
    )


@pytest.mark.parametrize("accumulate", [1, 4])
def test_traffic_is_that_of_the_zero_paper(accumulate):
    predictor = Predictor(Job(SMALL, examples=1000))
    all_reduce = 4 * (DIVIDED + WHOLE)
    factors = {"optimizer": 2, "gradients": 1 + accumulate, "weights": 3 * accumulate}
    whole = predictor.step(Layout(data=4, accumulate=accumulate), 8, V100)
    (of_all,) = [term.seconds for term in whole.terms if term.name == "exchange in node"]
    for shard, factor in factors.items():
        layout = Layout(data=4, shard=shard, accumulate=accumulate)
        size = 4 * WHOLE + factor / 2 * 4 * DIVIDED
        assert predictor.exchanged(layout).bytes == pytest.approx(size)
        terms = predictor.step(layout, 8, V100).terms
        (seconds,) = [term.seconds for term in terms if term.name == "exchange in node"]
        assert seconds == pytest.approx(of_all * size / all_reduce, rel=1e-5)


def test_the_update_is_divided():
    """Merging parts takes a third of an update, and `"weights"` merges twice in each micro-step."""
    predictor = Predictor(Job(SMALL, examples=1000))

    def update(shard):
        layout = Layout(data=4, shard=shard)
        terms = {t.name: t.seconds for t in predictor.compute(V100.gpu, layout, 8).terms}
        return terms["weights and update"]

    one_pass = update(None) / 9  # three passes over weights, six in the update
    assert update("optimizer") == pytest.approx((3 + 6 / 4 + 2) * one_pass, rel=1e-3)
    assert update("weights") == pytest.approx((3 + 6 / 4 + 4) * one_pass, rel=1e-3)


def test_one_list_says_which_layouts_divide_state():
    layouts = {
        "mirrored": {"data": 2},
        "multi_worker": {"data": 4, "machines": 2},
        "parameter_server": {"data": 2, "machines": 2, "asynchronous": True},
        "split": {"data": 2, "tensor": 2},
    }
    for (strategy, degrees), shard in itertools.product(layouts.items(), SHARDS):
        assert Layout(**degrees).strategy == strategy
        if shard in supported_shards(strategy):
            assert Layout(**degrees, shard=shard).strategy == strategy
        else:
            with pytest.raises(ValueError, match=f"shard={shard}"):
                Layout(**degrees, shard=shard)
    assert supported_shards("mirrored") == SHARDS


def test_machines_divide_weights_within_and_exchange_sums_once():
    predictor = Predictor(Job(SMALL, examples=1000))
    layout = Layout(data=8, machines=2, shard="weights", accumulate=3)
    within = predictor.exchanged(dataclasses.replace(layout, data=4, machines=1))
    exchanged = predictor.exchanged(layout)
    assert dataclasses.replace(exchanged, bytes_between_nodes=None) == within
    assert exchanged.bytes_between_nodes == 4 * (DIVIDED + WHOLE) < exchanged.bytes
    assert predictor.divided(layout).own == DIVIDED / 4
    terms, whole = (
        {term.name: term.seconds for term in predictor.step(each, 8, V100).terms}
        for each in (layout, dataclasses.replace(layout, shard=None))
    )
    assert terms["exchange between nodes"] == pytest.approx(whole["exchange between nodes"])
    assert predictor.shards(dataclasses.replace(layout, shard=None)) == SHARDS


def test_machines_of_one_device_divide_weights_over_all():
    predictor = Predictor(Job(SMALL, examples=1000))
    layout = Layout(data=4, machines=4, shard="weights", accumulate=3)
    exchanged = predictor.exchanged(layout)
    assert exchanged == predictor.exchanged(dataclasses.replace(layout, machines=1))
    assert exchanged.bytes_between_nodes is None
    assert exchanged.bytes > 4 * (DIVIDED + WHOLE)
    assert predictor.divided(layout).own == DIVIDED / 4
    assert predictor.shards(dataclasses.replace(layout, shard=None)) == SHARDS


# Plans.


@pytest.fixture(scope="module")
def too_large():
    """A model whose state under Adam takes 20 GB, 16 bytes of each number."""
    work = network(*(dense(number, 16_000, 10_000) for number in range(8)))
    constraints = Constraints(strategies=("one_device", "mirrored", "sharded"))
    return search(Predictor(Job(work, examples=60_000, optimizer="adam")), [offer()], constraints)


def test_state_that_fits_no_device_is_divided(too_large, tmp_path):
    best = too_large.best
    assert best.layout.shard in SHARDS
    assert best.prediction.memory_bytes < 16e9
    best.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == best
    assert f"--shard={best.layout.shard}" in train_command(best)
    assert train_command(best) in too_large.text()
    page = too_large.write_page(tmp_path / "plan.html").read_text()
    for text in (too_large.text(), page):
        assert "adam needs 16 bytes per trained parameter" in text
        assert f"shard={best.layout.shard}" in text


def test_the_arithmetic_is_that_of_the_memory(too_large):
    best, predictor = too_large.best, too_large.predictor
    state = 16 * predictor.job.workload.trainable_parameters / 1e9
    whole = predictor.memory(dataclasses.replace(best.layout, shard=None), best.local_batch)
    assert f"{state:.2f} GB" in best.derivation
    assert f"needs {whole.total / 1e9:.2f} GB in all, more than the 16 GB" in best.derivation
    assert f"{best.prediction.memory_bytes / 1e9:.2f} GB in all, and" in best.derivation
    lines = [line for line in too_large.explain().splitlines() if line.startswith("memory: ")]
    parts = predictor.memory(best.layout, best.local_batch).parts()
    assert len(lines) == len(parts)
    assert all(re.search(r" GB  = \S", line) for line in lines)


def test_a_plan_runs_with_its_shards(too_large):
    spec = resolve(too_large.best, cluster=Cluster())
    assert (spec.kind, spec.devices) == ("mirrored", too_large.best.layout.data)
    assert spec.layout.shard == too_large.best.layout.shard


def test_the_command_keeps_the_size_of_the_smallest_divided_weight():
    predictor = Predictor(Job(SMALL, examples=1000))
    layout = Layout(data=8, machines=2, shard="weights", min_shard_bytes=1024, accumulate=2)
    command = train_command(predictor.plan(layout, 8, offer()))
    (text,) = re.findall(r"--layout=(\S+)", command)
    assert Layout.parse(text) == layout.degrees
    assert "--accumulate=2" in command
    assert not re.search("--(shard|strategy|num_devices)", command)


def test_sharding_can_be_left_out(too_large):
    constraints = Constraints(strategies=("one_device", "mirrored"))
    with pytest.raises(ValueError, match="memory"):
        search(too_large.predictor, [offer()], constraints)


@pytest.mark.parametrize(
    ("job", "shards"),
    [
        ({}, ("optimizer", "weights")),
        ({"jit_compile": True}, ("optimizer",)),
        ({"optimizer": "lamb"}, ()),
    ],
)
def test_a_job_divides_what_its_training_allows(job, shards):
    predictor = Predictor(Job(SMALL, examples=1000, **job))
    assert predictor.shards(Layout(data=2)) == shards
    with_micro_steps = predictor.shards(Layout(data=2, accumulate=2))
    assert ("gradients" in with_micro_steps) == bool(shards)
    assert predictor.shards(Layout()) == predictor.shards(Layout(data=2, local_steps=4)) == ()


def table(rows, columns):
    """An embedding: rows are looked up, without arithmetic in the backward pass."""
    size = float(rows * columns)
    numbers = (256.0, 0.0, size, size, 1e5, 3e5, False)
    return LayerWork("words", "elementwise", *numbers, weight_shapes=((rows, columns),))


@pytest.mark.parametrize(
    ("rows", "data", "is_divided"), [(30, 4, False), (32, 4, True), (30, 2, True)]
)
def test_tables_whose_rows_cannot_be_divided_are_left_whole_as_in_training(rows, data, is_divided):
    work = network(table(rows, 100_000), dense(0, 1000, 100))
    layout = Layout(data=data, shard="optimizer")
    predictor = Predictor(Job(work, examples=1000))
    assert bool(predictor.shards(Layout(data=data))) == is_divided
    if not is_divided:
        with pytest.raises(ValueError, match=r"words.*30 rows.*min_shard_bytes=12000001"):
            divide_state(work, layout, 4)
        layout = dataclasses.replace(layout, min_shard_bytes=12_000_001)
        assert divide_state(work, layout, 4).divided == 0
    else:
        assert divide_state(work, layout, 4).divided >= rows * 100_000


def test_whole_replicas_stay_whole_where_they_cost_the_same():
    job = Job(known_workload("resnet50"), examples=1_281_167, epochs=90, optimizer="adam")
    machine = dataclasses.replace(V100, gpu="V100 SXM2 32GB")
    plans = search(Predictor(job), [offer(), offer(machine)]).plans
    assert {plan.layout.shard for plan in plans} == {None}


def random_case(seed):
    """Returns a predictor, an offer, and constraints, from small to larger than the devices."""
    chosen = random.Random(seed)
    width = chosen.choice([256, 1000, 4000, 10_000])
    layers = [
        dense(n, width, chosen.choice([1, 2, 4]) * width, kept=10 ** chosen.uniform(3, 7))
        for n in range(chosen.randint(2, 24))
    ]
    gpu, link, direct = chosen.choice(
        [("V100 SXM2 16GB", "nvlink2", True), ("RTX 3090", "pcie4", False), ("T4", "pcie3", False)]
    )
    machine = Machine("m", gpu, chosen.choice([2, 4, 8]), link, direct, 50.0, 48.0)
    job = Job(
        network(*layers),
        examples=200_000,
        precision=chosen.choice(["float32", "mixed_float16"]),
        optimizer=chosen.choice(["sgd", "momentum", "adam"]),
        jit_compile=chosen.random() < 0.2,
    )
    constraints = Constraints(
        local_batches=(8, 32, 128),
        accumulate=chosen.choice([1, 1, 2, 8]),
        max_machines=chosen.choice([1, 2]),
        max_global_batch=8192,
        strategies=("one_device", "mirrored", "multi_worker", "sharded"),
    )
    return Predictor(job), offer(machine), constraints


def cheapest(predictor, given, constraints, layout):
    """Returns the fewest hours of a layout with a batch that fits, or infinity."""
    limit = find_gpu(given.machine.gpu).memory_gb * 1e9
    hours = [
        predictor.plan(layout, batch, given).prediction.hours
        for batch in constraints.local_batches
        if batch * layout.data * layout.accumulate <= constraints.max_global_batch
        and predictor.memory(layout, batch).total <= limit
    ]
    return min(hours, default=math.inf)


def test_sharding_is_chosen_exactly_if_whole_replicas_do_not_fit_or_cost_more():
    outcomes = set()
    for seed in range(240):
        predictor, given, constraints = random_case(seed)
        try:
            plans = search(predictor, [given], constraints, "time").plans
        except ValueError:
            plans = []  # nothing fits, which is checked below
        chosen = {(plan.layout.machines, plan.layout.data): plan for plan in plans}
        assert len(chosen) == len(plans)
        per_machine, accumulate = given.machine.gpus_per_node, constraints.accumulate
        counts = [(1, n) for n in (1, 2, 4, 8) if n <= per_machine]
        counts += [(2, 2 * per_machine)] * (constraints.max_machines == 2)
        for machines, data in counts:
            layout = Layout(data=data, machines=machines, accumulate=accumulate)
            allowed = supported_shards(layout.strategy)
            if predictor.job.jit_compile:
                allowed = [shard for shard in allowed if shard != "weights"]
            whole = cheapest(predictor, given, constraints, layout)
            sharded = min(
                (
                    cheapest(predictor, given, constraints, dataclasses.replace(layout, shard=s))
                    for s in allowed
                ),
                default=math.inf,
            )
            plan = chosen.get((machines, data))
            assert (plan is None) == (whole == sharded == math.inf), seed
            if plan is not None:
                is_needed = whole > TOLERANCE * sharded
                assert (plan.layout.shard is not None) == is_needed, seed
                assert plan.prediction.hours <= TOLERANCE * (sharded if is_needed else whole), seed
                outcomes.add((plan.layout.shard, whole < math.inf))
    # Everything happens: whole replicas, each shard for lack of memory, and shards that cost less.
    assert {(None, True), *((shard, False) for shard in SHARDS)} <= outcomes
    assert any(shard and fits for shard, fits in outcomes)
