"""The page of one GPU: results of all parts as Markdown."""

from collections.abc import Mapping, Sequence

from benchmarks import tables
from kdist.planner import find_gpu

_MAX_LINES = 40


def page(about: Mapping[str, object], results: Mapping[str, Mapping], title: str) -> str:
    """Returns the page.

    Args:
        about: facts about machine and versions.
        results: name of a part -> its "title", "state", "seconds", "rows", and "text".
        title: heading of the page.
    """
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    parts = [
        [name, result["state"], f"{result['seconds']:.0f}"] for name, result in results.items()
    ]
    sections = [f"# {title}", facts, "## Parts", tables.markdown([["part", "", "s"], *parts])]
    trained = [row for result in results.values() for row in result["rows"] if "model" in row]
    if trained:
        sections += ["## Training", _training(trained, find_gpu(str(about["GPU"])))]
        sections += _comparisons(trained)
    for result in results.values():
        rows = [row for row in result["rows"] if "model" not in row]
        is_shown = result["text"] and (result["state"] != "done" or not result["rows"])
        if rows or is_shown or result["state"] != "done":
            sections.append(f"## {result['title']}: {result['state']}")
        if rows:
            head = list(rows[0])
            lines = [head, *([_cell(row.get(key)) for key in head] for row in rows)]
            sections.append(tables.markdown(lines))
        if is_shown:
            lines = result["text"].strip().splitlines()[-_MAX_LINES:]
            sections.append("\n".join(["```text", *lines, "```"]))
    return "\n\n".join(sections) + "\n"


def _cell(value):
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|")


def _training(rows, gpu):
    flops = {row["model"]: row["flops"] for row in rows if row.get("flops")}
    head = ["", "ms per step", "examples/s", "MFU", "first call, s", "planner, ms"]
    lines = [[*head, "peak, GB", "planner, GB"]]
    for row in rows:
        name = f"{row['model']}, {row['library']}, {row['variant']}"
        if "error" in row:
            lines.append([name, _cell(row["error"])[:70], *["–"] * 6])
            continue
        seconds = row["ms_per_step"] / 1e3
        peak = _peak_flops(gpu, row["precision"])
        mfu = flops.get(row["model"], 0) / seconds / peak if peak else None
        lines.append(
            [
                name,
                f"{row['ms_per_step']:.2f}",
                f"{row['batch'] / seconds:.0f}",
                f"{mfu:.1%}" if mfu else "–",
                _cell(row.get("first_seconds")),
                _cell(row.get("predicted_ms")),
                *(_gigabytes(row.get(key)) for key in ("peak_bytes", "predicted_bytes")),
            ]
        )
    return tables.markdown(lines)


def _peak_flops(gpu, precision):
    """Returns the peak FLOP/s of the units that a row uses; None where unknown."""
    if gpu is None:
        return None
    if precision == "float32":  # The regular cores, as TF32 is off.
        return gpu.float32_tflops and gpu.float32_tflops * 1e12
    return gpu.peak_flops("mixed_bfloat16" if precision == "bfloat16" else "float32")


def _gigabytes(value):
    return "–" if value is None else f"{value / 1e9:.2f}"


def _comparisons(rows: Sequence[Mapping]) -> list[str]:
    """Returns a table of kdist's speed relative to each rival, if a rival has been measured."""
    times = {
        (row["model"], row["variant"], row["library"]): row["ms_per_step"]
        for row in rows
        if "ms_per_step" in row
    }
    lines = [
        [f"{model}, {variant}", library, f"{other / times[model, variant, 'kdist']:.2f}"]
        for (model, variant, library), other in times.items()
        if library != "kdist" and (model, variant, "kdist") in times
    ]
    head = ["", "rival", "kdist is × as fast"]
    return [tables.markdown([head, *lines])] if lines else []
