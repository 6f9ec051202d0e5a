"""Search for plans: candidates, rejections, ranking, and warnings."""

import dataclasses
import re

import pytest

import kdist
from kdist.planner import (
    Constraints,
    Job,
    Machine,
    Predictor,
    known_workload,
    make_offers,
    search,
)
from kdist.planner.plans import strategy_text
from kdist.planner.tables.prices import Offer

V100 = Machine("v100s", "V100 SXM2 16GB", 8, "nvlink2 hybrid cube mesh", True, 100.0, 96.0)
RTX = Machine("rtx", "RTX 3090", 8, "pcie4", False, 10.0, 64.0)


def offer(machine=V100, usd=20.0, spot=6.0):
    return Offer("test", machine.name, machine, usd, spot, "2026", "test")


@pytest.fixture(scope="module")
def resnet50():
    return Predictor(Job(known_workload("resnet50"), examples=1_281_167, epochs=90))


def test_all_device_counts_are_candidates(resnet50):
    found = search(resnet50, [offer()], Constraints(max_machines=2))
    counts = {(plan.layout.machines, plan.layout.devices_per_machine) for plan in found.plans}
    assert counts == {(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)}
    strategies = {plan.layout.devices: plan.layout.strategy for plan in found.plans}
    assert strategies == {
        1: "one_device",
        2: "mirrored",
        4: "mirrored",
        8: "mirrored",
        16: "multi_worker",
    }


@pytest.mark.parametrize("ranking", ["time", "money", "both"])
def test_plans_are_sorted(resnet50, ranking):
    found = search(resnet50, [offer(), offer(RTX, 8.0)], ranking=ranking)
    values = {
        "time": [plan.prediction.hours for plan in found.plans],
        "money": [plan.prediction.usd for plan in found.plans],
        "both": [plan.prediction.hours * plan.prediction.usd for plan in found.plans],
    }[ranking]
    assert len(values) > 4
    assert values == sorted(values)


def test_one_machine_comes_first_unless_more_are_needed(resnet50):
    found = search(resnet50, [offer()])
    machines = [plan.layout.machines for plan in found.plans]
    assert machines == sorted(machines, key=lambda number: number > 1)
    assert machines[0] == 1 < max(machines)
    assert "on one machine" in found.text()
    needed = min(plan.hours for plan in found.plans if plan.layout.machines == 1)
    hurried = search(resnet50, [offer()], Constraints(max_hours=0.9 * needed))
    assert hurried.best.layout.machines > 1
    assert search(resnet50, [offer()], ranking="time").best.layout.machines > 1


def test_choices_beside_the_first(resnet50):
    found = search(resnet50, [offer(), offer(RTX, 8.0)])
    choices = found.choices
    assert choices["recommended"] == found.best
    assert choices["fastest"].hours == min(plan.hours for plan in found.plans)
    assert choices["cheapest"].usd == min(plan.usd for plan in found.plans)
    assert choices["balanced"].usd * choices["balanced"].hours == min(
        plan.usd * plan.hours for plan in found.plans
    )
    assert all(name in found.text() for name in ("fastest", "the cheapest", "balanced"))
    unpriced = search(resnet50, [offer(RTX, 0.0)])
    assert set(unpriced.choices) == {"recommended", "fastest"}


def test_automatic_ranking_follows_the_limits(resnet50):
    assert search(resnet50, [offer()], Constraints(max_usd=1e5)).ranking == "time"
    assert search(resnet50, [offer()], Constraints(max_hours=1e5)).ranking == "money"
    assert search(resnet50, [offer()]).ranking == "both"


def test_pareto_front(resnet50):
    found = search(resnet50, [offer(), offer(RTX, 8.0)])
    for plan in found.plans:
        beaten = any(
            other.prediction.usd < plan.prediction.usd
            and other.prediction.hours < plan.prediction.hours
            for other in found.plans
        )
        assert not (beaten and plan in found.pareto)
    assert min(found.plans, key=lambda plan: plan.prediction.hours) in found.pareto
    assert min(found.plans, key=lambda plan: plan.prediction.usd) in found.pareto


def test_money_is_price_times_time_times_machines(resnet50):
    for plan in search(resnet50, [offer(usd=7.0)]).plans:
        predicted = plan.prediction
        assert predicted.usd == pytest.approx(predicted.hours * 7.0 * plan.layout.machines)
        seconds = plan.batch.global_size / predicted.examples_per_second
        assert predicted.step_seconds == pytest.approx(seconds)
        assert sum(term.seconds for term in predicted.terms) == pytest.approx(seconds)


def test_batch_that_does_not_fit_is_rejected(resnet50):
    found = search(resnet50, [offer()], Constraints(local_batches=(32, 1024), accumulate=1))
    assert {plan.local_batch for plan in found.plans} == {32}
    (rejected,) = [row for row in found.rejected if row.limit == "memory"]
    assert re.search(r"1024 examples .* do not fit: [\d.]+ GB on 16 GB", rejected.reason)
    assert re.search(r"take a local batch of \d+ or accumulate \d+", rejected.reason)


