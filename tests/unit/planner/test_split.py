"""Split models: parts, time, and memory by hand, and plans for models that do not fit a device."""

import dataclasses

import pytest

from kdist.layout import Layout
from kdist.parallel.pipeline.schedule import simulated_timeline
from kdist.planner import Constraints, Job, LayerWork, Machine, Plan, Predictor, Workload, search
from kdist.planner.cost.split import split_memory, split_model, split_seconds
from kdist.planner.plans import train_command
from kdist.planner.selection.candidates import fitting_layouts
from kdist.planner.tables.prices import Offer

V100 = Machine("v100s", "V100 SXM2 16GB", 4, "nvlink2 hybrid cube mesh", True, 100.0, 48.0)
OFFER = Offer("test", V100.name, V100, 20.0, 6.0, "2026", "test")


def layer(number, parameters=100e6, kept=1e6, crossing=4e3, flops=1e9):
    work = (flops, 2 * flops, parameters, parameters, kept, 3 * kept, False)
    return LayerWork(f"layer{number}", "matmul", *work, crossing_bytes=crossing)


def model(count=8, **work):
    """A chain of equal layers; 1.6 GB of weights in float32 for four of the default size."""
    layers = tuple(layer(number, **work) for number in range(count))
    kept = sum(each.kept_bytes for each in layers)
    return Workload("chain", (1000,), layers, 4e3, peaks=((kept + 1e6, 0.0),))


def test_stages_are_equal_parts_of_the_model():
    split = split_model(model(8), Layout(pipeline=4))
    assert [len(part.layers) for part in split.parts] == [2, 2, 2, 2]
    assert [part.input_bytes for part in split.parts] == [4e3, 0, 0, 0]
    assert split.received_bytes == (0, 4e3, 4e3, 4e3)
    assert split.gradient_bytes == 800e6


def test_stages_are_cut_where_few_bytes_cross():
    # The fewest bytes cross after ten of 21 layers, which is nearly as even as any cut.
    layers = [layer(number, crossing=4e3 if number == 9 else 4e6) for number in range(21)]
    split = split_model(dataclasses.replace(model(), layers=tuple(layers)), Layout(pipeline=2))
    assert [len(part.layers) for part in split.parts] == [10, 11]
    assert split.received_bytes == (0, 4e3)


@pytest.mark.parametrize(
    ("work", "layout"),
    [
        (model(crossing=None), Layout(pipeline=2)),  # a layer is called again at the end
        (model(count=2), Layout(pipeline=4)),
        (dataclasses.replace(model(), layers=(layer(0, flops=1e13), layer(1))), Layout(pipeline=2)),
        (model(parameters=99), Layout(tensor=2)),
        (model(), Layout(branch=2)),
        (model(), Layout(data=2)),
    ],
)
def test_what_cannot_be_split_is_no_candidate(work, layout):
    assert split_model(work, layout) is None


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_time_of_a_pipeline_is_that_of_its_schedule(schedule):
    layout = Layout(pipeline=4, micro_batches=8, schedule=schedule)
    time = split_seconds(split_model(model(), layout), layout, [0.3] * 4, 8, 1e30, 0.0)
    timeline = simulated_timeline(schedule, 8, [0.1] * 4, [0.2] * 4)
    assert time.total == pytest.approx(max(timed.end for timed in timeline))
    assert time.compute == pytest.approx(8 * 0.3)


def test_time_of_transfers_by_hand():
    layout = Layout(pipeline=2, micro_batches=4)
    time = split_seconds(split_model(model(), layout), layout, [0.3, 0.3], 8, 1e9, 1e-3)
    assert time.transfers == pytest.approx(2 * (4 + 2 - 2) * (8 * 4e3 / 1e9 + 1e-3))
    layout = Layout(tensor=4)
    split = split_model(model(), layout)
    # All eight layers are divided; of each, inputs or outputs are divided and the others are whole.
    assert split.gathered_bytes == pytest.approx(8 * 3 * (4e3 / 4 + 4e3))
    assert split.parts[0].parameters == 200e6
    time = split_seconds(split, layout, [0.3], 8, 1e9, 1e-3)
    assert time.gathering == pytest.approx(2 * split.gathered_bytes * 8 / 1e9 + 4 * 8 * 1e-3)


