"""The web page about plans: a table, time against money, efficiency against devices.

It is one file that asks for nothing else, as that about runs is.
"""

import html
import os
import pathlib
from collections.abc import Sequence
from importlib import resources

from kdist.planner import listing
from kdist.planner.candidates import powers_of_two
from kdist.planner.plans import Layout, Plan
from kdist.planner.predicting import Predictor
from kdist.planner.searching import Found
from kdist.planner.units import dollars, duration

_MOST_DEVICES = 4096
_FRONT = "no other is faster and cheaper"
_LINES = 6
_ROWS = 20


def write(found: Found, predictor: Predictor, path: str | os.PathLike) -> pathlib.Path:
    """Writes the page; gives its path.

    Raises:
        OSError: the page cannot be written.
    """
    from kdist.report.page import fill_template, save  # plotly takes a part of a second

    template = resources.files(__package__).joinpath("plan.html").read_text(encoding="utf-8")
    return save(fill_template(template, _parts(found, predictor)), path)


def _parts(found, predictor):
    from kdist.report.figures import figure_html
    from kdist.report.tables import table

    job = predictor.job
    rows = [listing.cells(plan) for plan in found.plans]
    caption = f"The first {min(_ROWS, len(rows))} of {len(rows)} plans, by {found.ranking}"
    plans = table(caption, listing.HEADINGS, rows[:_ROWS])
    if rows[_ROWS:]:
        others = table("The others", listing.HEADINGS, rows[_ROWS:])
        plans += f"<details><summary>The other {len(rows) - _ROWS}</summary>{others}</details>"
    return {
        "title": html.escape(
            f"{job.workload.name}: {job.examples:,} examples, {job.epochs:g} epochs"
        ),
        "sentence": html.escape(listing.why(found)),
        "notes": html.escape(listing.notes(found, _ROWS)),
        "warnings": "".join(f"<p class=note>{html.escape(text)}</p>" for text in found.warnings),
        "plans": plans,
        "rejected": _rejected(found),
        "money": figure_html(money_plot(found), "time-against-money"),
        "efficiency": figure_html(efficiency_plot(found, predictor), "efficiency"),
        "step": figure_html(step_plot(found.plans[:_LINES]), "step"),
        "arithmetic": f"<div class=scroll tabindex=0 role=region aria-label=arithmetic><pre>"
        f"{html.escape(listing.explained(predictor, found.best))}</pre></div>",
    }


def _rejected(found):
    items = "".join(
        f"<li>{row.count:,} left out, {html.escape(f'{row.limit}: {row.reason}')}</li>"
        for row in found.rejected
    )
    return f"<ul>{items}</ul>" if items else ""


def money_plot(found: Found):
    """Hours against dollars of all plans; those that no other beats in both are a line."""
    import numpy as np

    from kdist.report.plots import Plot, Style

    plot = Plot("Time against money", "US dollars", "hours", 2)
    for axis in ("xaxis", "yaxis"):
        plot.layout[axis]["type"] = "log"
    priced = [plan for plan in found.plans if plan.usd]
    if not priced:
        plot.layout["xaxis"]["type"] = "linear"
        priced = list(found.plans)
    for name, plans, style in (
        ("plans", priced, Style.of_order(5)),
        (
            "no other is faster and cheaper",
            [p for p in found.pareto if p in priced],
            Style.of_order(3),
        ),
    ):
        usd, hours = (
            np.array([value(plan) for plan in plans], float)
            for value in (lambda p: p.usd, lambda p: p.hours)
        )
        plot.add_points(name, usd, hours, [_said(plan) for plan in plans], style)
    if len(plot.data) > 1:
        plot.data[1]["mode"] = "lines+markers"
    return plot


def _said(plan):
    cells = listing.cells(plan)
    return f"{cells[0]}, {cells[1]}, batch {cells[3]}: {duration(plan.hours)}, {dollars(plan.usd)}"


def efficiency_plot(found: Found, predictor: Predictor):
    """The efficiency of the first kinds of machines from 1 to 4,096 devices."""
    import numpy as np

    from kdist.report.plots import Plot, Style

    plot = Plot("Efficiency against devices", "devices", "efficiency", _LINES, from_zero=True)
    plot.layout["xaxis"] |= {"type": "log", "dtick": 0.30103, "tickformat": "d"}
    plot.layout["yaxis"]["tickformat"] = ".0%"
    for order, plan in enumerate(_first_of_each_gpu(found.plans)):
        machine = plan.machine
        per = machine.gpus_per_node
        devices = _device_counts(per)
        rates = [predictor.step(_spread(plan.layout, n, per), machine).rate for n in devices]
        line = np.array(rates) / (rates[0] * np.array(devices))
        name = f"{plan.machine.name}, local batch {plan.layout.local_batch}"
        plot.add_line(name, np.array(devices), line, Style.of_order(order), hover="%{x}: %{y:.0%}")
    return plot


def _device_counts(per_machine):
    """1, 2, 4 … of one machine, then all of 2, 4 … machines, up to 4,096 in all."""
    machines = powers_of_two(_MOST_DEVICES // per_machine)
    return powers_of_two(per_machine) + [count * per_machine for count in machines[1:]]


def _spread(layout, devices, per_machine):
    """The same batch a device on so many devices."""
    machines = max(1, devices // per_machine)
    served = layout.strategy == "parameter_server"
    strategy = "mirrored" if machines == 1 else "parameter_server" if served else "multi_worker"
    here = min(devices, per_machine)
    name = "one_device" if devices == 1 else strategy
    return Layout(name, machines, here, layout.local_batch, layout.accumulate, layout.local_steps)


def _first_of_each_gpu(plans) -> list[Plan]:
    """The first plan of each GPU, with the most devices that a machine has."""
    first: dict[str, Plan] = {}
    for plan in plans:
        known = first.get(plan.machine.gpu)
        if known is None or (
            plan.layout.devices > known.layout.devices and plan.layout.batch.replicas > 1
        ):
            first[plan.machine.gpu] = plan
    return list(first.values())[:_LINES]


def step_plot(plans: Sequence[Plan]):
    """The terms of a step of each plan, as stacked bars."""
    from kdist.report.plots import COLOURS, Plot

    plot = Plot("Where a step goes", "milliseconds", "", 6)
    names = [f"{place}. {_short(plan)}" for place, plan in enumerate(plans, 1)]
    colours = (*COLOURS, "#888888", "#7B4FA3")  # a step has up to eight terms
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
            colours[order % len(colours)],
            customdata=texts,
            hovertemplate=f"{name}: %{{x:.3g}} ms (%{{customdata:.1%}})<extra></extra>",
        )
    plot.layout["barmode"] = "stack"
    plot.layout["yaxis"]["autorange"] = "reversed"
    return plot


def _short(plan):
    machines = f"{plan.layout.machines} × " if plan.layout.machines > 1 else ""
    return f"{machines}{plan.machine.name}, {plan.layout.local_batch}"
