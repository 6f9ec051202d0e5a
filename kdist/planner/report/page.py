"""Web page about plans: which to choose, time against money, efficiency against devices, a table.

It is one file without external resources.
"""

from __future__ import annotations

import dataclasses
import html
import os
import pathlib
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

from kdist.planner.plans import Plan, dollars, duration
from kdist.planner.report import listing
from kdist.planner.selection.candidates import powers_of_two

if TYPE_CHECKING:
    from kdist.planner.planning import RankedPlans

_MAX_DEVICES = 4096
_MAX_LINES = 6
_MAX_ROWS = 20


def write(result: RankedPlans, path: str | os.PathLike) -> pathlib.Path:
    """Writes the page.

    Returns:
        The path.

    Raises:
        OSError: If the page cannot be written.
    """
    from kdist.report.page import fill_template, save  # plotly's import takes a while

    template = resources.files(__package__).joinpath("plan.html").read_text(encoding="utf-8")
    return save(fill_template(template, _parts(result)), path)


def _parts(result):
    from kdist.report.plots import figure_html
    from kdist.report.tables import table

    job = result.predictor.job
    rows = [listing.row_cells(plan) for plan in result.plans]
    caption = f"The first {min(_MAX_ROWS, len(rows))} of {len(rows)} plans, by {result.ranking}"
    plans = table(caption, listing.HEADINGS, rows[:_MAX_ROWS])
    if rows[_MAX_ROWS:]:
        others = table("The others", listing.HEADINGS, rows[_MAX_ROWS:])
        plans += f"<details><summary>The other {len(rows) - _MAX_ROWS}</summary>{others}</details>"
    return {
        "title": html.escape(
            f"{job.workload.name}: {job.examples:,} examples, {job.epochs:g} "
            f"epoch{'s' * (job.epochs != 1)}"
        ),
        "sentence": html.escape(listing.recommendation(result)),
        # Flags are not broken at their hyphens.
        "command": " ".join(
            f"<span>{html.escape(word)}</span>" for word in listing.run_text(result.best).split(" ")
        ),
        "choices": _choices(result),
        "notes": html.escape(listing.notes_text(result)),
        "warnings": "".join(f"<p class=note>{html.escape(text)}</p>" for text in result.warnings),
        "plans": plans,
        "rejected": _rejections(result),
        "money": figure_html(money_plot(result), "time-against-money"),
        "efficiency": _efficiency(result),
        "step": figure_html(step_plot(result.plans[:_MAX_LINES]), "step"),
        "arithmetic": f"<div class=scroll tabindex=0 role=region aria-label=arithmetic><pre>"
        f"{html.escape(result.explain())}</pre></div>",
    }


def _choices(result):
    """Returns a table of the plans that are recommended, the fastest, cheapest, and balanced."""
    from kdist.report.tables import table

    rows = listing.alternatives(result, with_best=True)
    return table("Choices", ("choice", *listing.ALTERNATIVES[1:]), rows)


def _rejections(result):
    items = "".join(
        f"<li>{row.count:,} left out, {html.escape(f'{row.limit}: {row.reason}')}</li>"
        for row in result.rejected
    )
    return f"<ul>{items}</ul>" if items else ""


def money_plot(result: RankedPlans):
    """Returns a plot of hours against dollars of all plans; the Pareto front is a line."""
    import numpy as np

    from kdist.report.plots import Plot, Style, log_axis

    plot = Plot("Time against money", "US dollars", "hours", 2)
    priced = [plan for plan in result.plans if plan.usd]
    plot.layout["yaxis"] |= log_axis([plan.hours for plan in result.plans])
    if priced:
        plot.layout["xaxis"] |= log_axis([plan.usd for plan in priced])
    else:
        priced = list(result.plans)
    front = [plan for plan in result.pareto if plan in priced]
    for name, plans, style in (
        ("plans", priced, Style.of_order(5)),
        ("no other is faster and cheaper", front, Style.of_order(3)),
    ):
        usd = np.array([plan.usd for plan in plans], float)
        hours = np.array([plan.hours for plan in plans], float)
        plot.add_points(name, usd, hours, [_hover_text(plan) for plan in plans], style)
    if len(plot.data) > 1:
        plot.data[1]["mode"] = "lines+markers"
    return plot


def _hover_text(plan):
    cells = listing.row_cells(plan)
    return f"{cells[0]}, {cells[1]}, batch {cells[3]}: {duration(plan.hours)}, {dollars(plan.usd)}"


