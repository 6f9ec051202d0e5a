"""Plans are written, read again, followed, and compared with what ran."""

import dataclasses
import json

import pytest

import kdist
from kdist.planner import Plan, learned
from kdist.planner.measurements import Measurements


@pytest.fixture(scope="module")
def planned():
    return kdist.plan("resnet18", examples=60_000, epochs=2, measurements=None)


def test_a_plan_is_read_as_it_was_written(planned, tmp_path):
    planned.best.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == planned.best


def test_what_is_no_plan_says_how_to_write_one(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"is no plan .*scripts/plan.py --output"):
        Plan.load(path)
    path.write_text("not JSON")
    with pytest.raises(ValueError, match="is no JSON"):
        Plan.load(path)


def test_a_plan_of_another_version_is_no_plan(planned, tmp_path):
    fields = planned.best.to_dict()
    fields["prediction"]["colour"] = "blue"
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="is no plan"):
        Plan.load(tmp_path / "plan.json")


def test_a_measured_rate_stands_beside_the_prediction(planned):
    predicted = planned.best.prediction.examples_per_second
    assert "(+25%)" in planned.best.compared(predicted * 1.25)


def test_a_run_as_predicted_corrects_nothing(planned):
    plan = planned.best
    row = learned(plan, plan.prediction.examples_per_second)
    assert row.micro_step_seconds == pytest.approx(plan.micro_step_seconds, rel=1e-3)


def test_what_was_measured_is_what_is_predicted_next(planned, tmp_path):
    """The same layout again, after a run that reached 0.7 of what was predicted."""
    plan = next(plan for plan in planned.plans if plan.layout.batch.replicas > 1)
    rate = 0.7 * plan.prediction.examples_per_second
    path = kdist.planner.measurements.add(learned(plan, rate), tmp_path / "rows.csv")
    again = kdist.plan("resnet18", examples=60_000, epochs=2, measurements=path)
    same = [
        other
        for other in again.plans
        if (other.machine, other.layout) == (plan.machine, plan.layout)
    ]
    table = Measurements.read(path)
    assert table.correction("resnet18", plan.machine.gpu, "float32") > 1
    assert same[0].prediction.examples_per_second == pytest.approx(rate, rel=0.01)


def test_the_strategy_of_a_plan_is_the_one_that_was_costed(planned):
    plan = next(plan for plan in planned.plans if plan.layout.strategy == "one_device")
    strategy = kdist.create_strategy(plan)
    assert strategy.num_replicas_in_sync == 1
    with pytest.raises(ValueError, match="the plan says the devices"):
        kdist.create_strategy(plan, devices=2)


def test_a_plan_for_several_machines_needs_as_many_tasks(planned):
    plan = next(plan for plan in planned.plans if plan.layout.machines == 2)
    with pytest.raises(ValueError, match=r"for 2 machines .* 1 task; .*--workers=2"):
        kdist.create_strategy(plan)


def test_mirrored_on_as_many_devices_as_planned(planned):
    plan = planned.best
    two = dataclasses.replace(plan.layout, strategy="mirrored", machines=1, devices=2)
    strategy = kdist.create_strategy(dataclasses.replace(plan, layout=two))
    assert strategy.num_replicas_in_sync == 2
