"""The page of the GPU benchmark, and its choice of parts."""

import json
import sys

from benchmarks.gpu import page, parts, spec

ABOUT = {"commit": "abc", "GPU": "NVIDIA H100 80GB HBM3"}


def row(library="kdist", variant=spec.TF32, milliseconds=100.0, **more):
    return {
        "library": library,
        "model": "resnet50",
        "variant": str(variant),
        "precision": variant.precision,
        "batch": 128,
        "ms_per_step": milliseconds,
        **more,
    }


def result(rows=(), text="", state="done"):
    return {"title": "A part", "state": state, "seconds": 3.0, "rows": list(rows), "text": text}


def test_mfu_counts_on_the_peak_of_the_precision():
    rows = [
        row(flops=1e13),
        row(variant=spec.BFLOAT16),
        row(variant=spec.FLOAT32),
        row("keras", milliseconds=150.0),
    ]
    text = page.page(ABOUT, {"train": result(rows)}, "Title")
    lines = {
        cells[0]: cells
        for line in text.splitlines()
        if (cells := [cell.strip() for cell in line.strip("|").split("|")])
    }
    # 1e14 FLOP/s of 494.5, 989.5, and 67 TFLOP/s, see tables/gpus.csv.
    shares = {name: cells[3] for name, cells in lines.items() if name.startswith("resnet50, kdist")}
    assert list(shares.values()) == ["20.2%", "10.1%", "149.3%"]
    assert lines["resnet50, keras, tf32"][3] == "13.5%"
    assert lines["resnet50, tf32"] == ["resnet50, tf32", "keras", "1.50"]


def test_failures_are_on_the_page():
    failed = {"library": "kdist", "model": "resnet50", "variant": "tf32", "error": "OOM: 3 GB"}
    results = {
        "train": result([failed], state="done, some rows failed"),
        "serving": result(text="no port\n", state="failed with exit code 1"),
        "check": result(state="stopped after 180 s"),
        "driver": result([{"field": "power_watts", "kdist": 3.0, "nvidia_smi": None}]),
    }
    text = page.page(ABOUT, results, "Title")
    assert "OOM: 3 GB" in text
    assert "A part: failed with exit code 1\n\n```text\nno port\n```" in text
    assert "A part: stopped after 180 s" in text
    assert "| power_watts |     3 |          – |" in text


def test_the_profile_shows_the_row_that_is_furthest_behind():
    part = next(part for part in parts.all_parts(False, {}, "GPU") if part.name == parts.PROFILE)
    assert parts.for_slowest_row(part, [row()], False) == part
    rows = [row(), row("keras", milliseconds=90.0)]
    rows += [row(variant=spec.BFLOAT16, milliseconds=80.0)]
    rows += [row("torch", spec.BFLOAT16, 40.0)]
    task = spec.Task(**json.loads(parts.for_slowest_row(part, rows, False).command[-1]))
    assert task.profile
    assert task.variants == [spec.BFLOAT16]


def test_rivals_without_an_interpreter_have_no_part():
    names = [part.name for part in parts.all_parts(False, {"jax": sys.executable}, "GPU")]
    assert "train-vit_b16-jax" in names
    assert "train-vit_b16-torch" not in names
    assert len(names) == len(set(names))
