"""Plans: saving, loading, and comparison with measured runs."""

import dataclasses
import json
import pathlib

import pytest

import kdist
from kdist.cluster import Cluster
from kdist.planner import Plan, make_measurement
from kdist.planner.measurements import Measurements
from kdist.planner.plans import duration, train_command
from kdist.strategy_spec import resolve


@pytest.fixture(scope="module")
def planned():
    return kdist.plan("resnet18", examples=60_000, epochs=2, measurements=None)


def test_saved_plan_loads_equal(planned, tmp_path):
    planned.best.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == planned.best


def test_invalid_plan_file_is_rejected(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"is no plan .*kdist plan --output"):
        Plan.load(path)
    path.write_text("not JSON")
    with pytest.raises(ValueError, match="is no JSON"):
        Plan.load(path)


def test_plan_with_unknown_fields_is_rejected(planned, tmp_path):
    fields = planned.best.to_dict()
    fields["prediction"]["colour"] = "blue"
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="is no plan"):
        Plan.load(tmp_path / "plan.json")


def test_plan_file_of_version_0_1_loads():
    plan = Plan.load(pathlib.Path(__file__).with_name("plan_0_1.json"))
    layout = plan.layout
    assert (layout.data, layout.machines, layout.devices_per_machine) == (64, 8, 8)
    assert (layout.strategy, layout.accumulate, layout.local_steps) == ("multi_worker", 1, None)
    assert plan.local_batch == 128
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_plan_runs_with_fewer_workers_only_if_they_may_be_missing():
    plan = Plan.load(pathlib.Path(__file__).with_name("plan_0_1.json"))
    seven = {"worker": [f"localhost:{port}" for port in range(1, 8)]}
    spec = resolve(plan, cluster=Cluster(seven, planned_workers=8))
    assert (spec.kind, spec.devices) == ("multi_worker", 8)
    with pytest.raises(ValueError, match="for 8 machines .* has 7 tasks"):
        resolve(plan, cluster=Cluster(seven))


@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "multi_worker", "parameter_server"])
def test_strategies_of_version_0_1_are_kept(planned, strategy):
    machines = 2 if strategy in ("multi_worker", "parameter_server") else 1
    devices = 1 if strategy == "one_device" else 4
    fields = planned.best.to_dict()
    fields["layout"] = {
        "strategy": strategy,
        "machines": machines,
        "devices": devices,
        "local_batch": 8,
        "accumulate": 2,
        "local_steps": None,
    }
    plan = Plan.from_dict(fields)
    assert (plan.layout.strategy, plan.layout.devices_per_machine) == (strategy, devices)
    assert plan.batch == kdist.Batch(8, machines * devices, 2)


def test_plan_holds_a_split_layout(planned, tmp_path):
    layout = kdist.Layout(data=2, pipeline=2, micro_batches=4, accumulate=2)
    plan = dataclasses.replace(planned.best, layout=layout, local_batch=8)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.batch == kdist.Batch(8, 2, 2)
    with pytest.raises(ValueError, match="splits the model"):
        _ = plan.setup


def test_command_of_a_plan(planned):
    plan = dataclasses.replace(planned.best, model="my net", epochs=1234567.0, jit_compile=True)
    layout = kdist.Layout(data=4, machines=2, accumulate=2)
    plan = dataclasses.replace(plan, layout=layout, local_batch=8)
    assert train_command(plan) == (
        "kdist train --model='my net' --strategy=multi_worker --num_devices=2 --local_batch_size=8 "
        "--accumulate=2 --epochs=1234567 --precision=float32 --optimizer=momentum "
        "--jit_compile=true --allow_remote=true"
    )


def test_measured_rate_is_compared_with_the_prediction(planned):
    predicted = planned.best.prediction.examples_per_second
    assert "(+25%)" in planned.best.compare(predicted * 1.25)
    with pytest.warns(DeprecationWarning, match=r"Plan\.compare"):
        assert "(+25%)" in planned.best.compared(predicted * 1.25)


def test_run_as_predicted_corrects_nothing(planned):
    plan = planned.best
    row = make_measurement(plan, plan.prediction.examples_per_second)
    assert row.micro_step_seconds == pytest.approx(plan.micro_step_seconds, rel=1e-3)


def test_measured_run_corrects_the_next_prediction(planned, tmp_path):
    """Predicts the same layout again, after a run at 0.7 of the predicted rate."""
    plan = next(plan for plan in planned.plans if plan.layout.devices > 1)
    rate = 0.7 * plan.prediction.examples_per_second
    path = kdist.planner.measurements.add_measurement(
        make_measurement(plan, rate), tmp_path / "rows.csv"
    )
    again = kdist.plan("resnet18", examples=60_000, epochs=2, measurements=path)
    same = [
        other
        for other in again.plans
        if (other.machine, other.layout, other.local_batch)
        == (plan.machine, plan.layout, plan.local_batch)
    ]
    table = Measurements.read(path)
    assert table.correction("resnet18", plan.machine.gpu, "float32") > 1
    assert same[0].prediction.examples_per_second == pytest.approx(rate, rel=0.01)


def test_a_measured_checkpoint_changes_the_interval_and_the_price():
    result = kdist.plan("resnet50", examples=1_281_167, spot=True, measurements=None)
    spot = result.best
    predicted = spot.prediction
    assert f"A checkpoint every {duration(spot.prediction.checkpoint_seconds / 3600)}: " in str(
        result
    )
    assert "between preemptions of 1 VMs" in result.explain()
    assert spot.with_saving(predicted.checkpoint_bytes, predicted.save_seconds) == spot
    slow = spot.with_saving(2 * predicted.checkpoint_bytes, 100 * predicted.save_seconds)
    assert slow.checkpoint_minutes == pytest.approx(10 * spot.checkpoint_minutes, rel=1e-2)
    assert f"--checkpoint_minutes={slow.checkpoint_minutes:g}" in train_command(slow)
    assert slow.hours > spot.hours
    assert slow.usd / slow.hours == pytest.approx(spot.usd / spot.hours)
    on_demand = dataclasses.replace(spot, spot=False)
    assert on_demand.checkpoint_minutes is None
    assert "checkpoint" not in train_command(on_demand)
