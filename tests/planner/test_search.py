"""Layouts, batches and machines: what is rejected, and why; what comes first."""

import dataclasses
import re

import pytest

from kdist.planner import Job, Limits, Machine, Predictor, known_workload, own_offers, search
from kdist.planner.prices import Offer

V100 = Machine("v100s", "V100 SXM2 16GB", 8, "nvlink2 hybrid cube mesh", True, 100.0, 96.0)
RTX = Machine("rtx", "RTX 3090", 8, "pcie4", False, 10.0, 64.0)


def offer(machine=V100, usd=20.0, spot=6.0):
    return Offer("test", machine.name, machine, usd, spot, "2026", "test")


@pytest.fixture(scope="module")
def resnet50():
    return Predictor(Job(known_workload("resnet50"), examples=1_281_167, epochs=90))


def test_all_counts_of_devices_are_looked_at(resnet50):
    found = search(resnet50, [offer()], Limits(max_machines=2))
    counts = {(plan.layout.machines, plan.layout.devices) for plan in found.plans}
    assert counts == {(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)}
    strategies = {plan.layout.batch.replicas: plan.layout.strategy for plan in found.plans}
    assert strategies == {
        1: "one_device",
        2: "mirrored",
        4: "mirrored",
        8: "mirrored",
        16: "multi_worker",
    }


@pytest.mark.parametrize("ranking", ["time", "money", "both"])
def test_plans_are_in_order(resnet50, ranking):
    found = search(resnet50, [offer(), offer(RTX, 8.0)], ranking=ranking)
    values = {
        "time": [plan.prediction.hours for plan in found.plans],
        "money": [plan.prediction.usd for plan in found.plans],
        "both": [plan.prediction.hours * plan.prediction.usd for plan in found.plans],
    }[ranking]
    assert len(values) > 4
    assert values == sorted(values)


def test_what_is_limited_decides_the_ranking(resnet50):
    assert search(resnet50, [offer()], Limits(max_usd=1e5)).ranking == "time"
    assert search(resnet50, [offer()], Limits(max_hours=1e5)).ranking == "money"
    assert search(resnet50, [offer()]).ranking == "both"


def test_nothing_beats_the_pareto_set_in_time_and_money(resnet50):
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
        seconds = plan.layout.batch.global_size / predicted.examples_per_second
        assert predicted.step_seconds == pytest.approx(seconds)
        assert sum(term.seconds for term in predicted.terms) == pytest.approx(seconds)


def test_a_batch_that_does_not_fit_is_left_out_and_said(resnet50):
    found = search(resnet50, [offer()], Limits(local_batches=(32, 1024), accumulate=1))
    assert {plan.layout.local_batch for plan in found.plans} == {32}
    (rejected,) = [row for row in found.rejected if row.limit == "memory"]
    assert re.search(r"1024 examples .* do not fit: [\d.]+ GB on 16 GB", rejected.reason)
    assert re.search(r"take a local batch of \d+ or accumulate \d+", rejected.reason)


def test_what_is_proposed_for_memory_fits(resnet50):
    found = search(resnet50, [offer()], Limits(local_batches=(32, 1024), accumulate=1))
    (rejected,) = [row for row in found.rejected if row.limit == "memory"]
    batch, parts = map(
        int, re.search(r"batch of (\d+) or accumulate (\d+)", rejected.reason).groups()
    )
    assert batch * parts == 1024
    limits = Limits(local_batches=(batch,), accumulate=parts)
    assert not search(resnet50, [offer()], limits).rejected


def test_a_model_that_fits_nowhere_says_so(resnet50):
    tiny = dataclasses.replace(V100, gpu="V100 SXM2 1GB")
    limits = Limits(local_batches=(64,))
    with pytest.raises(ValueError, match=r"fits in memory: 64 examples .* GB on 1 GB"):
        search(resnet50, [offer(tiny)], limits)


def test_too_little_money_says_how_much_is_enough(resnet50):
    with pytest.raises(ValueError, match=r"--max_usd=[\d.]+ \(now 5\)") as raised:
        search(resnet50, [offer()], Limits(max_usd=5))
    enough = float(re.search(r"--max_usd=([\d.e+]+)", str(raised.value))[1])
    assert search(resnet50, [offer()], Limits(max_usd=enough)).plans
    with pytest.raises(ValueError, match="max_usd"):
        search(resnet50, [offer()], Limits(max_usd=enough * 0.97))


def test_two_limits_that_cannot_be_kept_together_say_which_to_loosen(resnet50):
    cheapest = min(plan.prediction.usd for plan in search(resnet50, [offer()]).plans)
    fastest = min(plan.prediction.hours for plan in search(resnet50, [offer()]).plans)
    limits = Limits(max_usd=cheapest * 1.01, max_hours=fastest * 1.01)
    with pytest.raises(ValueError, match="loosen one of them") as raised:
        search(resnet50, [offer()], limits)
    for name in ("max_usd", "max_hours"):
        enough = float(re.search(rf"--{name}=([\d.e+]+)", str(raised.value))[1])
        loosened = dataclasses.replace(limits, **{name: enough})
        assert search(resnet50, [offer()], loosened).plans


def test_more_devices_that_make_it_slower_are_said():
    job = Job(known_workload("vgg16"), examples=1_281_167)
    limits = Limits(local_batches=(4,), accumulate=1, max_machines=1)
    found = search(Predictor(job), [offer(RTX)], limits)
    rates = {p.layout.devices: p.prediction.examples_per_second for p in found.plans}
    assert rates[2] < rates[1]
    (warning,) = found.warnings
    assert re.search(r"on 2 devices, .* is slower than on 1 .*: exchange in node takes", warning)


def test_the_global_batch_is_limited_by_the_examples():
    job = Job(known_workload("resnet50"), examples=20_000)
    found = search(Predictor(job), [offer()])
    assert max(plan.layout.batch.global_size for plan in found.plans) <= 20_000 // 156


def test_a_global_batch_that_cannot_be_made_says_what_can():
    job = Job(known_workload("resnet50"), examples=20_000)
    with pytest.raises(ValueError, match="raise max_global_batch to 64"):
        search(Predictor(job), [offer()], Limits(max_global_batch=16, local_batches=(64,)))


def test_other_ways_to_train_come_only_when_asked(resnet50):
    strategies = ("parameter_server", "local_sgd", "multi_worker")
    found = search(resnet50, [offer()], Limits(strategies=strategies, max_machines=2))
    kinds = {str(plan.layout) for plan in found.plans}
    assert {"parameter_server", "multi_worker, 8 local steps", "multi_worker"} <= kinds


def test_a_machine_of_one_s_own_costs_nothing(resnet50):
    found = search(resnet50, own_offers([V100]))
    assert found.best.prediction.usd == 0
    assert found.ranking == "both"


@pytest.mark.parametrize("name", ["max_usd", "max_hours", "max_machines", "accumulate"])
def test_limits_are_above_zero(name):
    with pytest.raises(ValueError, match=f"{name} has to be above 0, not -1"):
        Limits(**{name: -1})


def test_an_unknown_strategy_is_named():
    with pytest.raises(ValueError, match="not mirord"):
        Limits(strategies=("mirord",))


def test_an_unknown_gpu_says_how_to_name_one(resnet50):
    strange = dataclasses.replace(V100, gpu="Voodoo 2")
    with pytest.raises(ValueError, match="nothing is known of the GPU 'Voodoo 2'"):
        search(resnet50, [offer(strange)])
