"""Web page about plans: its plots show the planned values."""

import base64
import re

import numpy as np
import pytest

import kdist
from kdist.planner.report import page
from kdist.report.plots import log_axis


@pytest.fixture(scope="module")
def planned():
    return kdist.plan("resnet50", examples=1_281_167, epochs=2, measurements=None)


def numbers(packed):
    kind = {"i4": "<i4", "f4": "<f4", "f8": "<f8"}[packed["dtype"]]
    return np.frombuffer(base64.b64decode(packed["bdata"]), kind)


def test_every_plan_is_a_point(planned):
    plot = page.money_plot(planned)
    points, front = plot.data
    usd = [plan.usd for plan in planned.plans]
    hours = [plan.hours for plan in planned.plans]
    np.testing.assert_allclose(numbers(points["x"]), usd, rtol=1e-6)
    np.testing.assert_allclose(numbers(points["y"]), hours, rtol=1e-6)
    assert len(points["text"]) == len(planned.plans)
    assert (np.diff(numbers(front["x"])) > 0).all()
    assert (np.diff(numbers(front["y"])) < 0).all()


@pytest.mark.parametrize("values", [(78, 98), (12, 13.5), (1.02, 1.5), (3, 9), (3, 60), (1, 5000)])
def test_an_axis_has_some_labels(values):
    low, high = values
    ticks = [tick for tick in log_axis(values)["tickvals"] if low <= tick <= high]
    assert 2 <= len(ticks) <= 14


def test_efficiency_begins_at_one_and_reaches_4096_devices(planned):
    plot = page.efficiency_plot(planned)
    assert plot.data
    for line in plot.data:
        devices, efficiency = numbers(line["x"]), numbers(line["y"])
        assert devices[0] == 1
        assert devices[-1] == 4096
        assert efficiency[0] == pytest.approx(1)
        assert efficiency[-1] < efficiency[0]


def test_bars_of_a_step_add_up(planned):
    plot = page.step_plot(planned.plans[:3])
    for place, plan in enumerate(planned.plans[:3]):
        length = sum(bars["x"][place] for bars in plot.data)
        assert length == pytest.approx(plan.prediction.step_seconds * 1e3)


def test_page_has_all_parts_and_no_external_resources(planned, tmp_path):
    text = planned.write_page(tmp_path / "plan.html").read_text()
    own = re.sub(r"<script>/\*.*?</script>", "", text, count=1, flags=re.S)  # plotly.js
    assert not re.findall(r"(?:src|href)=[\"']?https?:", own)
    for heading in ("Time against money", "Efficiency against devices", "The arithmetic of"):
        assert heading in text
    assert "default-src 'none'" in text
    assert planned.best.machine.name in text


def test_page_that_cannot_be_written_is_an_error(planned, tmp_path):
    with pytest.raises(OSError, match=r"nowhere/plan\.html"):
        planned.write_page(tmp_path / "nowhere" / "plan.html")