def test_first_stage_holds_the_micro_batches_in_flight():
    layout = Layout(pipeline=2, micro_batches=4)
    split = split_model(model(), layout)
    first, last = (memory for _, memory in split_memory(split, layout, 8, "float32", "momentum"))
    kept, temporaries, gradients = 4e6 * 8, 1e6 * 8, 4 * 400e6
    assert first.step == pytest.approx(1.04 * (2 * kept + temporaries + gradients))
    assert last.step == pytest.approx(1.04 * (kept + 4e3 * 8 + temporaries + gradients))
    assert first.weights == 1.6e9
    assert first.accumulated == 1.6e9
    assert first.reduce_buffers == 0
    again = dataclasses.replace(layout, recompute=True)
    (_, recomputing), _ = split_memory(split, again, 8, "float32", "momentum")
    assert recomputing.step == pytest.approx(1.04 * (kept + temporaries + gradients))


@pytest.fixture(scope="module")
def too_large():
    """A model with 16 GB of weights, which no V100 of 16 GB holds."""
    job = Job(model(8, parameters=500e6), examples=60_000, optimizer="sgd")
    return search(Predictor(job), [OFFER], Constraints(max_global_batch=512))


def test_a_model_that_fits_no_device_is_split(too_large, tmp_path):
    assert {plan.layout.strategy for plan in too_large.plans} == {"split"}
    best = too_large.best
    assert best.layout.group_size > 1
    assert best.prediction.memory_bytes < 16e9
    assert f"--layout={best.layout.degrees}" in train_command(best)
    assert train_command(best) in too_large.text()
    assert "Predicted from the layers of the model" in best.derivation
    assert best.derivation in too_large.text()
    best.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == best
    assert too_large.write_page(tmp_path / "plan.html").exists()


def test_splits_of_a_machine_are_bounded(too_large):
    fitting, _ = fitting_layouts(too_large.predictor, [OFFER], Constraints(max_global_batch=512))
    splits = [layout for layout, *_ in fitting if layout.group_size > 1]
    assert 0 < len(splits) <= 2 * 4 * 2  # groups of 2 and 4, four layouts, two batches


def test_terms_add_up_and_are_explained(too_large):
    for plan in too_large.plans:
        terms = {term.name: term.seconds for term in plan.prediction.terms}
        assert sum(terms.values()) == pytest.approx(plan.prediction.step_seconds)
        rate = plan.batch.global_size / plan.prediction.step_seconds
        assert plan.prediction.examples_per_second == pytest.approx(rate)
        predictor = too_large.predictor
        fast = predictor.rates([(plan.layout, plan.local_batch, plan.machine)])
        assert fast[0] == pytest.approx(rate)
        text = too_large.explain(plan)
        assert all(name in text for name in terms)


def test_a_split_model_can_be_excluded(too_large):
    with pytest.raises(ValueError, match="no plan fits in memory"):
        search(too_large.predictor, [OFFER], Constraints(strategies=("one_device", "mirrored")))


def test_whole_replicas_are_preferred_where_they_are_as_fast():
    job = Job(model(8, parameters=1e5, kept=1e4), examples=60_000)
    found = search(Predictor(job), [OFFER])
    assert "split" not in {plan.layout.strategy for plan in found.plans}


def test_a_faster_split_comes_into_the_plans():
    # 3.2 GB of gradients take longer between GPUs without peer-to-peer than a step of a few rows.
    slow = dataclasses.replace(V100, link="pcie2", peer_to_peer=False)
    job = Job(model(8, kept=1e4, flops=1e10), examples=60_000, optimizer="sgd")
    offer = dataclasses.replace(OFFER, machine=slow)
    found = search(Predictor(job), [offer], Constraints(max_global_batch=64), ranking="time")
    assert found.best.layout.strategy == "split"
    whole = [plan.hours for plan in found.plans if plan.layout.group_size == 1]
    assert 1.1 * found.best.hours < min(whole)


def test_few_rows_are_kept_from_batch_norm():
    norm = LayerWork("norm", "elementwise", 1e6, 1e6, 4e3, 2e3, 1e6, 3e6, False, 0.0, 4e3)
    work = model(8, parameters=500e6)
    with_norm = dataclasses.replace(work, layers=(*work.layers, norm))
    for each, smallest in ((work, 1), (with_norm, 8)):
        job = Job(each, examples=60_000, optimizer="sgd")
        found = search(Predictor(job), [OFFER], Constraints(max_global_batch=16 * smallest))
        rows = [plan.local_batch / plan.layout.micro_batches for plan in found.plans]
        assert min(rows) >= smallest
