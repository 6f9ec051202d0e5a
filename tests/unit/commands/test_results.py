"""Results of a run that its metrics tell."""

import json

from kdist.commands.training_run.on_tensorflow import results_at
from kdist.run_directory import RunDirectory


def test_results_at_a_step_are_read_beside_an_incomplete_last_line(tmp_path):
    records = [
        {"kind": "epoch", "step": 8, "loss": 3.0, "val_loss": 2.0, "val_accuracy": 0.5},
        {"kind": "timing", "step": 16, "val_loss": 9.0},
        {"kind": "epoch", "step": 16, "loss": 1.5, "val_loss": None, "val_accuracy": 0.75},
    ]
    lines = "\n".join([*map(json.dumps, records), '{"kind": "epo'])
    (tmp_path / "metrics.jsonl").write_text(lines)
    run = RunDirectory(tmp_path)
    assert results_at(8, run) == {"test_loss": 2.0, "test_accuracy": 0.5}
    assert results_at(16, run) == {"test_accuracy": 0.75}
    assert results_at(24, run) == results_at(8, RunDirectory(tmp_path / "none")) == {}
