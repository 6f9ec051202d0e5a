"""The view of a W&B project as it would be sent, without a server."""

import json
import pathlib
import re
import runpy

import pytest

from kdist.telemetry.writers import device_curves, metric_curves

SCRIPT = pathlib.Path(__file__).parents[3] / "scripts" / "wandb_workspace.py"


def test_panels_show_curves_that_are_logged():
    pytest.importorskip("wandb_workspaces", reason="needs wandb-workspaces (pip)")
    view = runpy.run_path(str(SCRIPT))["workspace"]("me", "kdist")
    sent = view._to_model().model_dump(by_alias=True, exclude_none=True)
    panels = {panel["chartTitle"]: panel for panel in configs(sent) if "chartTitle" in panel}
    fields = {
        "train": ("loss", "accuracy", "learning_rate"),
        "epoch": ("val_loss", "val_accuracy"),
        "timing": (
            *("examples_per_second", "step_seconds_p50", "step_seconds_p90", "step_seconds_p99"),
            *("input_share", "callback_share", "compute_share", "reduce_share", "step_share"),
        ),
    }
    records = ({"kind": kind, **dict.fromkeys(names, 0.5)} for kind, names in fields.items())
    logged = {name for record in records for name in metric_curves(record)}
    assert {"Loss", "Accuracy", "Learning rate"} < panels.keys()
    for title, panel in panels.items():
        assert set(panel["metrics"]) <= logged, title
    gpu = dict.fromkeys(("utilization", "memory_utilization", "memory_used_bytes"), 0.5)
    curves = device_curves({"device": "gpu/0", "node": 1, "power_watts": 70, **gpu})
    curves |= device_curves({"device": "gpu/1", **gpu})
    found = {
        title: [name for name in curves if re.search(panel["metricRegex"], name)]
        for title, panel in panels.items()
        if "metricRegex" in panel
    }
    assert found["GPU utilization"] == ["gpu/node1/0/utilization", "gpu/1/utilization"]
    assert len(found["GPU time spent accessing memory"]) == 2
    assert all(found.values())
    assert "summary:test_accuracy" in json.dumps(sent, default=str)


def configs(value):
    """Yields the configurations of all panels."""
    if isinstance(value, dict):
        if "viewType" in value:
            yield value.get("config", {})
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from configs(part)
