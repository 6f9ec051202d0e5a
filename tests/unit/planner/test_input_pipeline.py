"""Time of the host to prepare examples, against values computed by hand."""

import dataclasses
import types

import numpy as np
import pytest

from kdist import planner
from kdist.planner.cost.constants import known_constants
from kdist.planner.cost.setup import make_features
from kdist.planner.cost.update import (
    copy_seconds,
    core_seconds,
    effective_cores,
    numpy_feed_seconds,
    soft_maximum,
    update_seconds,
)
from kdist.planner.plans import make_setup
from kdist.planner.tables.prices import known_offers

CONSTANTS = dataclasses.replace(
    known_constants(),
    decode_core_ms_per_megapixel=10.0,
    resize_core_ms_per_megapixel=20.0,
    policy_core_ms_per_megapixel=100.0,
    policy_exponent=2.0,
    masks_core_ms=1000.0,
    dali_cpu_share=0.25,
    cores_per_vcpu=0.5,
    horovod_process_cores=2.0,
    recent_core_speed=1.5,
    in_graph_copy_gb_s=10.0,
    numpy_feed_ns_per_byte=2.0,
    dispatch_ms_per_tensor=0.5,
)


def work(source=0.2, model=0.1, policy=0.0, masks=0.0, dali=0.0):
    return types.SimpleNamespace(
        source_megapixels=source, model_megapixels=model, policy=policy, masks=masks, dali=dali
    )


@pytest.mark.parametrize(
    ("of", "milliseconds"),
    [
        (work(), 10 * 0.2 + 20 * 0.1),
        # 100 ms x 0.05 on 224 pixels; twice the pixels take four times as long.
        (work(policy=1.0), 4 + 4 * 5),
        (work(masks=1.0), 4 + 1000),
        (work(dali=1.0), 1),
        (work(0, 0), 0),
    ],
)
def test_core_seconds(of, milliseconds):
    assert core_seconds(of, CONSTANTS) == pytest.approx(milliseconds * 1e-3)


@pytest.mark.parametrize(
    ("vcpus", "recent", "processes", "threads", "cores"),
    [
        (0, 0, 0, np.inf, 40),
        (1, 0, 0, np.inf, 20),
        (0, 1, 0, np.inf, 60),
        (0, 0, 8, np.inf, 40 / (1 + 16 / 40)),
        (0, 0, 0, 1, 1),
        (1, 0, 0, 1, 0.5),
        (0, 0, 0, 64, 40),
    ],
)
def test_cores(vcpus, recent, processes, threads, cores):
    host = types.SimpleNamespace(cores=40.0, vcpus=vcpus, recent_host=recent, input_threads=threads)
    assert effective_cores(host, processes, CONSTANTS) == pytest.approx(cores)


def test_one_process_copies_to_all_devices():
    assert copy_seconds(600e3, 512, CONSTANTS) == pytest.approx(512 * 600e3 / 10e9)


def test_one_thread_feeds_arrays_and_dispatches():
    seconds = numpy_feed_seconds(600e3, 512, 200, 8, CONSTANTS)
    assert seconds == pytest.approx(512 * 600e3 * 2e-9 + 8 * 200 * 0.5e-3)


def test_soft_maximum():
    assert soft_maximum(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert soft_maximum(1.0, 0.0, 2.0) == pytest.approx(1.0)
    several = soft_maximum(np.array([1.0, 10.0]), np.array([10.0, 1.0]), 2.0)
    assert several == pytest.approx(np.hypot(1, 10))


def plan_on(name, model="resnet50"):
    offer = next(offer for offer in known_offers() if offer.name == name)
    return planner.plan(
        model, examples=1_281_167, offers=[offer], measurements=None, max_machines=1
    ).best


def test_data_workers_replace_the_cores_of_the_host():
    plan = plan_on("n1-standard-8 + 8 x V100")
    option = planner.find_data_workers(plan)
    assert 0.2 < option.share_before < 0.5
    assert option.share < 0.1
    assert option.hours < plan.prediction.hours
    # The same machine with the cores of all data workers.
    cores = option.count * option.host.vcpus
    machine = dataclasses.replace(plan.machine, cpu_cores=cores, cores_are_vcpus=True)
    features = make_features(
        make_setup(plan.layout, plan.local_batch, machine), plan.gradients, plan.input_work
    )
    terms = update_seconds(features, plan.micro_step_seconds, known_constants())
    seconds = float(sum(terms.values()))
    before = plan.prediction
    assert option.hours / before.hours == pytest.approx(seconds / before.step_seconds)
    price = before.usd / before.hours + option.count * option.host.usd_per_hour
    assert option.usd == pytest.approx(option.hours * price)
    assert f"{option.count} × {option.host.name} as data workers" in str(option)


def test_no_data_workers_for_a_plan_that_does_not_wait_or_of_a_cloud_without_prices():
    assert planner.find_data_workers(plan_on("n1-standard-8 + 1 x K80")) is None
    waiting = plan_on("n1-standard-8 + 8 x V100")
    machine = dataclasses.replace(waiting.machine, name="elsewhere vm")
    assert planner.find_data_workers(dataclasses.replace(waiting, machine=machine)) is None