def efficiency_plot(result: RankedPlans):
    """Returns a plot of the efficiency of the first kinds of machines on up to 4,096 devices."""
    import numpy as np

    from kdist.report.plots import Plot, Style

    plot = Plot("Efficiency against devices", "devices", "efficiency", _MAX_LINES, from_zero=True)
    plot.layout["xaxis"] |= {"type": "log", "dtick": 0.30103, "tickformat": "d"}
    plot.layout["yaxis"]["tickformat"] = ".0%"
    for order, plan in enumerate(_first_of_each_gpu(result.plans)):
        machine, batch = plan.machine, plan.local_batch
        devices = _device_counts(machine.gpus_per_node)
        rates = [
            result.predictor.step(_on_devices(plan, count), batch, machine).rate
            for count in devices
        ]
        line = np.array(rates) / (rates[0] * np.array(devices))
        name = f"{_vm_name(machine)}, local batch {batch}"
        plot.add_line(name, np.array(devices), line, Style.of_order(order), hover="%{x}: %{y:.0%}")
    return plot


def _efficiency(result):
    """Returns the plot of efficiency, or a remark if all plans divide the model or its state."""
    from kdist.report.plots import figure_html

    plot = efficiency_plot(result)
    if not plot.data:
        return "<p class=note>All plans divide the model or its state among devices.</p>"
    return (
        "<p>For each number of devices, on full machines of the plans below. The local batch is "
        f"that of the plan, for any global batch.</p>{figure_html(plot, 'efficiency')}"
    )


def _device_counts(per_machine):
    """Returns 1, 2, 4, … devices of one machine, then all of 2, 4, … machines, up to 4,096."""
    machines = powers_of_two(_MAX_DEVICES // per_machine)
    return powers_of_two(per_machine) + [count * per_machine for count in machines[1:]]


def _on_devices(plan, devices):
    """Returns the plan's layout on another number of devices."""
    machines = max(1, devices // plan.machine.gpus_per_node)
    asynchronous = plan.layout.asynchronous and machines > 1
    return dataclasses.replace(
        plan.layout, data=devices, machines=machines, asynchronous=asynchronous
    )


def _first_of_each_gpu(plans) -> list[Plan]:
    """Returns the first plan of each GPU, with the largest number of devices in a machine.

    Split models and sharded replicas are left out: their efficiency depends on the layout, not on
    the devices alone.
    """
    first: dict[str, Plan] = {}
    for plan in plans:
        if plan.layout.group_size > 1 or plan.layout.shard:
            continue
        known = first.get(plan.machine.gpu)
        if known is None or plan.layout.devices_per_machine > known.layout.devices_per_machine:
            first[plan.machine.gpu] = plan
    return list(first.values())[:_MAX_LINES]


def step_plot(plans: Sequence[Plan]):
    """Returns stacked bars of the terms of a step of each plan."""
    from kdist.report.plots import COLORS, Plot

    plot = Plot("Where a step goes", "milliseconds", "", 6)
    names = [f"{place}. {_short_name(plan)}" for place, plan in enumerate(plans, 1)]
    colors = (*COLORS, "#888888", "#7B4FA3")  # a step has up to eight terms
    terms = list(dict.fromkeys(term.name for plan in plans for term in plan.prediction.terms))
    for order, name in enumerate(terms):
        lengths, texts = [], []
        for plan in plans:
            length = sum(term.seconds for term in plan.prediction.terms if term.name == name)
            lengths.append(length * 1e3)
            texts.append(length / plan.prediction.step_seconds)
        plot.add_bars(
            name,
            names,
            lengths,
            colors[order % len(colors)],
            customdata=texts,
            hovertemplate=f"{name}: %{{x:.3g}} ms (%{{customdata:.1%}})<extra></extra>",
        )
    plot.layout["barmode"] = "stack"
    plot.layout["yaxis"]["autorange"] = "reversed"
    return plot


def _short_name(plan):
    """Returns the number and the name of a plan's machines."""
    machines = f"{plan.layout.machines} × " if plan.layout.machines > 1 else ""
    return f"{machines}{_vm_name(plan.machine)}"


def _vm_name(machine):
    """Returns a machine's name without its cloud and the GPUs in it, which the table shows."""
    name = machine.name.partition(" (")[0]
    return name.partition(" ")[2] or name
