"""Plans as text: a ranked table, the reason for the first plan, and the arithmetic of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdist.planner.plans import (
    Plan,
    describe,
    dollars,
    duration,
    milliseconds,
    strategy_text,
    train_command,
)
from kdist.planner.report.arithmetic import (
    memory_of_part_text,
    memory_texts,
    sharded_texts,
    split_texts,
    term_texts,
)
from kdist.planner.selection.candidates import CHOICES
from kdist.planner.selection.data_workers import find_data_workers
from kdist.planner.selection.prediction import Predictor

if TYPE_CHECKING:
    from kdist.planner.planning import RankedPlans

HEADINGS = (
    *("machine", "strategy", "devices", "batch", "step", "parts", "examples/s", "efficiency"),
    *("memory", "time", "on demand", "spot"),
)
ALTERNATIVES = ("instead", "plan", "time", "price")
_LEFT_ALIGNED = (0, 1, 3, 5)
_MAX_WARNINGS = 5
_MIN_SHARE = 0.02  # smaller terms of a step are left out
_REASONS = {
    "fastest": "the fastest",
    "cheapest": "the cheapest",
    "balanced": "the least hours × dollars",
}


def row_cells(plan: Plan) -> list[str]:
    """Returns the cells of a plan in the table, in the order of `HEADINGS`."""
    layout, predicted = plan.layout, plan.prediction
    machines = f"{layout.machines} × " if layout.machines > 1 else ""
    accumulate = f" × {layout.accumulate}" if layout.accumulate > 1 else ""
    available = predicted.device_memory_bytes
    return [
        f"{machines}{plan.machine.name}",
        strategy_text(layout),
        f"{layout.devices}",
        f"{plan.local_batch}{accumulate} ({plan.batch.global_size})",
        milliseconds(predicted.step_seconds),
        _shares(plan),
        f"{predicted.examples_per_second:,.0f}",
        f"{predicted.efficiency:.0%}",
        f"{predicted.memory_bytes / 1e9:.1f}"
        + (f" of {available / 1e9:g} GB" if available else " GB"),
        duration(plan.hours),
        dollars(predicted.usd) if predicted.usd else "–",
        dollars(predicted.spot_usd) if predicted.spot_usd else "–",
    ]


def _shares(plan):
    """Returns the larger terms of a step in per cent."""
    total = plan.prediction.step_seconds
    terms = sorted(plan.prediction.terms, key=lambda term: -term.seconds)
    return ", ".join(
        f"{term.name} {term.seconds / total:.0%}"
        for term in terms
        if term.seconds >= _MIN_SHARE * total
    )


def plans_text(result: RankedPlans, number: int) -> str:
    """Returns the recommended plan, other choices, a table of `number` plans, and notes.

    Args:
        result: the plans.
        number: number of plans in the table.
    """
    rows = [["", *HEADINGS]]
    for place, plan in enumerate(result.plans[:number], 1):
        mark = "*" if plan in result.pareto else ""
        rows.append([f"{place}{mark}", *row_cells(plan)])
    lines = [recommendation(result), f"Run it, with your --dataset: {run_text(result.best)}", ""]
    if others := alternatives(result):
        lines += [*_columns([ALTERNATIVES, *others], left=(0, 1)), ""]
    lines += _columns(rows, left=[place + 1 for place in _LEFT_ALIGNED])
    if len(result.plans) > number:
        lines.append(f"… and {len(result.plans) - number} more (--top)")
    spot = "; time and ranking are those of spot VMs" if result.best.spot else ""
    lines += [f"* no other is both faster and cheaper{spot}", ""]
    lines += [f"Warning: {warning}" for warning in result.warnings[:_MAX_WARNINGS]]
    if len(result.warnings) > _MAX_WARNINGS:
        lines.append(f"… and {len(result.warnings) - _MAX_WARNINGS} more of these")
    if option := find_data_workers(result.best):
        lines.append(str(option))
    lines.append(notes_text(result))
    lines += [f"{row.count} left out, {row.limit}: {row.reason}" for row in result.rejected]
    return "\n".join(lines)


def recommendation(result: RankedPlans) -> str:
    """Returns the first plan, its time and price, and why it is first, in a sentence."""
    best, aim = result.best, CHOICES[result.ranking]
    names = [name for name, plan in result.choices.items() if plan is best][1:]
    reasons = [_REASONS[name] for name in names if name != aim]
    is_limited = aim not in names and best.layout.machines == 1
    reasons.insert(0, _REASONS[aim] + (" on one machine" if is_limited else ""))
    price = f" for {dollars(best.usd)}" if best.usd else ""
    return (
        f"Recommended: {describe(best.layout, best.local_batch, best.machine)}, "
        f"{duration(best.hours)}{price}: {_in_words(reasons)}."
    )


def _in_words(names):
    """Returns a list as English writes it.

    >>> _in_words(["fastest", "cheapest", "balanced"])
    'fastest, cheapest, and balanced'
    """
    *others, last = names
    if len(others) > 1:
        return f"{', '.join(others)}, and {last}"
    return " and ".join(names)


def run_text(plan: Plan) -> str:
    """Returns the command that trains as planned, and where it runs."""
    machines = plan.layout.machines
    where = f" (on each of {machines} machines)" if machines > 1 else ""
    return f"{train_command(plan)}{where}"


def alternatives(result: RankedPlans, with_best: bool = False) -> list[list[str]]:
    """Returns rows about plans to choose: names, plan, time, price, as multiples as well.

    The first plan is one of them only on request.
    """
    named: dict[Plan, list[str]] = {}
    for name, plan in result.choices.items():
        named.setdefault(plan, []).append(name)
    return [
        [
            _in_words(names),
            describe(plan.layout, plan.local_batch, plan.machine),
            f"{duration(plan.hours)} ({plan.hours / result.best.hours:.2g} ×)",
            f"{dollars(plan.usd)} ({plan.usd / result.best.usd:.2g} ×)" if result.best.usd else "–",
        ]
        for plan, names in named.items()
        if with_best or plan is not result.best
    ]


def notes_text(result: RankedPlans) -> str:
    """Returns the limit of the global batch, and the date and source of the prices."""
    batch = (
        f"Global batches up to {result.global_batch_limit:,} (--max_global_batch): larger ones "
        "need other learning rates."
    )
    notes = (result.best.derivation, checkpoints_text(result.best), batch, result.prices)
    return " ".join(filter(None, notes))


def checkpoints_text(plan: Plan) -> str:
    """Returns the interval of checkpoints on spot VMs and its derivation; "" on demand."""
    predicted = plan.prediction
    size, save = predicted.checkpoint_bytes, predicted.save_seconds
    interval, rate = predicted.checkpoint_seconds, predicted.preemptions_per_hour
    if not (plan.spot and size and save and interval and rate):
        return ""
    save_text, between_text = duration(save / 3600), duration(1 / rate)
    return (
        f"A checkpoint every {duration(interval / 3600)}: saving {size / 1e9:.3g} GB takes "
        f"{save_text}, a preemption is expected every {between_text}, and √(2 × {save_text} × "
        f"{between_text}) costs the least. Time and price contain saving, {rate * plan.hours:.2g} "
        "restarts, and the work that they lose."
    )


def arithmetic_text(predictor: Predictor, plan: Plan) -> str:
    """Returns the arithmetic of a plan, line by line."""
    predicted, batch = plan.prediction, plan.batch
    description = describe(plan.layout, plan.local_batch, plan.machine)
    rows = [
        *_step_rows(predictor, plan),
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
        *_price_rows(predictor, plan),
        *_memory_rows(predictor, plan),
    ]
    return "\n".join([description, *_columns(rows, left=(0, 2))])


def _step_rows(predictor, plan):
    """Returns the terms of a step; those of its computation follow the first."""
    arguments = plan.layout, plan.local_batch, plan.machine
    texts = term_texts(
        predictor.setup(*arguments),
        predictor.exchanged(plan.layout),
        plan.input_work,
        predictor.micro_step(*arguments),
        predictor.constants,
    )
    if plan.layout.group_size > 1:
        texts |= split_texts(predictor.split(plan.layout), *arguments)
    if divided := predictor.divided(plan.layout):
        how = sharded_texts(divided, plan.layout, plan.optimizer)["exchange in node"]
        texts["exchange in node"] += f": {how}"
    rows = [
        [term.name, milliseconds(term.seconds), f"= {texts[term.name]}"]
        for term in plan.prediction.terms
    ]
    if plan.layout.group_size == 1:
        computed = predictor.compute(plan.machine.gpu, plan.layout, plan.local_batch)
        rows[1:1] = _compute_rows(computed, predictor.correction(plan.machine.gpu))
    return rows


def _compute_rows(computed, correction):
    """Returns the terms of a micro-step's computation, and the correction by measured runs."""
    rows = []
    for term in computed.terms:
        share = f"at {term.peak_share:.0%} of the GPU's peak" if term.peak_share else ""
        rows.append([f"  {term.name}", milliseconds(term.seconds), share])
    if correction != 1:
        how = f"= {milliseconds(computed.seconds)} as predicted × what your runs have shown"
        rows.append(["  measured", f"× {correction:.3g}", how])
    return rows


