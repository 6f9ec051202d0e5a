"""Plans as a person reads them: a ranked table, why the first is first, and the arithmetic.

print(text(found, number=10))
print(explained(predictor, plan))
"""

from collections.abc import Sequence

from kdist.planner.plans import Plan, describe
from kdist.planner.predicting import Predictor
from kdist.planner.searching import Found
from kdist.planner.units import dollars, duration, milliseconds

HEADINGS = (
    "machine",
    "strategy",
    "devices",
    "batch",
    "step",
    "of it",
    "examples/s",
    "efficiency",
    "memory",
    "time",
    "on demand",
    "spot",
)
_LEFT = (0, 1, 3, 5)
_WHY = {
    "time": "it is the fastest that keeps to the limits",
    "money": "it is the cheapest that keeps to the limits",
    "both": "its hours times its dollars are the least: half the time may cost twice as much",
}


def cells(plan: Plan) -> list[str]:
    """A row of the table, as `HEADINGS` say."""
    layout, predicted = plan.layout, plan.prediction
    machines = f"{layout.machines} × " if layout.machines > 1 else ""
    accumulate = f" × {layout.accumulate}" if layout.accumulate > 1 else ""
    has = predicted.device_memory_bytes
    return [
        f"{machines}{plan.machine.name}",
        str(layout),
        f"{layout.batch.replicas}",
        f"{layout.local_batch}{accumulate} ({layout.batch.global_size})",
        milliseconds(predicted.step_seconds),
        shares(plan),
        f"{predicted.examples_per_second:,.0f}",
        f"{predicted.efficiency:.0%}",
        f"{predicted.memory_bytes / 1e9:.1f}" + (f" of {has / 1e9:g} GB" if has else " GB"),
        duration(plan.hours),
        dollars(predicted.usd) if predicted.usd else "–",
        dollars(predicted.spot_usd) if predicted.spot_usd else "–",
    ]


def shares(plan: Plan, least: float = 0.02) -> str:
    """Where a step goes: its terms in per cent, those under `least` left out."""
    whole = plan.prediction.step_seconds
    terms = sorted(plan.prediction.terms, key=lambda term: -term.seconds)
    return ", ".join(
        f"{term.name} {term.seconds / whole:.0%}" for term in terms if term.seconds >= least * whole
    )


def text(found: Found, number: int = 10) -> str:
    """The ranked table, why the first is first, warnings, and what was rejected."""
    rows = [["", *HEADINGS]]
    for place, plan in enumerate(found.plans[:number], 1):
        mark = "*" if plan in found.pareto else ""
        rows.append([f"{place}{mark}", *cells(plan)])
    lines = _columns(rows)
    if len(found.plans) > number:
        lines.append(f"… and {len(found.plans) - number} more (--top)")
    lines.append(f"* no other is both faster and cheaper{_counts(found.best)}")
    lines += ["", why(found), *(f"Warning: {warning}" for warning in found.warnings[:5])]
    if len(found.warnings) > 5:
        lines.append(f"… and {len(found.warnings) - 5} more of these")
    lines.append(notes(found, number))
    lines += [f"{row.count} left out, {row.limit}: {row.reason}" for row in found.rejected]
    return "\n".join(lines)


def why(found: Found) -> str:
    """Why the first is first, beside the second."""
    best = found.best
    sentence = f"First is {describe(best)}: {_WHY[found.ranking]}."
    if len(found.plans) > 1:
        second = found.plans[1]
        sentence += (
            f" The second takes {second.hours / best.hours:.2f} times the hours"
            + (f" and {second.usd / best.usd:.2f} times the money" if best.usd else "")
            + "."
        )
    return sentence


def _counts(plan):
    """Which of the two prices a search for spot VMs went by."""
    return "; time and ranking are those of spot VMs" if plan.spot else ""


def notes(found: Found, number: int) -> str:
    """What the plans rest upon: the limit on the global batch, and how old the prices are."""
    dates = list(dict.fromkeys(plan.prices_of for plan in found.plans[:number] if plan.prices_of))
    batch = (
        f"Global batches up to {found.global_batch_limit:,} (--max_global_batch): larger ones need "
        "other learning rates."
    )
    return batch + (f" Prices of {'; '.join(dates)}." if dates else "")


def explained(predictor: Predictor, plan: Plan) -> str:
    """The arithmetic of a plan, line by line."""
    predicted, batch = plan.prediction, plan.layout.batch
    rows = [
        [term.name, milliseconds(term.seconds), f"= {term.how}"]
        for term in predicted.terms
        if term.how
    ]
    rows[1:1] = _computing(predictor, plan)
    rows += [
        ["a step", milliseconds(predicted.step_seconds), "= the sum"],
        [
            "examples/s",
            f"{predicted.examples_per_second:,.1f}",
            f"= {batch.local} × {batch.replicas} × {batch.accumulate} / "
            f"{milliseconds(predicted.step_seconds)}",
        ],
        [
            "hours",
            f"{predicted.hours:,.3f}",
            f"= {plan.examples:,} examples × {plan.epochs:g} epochs / "
            f"{predicted.examples_per_second:,.1f} examples/s / 3600",
        ],
    ]
    rows += _priced(predictor, plan)
    used = predictor.memory(plan.layout)
    rows += [
        [f"memory: {name}", f"{size / 1e9:.3f} GB", f"= {how}"] for name, size, how in used.lines()
    ]
    rows.append(["memory", f"{used.total / 1e9:.3f} GB", "= the sum"])
    return "\n".join([describe(plan), *_columns(rows, left=(0, 2))])


def _priced(predictor, plan):
    """Money on demand, and as spot VMs, where there are prices."""
    predicted, machines = plan.prediction, plan.layout.machines
    rows = []
    for name, hours, usd, more in (
        ("on demand", predicted.hours, predicted.usd, ""),
        ("spot", predicted.spot_hours, predicted.spot_usd, _restarts(predictor, plan)),
    ):
        if hours and usd:
            price = usd / hours / machines
            how = f"= {hours:,.3f} h × {machines} × {price:,.2f} $/h{more}"
            rows.append([name, dollars(usd), how])
    return rows


def _restarts(predictor, plan):
    again = predictor.spot.expected_restarts(plan.prediction.hours, plan.layout.machines)
    return f", with {again:.2f} restarts expected"


def _computing(predictor, plan):
    """The parts of a micro-step's computation, and what runs have shown of it."""
    computed = predictor.compute(plan.machine.gpu, plan.layout)
    rows = []
    for term in computed.terms:
        share = f"at {term.peak_share:.0%} of the GPU's peak" if term.peak_share else ""
        rows.append([f"  {term.name}", milliseconds(term.seconds), share])
    correction = predictor.correction(plan.machine.gpu)
    if correction != 1:
        how = f"= {milliseconds(computed.seconds)} as predicted × what your runs have shown"
        rows.append(["  measured", f"× {correction:.3g}", how])
    return rows


def _columns(rows: Sequence[Sequence[str]], left: Sequence[int] | None = None) -> list[str]:
    """Lines of a table; numbers stand to the right."""
    left = [place + 1 for place in _LEFT] if left is None else left
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