def test_proposed_smaller_batch_fits(resnet50):
    found = search(resnet50, [offer()], Constraints(local_batches=(32, 1024), accumulate=1))
    (rejected,) = [row for row in found.rejected if row.limit == "memory"]
    batch, parts = map(
        int, re.search(r"batch of (\d+) or accumulate (\d+)", rejected.reason).groups()
    )
    assert batch * parts == 1024
    limits = Constraints(local_batches=(batch,), accumulate=parts)
    assert not search(resnet50, [offer()], limits).rejected


def test_model_that_fits_nowhere_is_an_error(resnet50):
    tiny = dataclasses.replace(V100, gpu="V100 SXM2 1GB")
    limits = Constraints(local_batches=(64,))
    with pytest.raises(ValueError, match=r"fits in memory: 64 examples .* GB on 1 GB"):
        search(resnet50, [offer(tiny)], limits)


def test_price_limit_error_names_a_sufficient_limit(resnet50):
    with pytest.raises(ValueError, match=r"--max_usd=[\d.]+ \(now 5\)") as raised:
        search(resnet50, [offer()], Constraints(max_usd=5))
    enough = float(re.search(r"--max_usd=([\d.e+]+)", str(raised.value))[1])
    assert search(resnet50, [offer()], Constraints(max_usd=enough)).plans
    with pytest.raises(ValueError, match="max_usd"):
        search(resnet50, [offer()], Constraints(max_usd=enough * 0.97))


def test_contradictory_limits_error_names_both_remedies(resnet50):
    cheapest = min(plan.prediction.usd for plan in search(resnet50, [offer()]).plans)
    fastest = min(plan.prediction.hours for plan in search(resnet50, [offer()]).plans)
    limits = Constraints(max_usd=cheapest * 1.01, max_hours=fastest * 1.01)
    with pytest.raises(ValueError, match="loosen one of them") as raised:
        search(resnet50, [offer()], limits)
    for name in ("max_usd", "max_hours"):
        enough = float(re.search(rf"--{name}=([\d.e+]+)", str(raised.value))[1])
        loosened = dataclasses.replace(limits, **{name: enough})
        assert search(resnet50, [offer()], loosened).plans


def test_slower_with_more_devices_is_a_warning():
    job = Job(known_workload("vgg16"), examples=1_281_167)
    limits = Constraints(local_batches=(4,), accumulate=1, max_machines=1)
    found = search(Predictor(job), [offer(RTX)], limits)
    rates = {p.layout.devices: p.prediction.examples_per_second for p in found.plans}
    assert rates[2] < rates[1]
    (warning,) = found.warnings
    assert re.search(r"on 2 devices, .* is slower than on 1 .*: exchange in node takes", warning)


def test_global_batch_is_limited_by_the_examples():
    job = Job(known_workload("resnet50"), examples=20_000)
    found = search(Predictor(job), [offer()])
    assert max(plan.batch.global_size for plan in found.plans) <= 20_000 // 156


def test_global_batch_error_names_a_possible_limit():
    job = Job(known_workload("resnet50"), examples=20_000)
    with pytest.raises(ValueError, match="raise max_global_batch to 64"):
        search(Predictor(job), [offer()], Constraints(max_global_batch=16, local_batches=(64,)))


def test_other_strategies_are_opt_in(resnet50):
    strategies = ("parameter_server", "local_sgd", "multi_worker")
    found = search(resnet50, [offer()], Constraints(strategies=strategies, max_machines=2))
    kinds = {strategy_text(plan.layout) for plan in found.plans}
    assert {"parameter_server", "multi_worker, 8 local steps", "multi_worker"} <= kinds


def test_owned_machine_is_free(resnet50):
    found = search(resnet50, make_offers([V100]))
    assert found.best.prediction.usd == 0
    assert found.ranking == "both"


@pytest.mark.parametrize("name", ["max_usd", "max_hours", "max_machines", "accumulate"])
def test_limits_are_above_zero(name):
    with pytest.raises(ValueError, match=f"{name} has to be above 0, not -1"):
        Constraints(**{name: -1})


def test_unknown_strategy_is_rejected():
    with pytest.raises(ValueError, match="unknown strategies: mirord"):
        Constraints(strategies=("mirord",))


def test_unknown_gpu_is_rejected(resnet50):
    strange = dataclasses.replace(V100, gpu="Voodoo 2")
    with pytest.raises(ValueError, match="Voodoo 2"):
        search(resnet50, [offer(strange)])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Found", "RankedPlans"),
        ("Limits", "Constraints"),
        ("Planned", "RankedPlans"),
        ("choose", "select_offers"),
        ("learned", "make_measurement"),
        ("own_offers", "make_offers"),
        ("scaled_seconds", "extrapolate_seconds"),
        ("workload_of", "resolve_workload"),
    ],
)
def test_deprecated_names_still_work(old, new):
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(kdist.planner, old) is getattr(kdist.planner, new)


def test_deprecated_layout_is_kdist_layout():
    with pytest.warns(DeprecationWarning, match=r"kdist\.Layout"):
        assert kdist.planner.Layout is kdist.Layout


def test_every_part_of_the_memory_is_explained(resnet50):
    result = search(resnet50, [offer()], Constraints(strategies=("mirrored",), accumulate=2))
    lines = [line for line in result.explain().splitlines() if line.startswith("memory: ")]
    parts = result.predictor.memory(result.best.layout, result.best.local_batch).parts()
    assert len(lines) == len(parts) > 5
    assert all(re.search(r" GB  = \S", line) for line in lines)