def _price_rows(predictor, plan):
    """Returns the prices on demand and on spot VMs, where they are known."""
    predicted, machines, spot = plan.prediction, plan.layout.machines, predictor.spot
    restarts = (predicted.spot_hours or 0.0) * predicted.preemptions_per_hour
    rows = []
    for name, hours, usd, suffix in (
        ("on demand", predicted.hours, predicted.usd, ""),
        (
            "spot",
            predicted.spot_hours,
            predicted.spot_usd,
            f", with {restarts:.2f} restarts expected",
        ),
    ):
        if hours and usd:
            price = usd / hours / machines
            how = f"= {hours:,.3f} h × {machines} × {price:,.2f} $/h{suffix}"
            rows.append([name, dollars(usd), how])
    if predicted.spot_hours and predicted.checkpoint_seconds:
        interval, rate = predicted.checkpoint_seconds, predicted.preemptions_per_hour
        job = predictor.job
        rows += [
            [
                "  checkpoint",
                f"{predicted.checkpoint_bytes / 1e9:.3f} GB",
                f"= all weights and the slots of {job.optimizer}, saved in "
                f"{duration(predicted.save_seconds / 3600)} at "
                f"{spot.save_bytes_per_second / 1e6:,.0f} MB/s",
            ],
            [
                "  interval",
                duration(interval / 3600),
                f"= √(2 × {predicted.save_seconds:.3g} s × {duration(1 / rate)} between "
                f"preemptions of {machines} VMs), at least a minute (Young, Daly)",
            ],
            [
                "  spot hours",
                f"{predicted.spot_hours:,.3f}",
                f"= {predicted.hours:,.3f} h of work + {predicted.save_seconds / interval:.2%} for "
                f"saving + {restarts:.2f} restarts of {duration(spot.restart_hours)}, each after "
                f"about {duration(interval / 7200)} of lost work",
            ],
        ]
    return rows


def _memory_rows(predictor, plan):
    job, batch = predictor.job, plan.batch
    workload, needed = job.workload, predictor.memory(plan.layout, plan.local_batch)
    local, accumulate = batch.local, batch.accumulate
    if plan.layout.group_size > 1:
        workload, needed = predictor.fullest_part(plan.layout, plan.local_batch)
        local //= plan.layout.micro_batches
        accumulate *= plan.layout.micro_batches
    texts = memory_texts(needed, workload, local, job.precision, job.optimizer, accumulate)
    if plan.layout.group_size > 1:
        texts["step"] = memory_of_part_text(plan.layout, local)
        texts["input"] = f"the rows of {plan.layout.micro_batches} micro-batches that wait"
    if divided := predictor.divided(plan.layout):
        texts |= sharded_texts(divided, plan.layout, job.optimizer)
    return [
        *(
            [f"memory: {name.replace('_', ' ')}", f"{size / 1e9:.3f} GB", f"= {texts[name]}"]
            for name, size in needed.parts()
        ),
        ["memory", f"{needed.total / 1e9:.3f} GB", "= the sum"],
    ]


def _columns(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Returns the lines of a table; columns that are not `left` are aligned to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
