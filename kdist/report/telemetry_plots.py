"""Plots of telemetry: the parts of the step time, and the devices of one run."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from kdist.report.plots import MAX_POINTS, Plot, Style, has_legend
from kdist.report.records import Records, number
from kdist.report.runs import Run

# Part of a step -> its color, its label, and the field of `timing` records with its share.
PARTS = {
    "input": ("#E69F00", "waiting for input", "input_share"),
    "callbacks": ("#CC79A7", "callbacks", "callback_share"),
    "telemetry": ("#999999", "telemetry", "telemetry_share"),
    "compute": ("#0072B2", "compute", "compute_share"),
    "reduce": ("#009E73", "reduce", "reduce_share"),
    "step": ("#56B4E9", "step (compute and reduce)", "step_share"),
}
_MINUTES = "minutes since training began"
_PERCENTILES = {"p50": "median", "p90": "90th percentile", "p99": "99th percentile"}
# With three lines each, more runs cannot be distinguished in one plot.
_MAX_RUNS_WITH_ALL_PERCENTILES = 4

_GIB = 2.0**-30


def breakdown(run: Run) -> dict[str, float]:
    """Returns the share of each part of the step time, 0 to 1; empty if not measured.

    The shares are those of the summary, or the weighted mean of the windows of an unfinished run.
    """
    stored = run.summary.get("breakdown")
    stored = stored if isinstance(stored, dict) else {}
    known = {part: share for part in PARTS if (share := number(stored.get(part))) is not None}
    if known:
        return known
    timing = run.metrics("timing")
    shares = {part: _mean(timing, field) for part, (_, _, field) in PARTS.items()}
    if shares["compute"] is not None and shares["reduce"] is not None and shares["step"]:
        # Few windows have a profile, but all windows have the sum of the two.
        whole = shares.pop("step") / (shares["compute"] + shares["reduce"] or 1)
        shares |= {part: shares[part] * whole for part in ("compute", "reduce")}
    else:
        shares["compute"] = shares["reduce"] = None
    return {part: share for part, share in shares.items() if share is not None}


def mean_step_seconds(run: Run) -> float | None:
    """Returns the mean step time of all windows; None if not measured."""
    seconds, steps = run.metrics("timing").points("window_seconds", "window_steps")
    return float(seconds.sum() / steps.sum()) if steps.sum() else None


def _mean(timing: Records, field):
    weights, shares = timing.points("window_seconds", field)
    return float(np.average(shares, weights=weights)) if weights.sum() else None


def breakdown_plot(runs: Sequence[Run]) -> Plot | None:
    """Returns one stacked bar per run, in ms per step if known for all; None if not measured."""
    known = {run.name: (run, parts) for run in runs if (parts := breakdown(run))}
    if not known:
        return None
    steps = {name: mean_step_seconds(run) for name, (run, _) in known.items()}
    in_milliseconds = all(steps.values())
    unit = "milliseconds per step" if in_milliseconds else "% of the time"
    plot = Plot("Where the time of a step goes", unit, num_names=2)
    for part, (color, label, _) in PARTS.items():
        shares = [parts.get(part) for _, parts in known.values()]
        if any(share is not None for share in shares):
            scales = [1e3 * (steps[name] or 0) if in_milliseconds else 100 for name in known]
            plot.add_bars(
                label,
                list(known),
                [s if s is None else s * c for s, c in zip(shares, scales, strict=True)],
                color,
                customdata=[0 if share is None else share for share in shares],
                # A thin bar has no room for a label; the table below the plot has all values.
                texttemplate=[
                    "%{customdata:.0%}" if (share or 0) >= 0.08 else "" for share in shares
                ],
                hovertemplate=f"{label}: %{{customdata:.1%}}, %{{x:.4g}} {unit}"
                "<extra>%{y}</extra>",
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                constraintext="none",
            )
    height = 170 + max(16, 44 - 2 * len(known)) * len(known)
    plot.layout |= {"barmode": "stack", "bargap": 0.3, "height": height}
    plot.layout["legend"]["traceorder"] = "normal"
    plot.layout["yaxis"]["autorange"] = "reversed"  # the first run on top
    plot.layout["yaxis"]["type"] = "category"  # the name of a run may be a number
    return plot


def step_time_plots(runs: Sequence[Run], max_points: int = MAX_POINTS) -> list[Plot]:
    """Returns the percentiles of the step time in each window; several plots for many runs."""
    if len(runs) <= _MAX_RUNS_WITH_ALL_PERCENTILES:
        groups = [("Time of a step", list(_PERCENTILES))]
    else:
        groups = [(f"Time of a step, {_PERCENTILES[p]}", [p]) for p in _PERCENTILES]
    plots = [_step_times(runs, title, kinds, max_points) for title, kinds in groups]
    return [plot for plot in plots if plot.data]


def _step_times(runs, title, percentiles, max_points):
    num_names = len(runs) * len(percentiles)
    plot = Plot(
        title,
        _MINUTES,
        "ms",
        num_names,
        max_points,
        has_legend=has_legend(runs),
        from_zero=True,
        axis="minutes",
    )
    for order, run in enumerate(runs):
        for position, percentile in enumerate(percentiles):
            style = Style.of_order(order)
            if len(percentiles) > 1:
                style = Style(style.color, ("solid", "dash", "dot")[position])
            seconds, times = run.metrics("timing").points("seconds", f"step_seconds_{percentile}")
            what = _PERCENTILES[percentile]
            plot.add_line(
                _line_name(run, what, len(runs), len(percentiles)),
                seconds / 60,
                times * 1e3,
                style,
                hover="%{y:.4g} ms at minute %{x:.2f}",
                run=run.name,
            )
    return plot


def _line_name(run, percentile, num_runs, num_percentiles):
    if num_percentiles == 1:
        return run.name
    return percentile if num_runs == 1 else f"{run.name}: {percentile}"


def share_plots(run: Run, max_points: int = MAX_POINTS) -> list[Plot]:
    """Returns plots of one run over time: shares of the parts, and busy replicas or devices."""
    timing = run.metrics("timing")
    shares = Plot("Share of the time", _MINUTES, "%", len(PARTS), max_points, from_zero=True)
    for part, (color, label, field) in PARTS.items():
        seconds, share = timing.points("seconds", field)
        # Compute and reduce are dashed, as they are also part of `step`.
        dash = "dash" if part in ("compute", "reduce") else "solid"
        hover = "%{y:.1f} % at minute %{x:.2f}"
        shares.add_line(label, seconds / 60, 100 * share, Style(color, dash), hover=hover)
    busy = [
        ("replica_busy_seconds", "Busy time of each replica", "ms per step", 1e3, ".4g"),
        ("device_busy_share", "Busy share of each device", "%", 100, ".0f"),
    ]
    plots = [shares, *(_column_plot(timing, *each, max_points) for each in busy)]
    return [plot for plot in plots if plot.data]


def _column_plot(timing, field, title, unit, factor, digits, max_points):
    """Returns a plot with one line per position of a field that is a list."""
    columns = [name for name in timing.columns if name.startswith(f"{field}/")]
    plot = Plot(title, _MINUTES, unit, len(columns), max_points, from_zero=True)
    hover = f"%{{y:{digits}}} {unit} at minute %{{x:.2f}}"
    for order, name in enumerate(columns):
        seconds, values = timing.points("seconds", name)
        label = f"{field.partition('_')[0]} {name.rpartition('/')[2]}"
        plot.add_line(label, seconds / 60, factor * values, Style.of_order(order), hover=hover)
    return plot


@dataclasses.dataclass(frozen=True)
class DeviceMetric:
    """One plot for one kind of device."""

    title: str
    kind: str  # of device, such as "gpu" for "gpu/0"
    # Label of a line -> field of `devices.jsonl`; a single field needs no label.
    fields: Mapping[str, str]
    unit: str  # of the y-axis
    scale: float = 1.0  # factor that converts the field to this unit


def _rates(*directions, prefix=""):
    return {direction: f"{prefix}{direction}_bytes_per_second" for direction in directions}


DEVICE_METRICS = (
    DeviceMetric("GPU utilization", "gpu", {"": "utilization"}, "%", 100),
    DeviceMetric("GPU memory utilization", "gpu", {"": "memory_utilization"}, "% of the time", 100),
    DeviceMetric("GPU memory used", "gpu", {"": "memory_used_bytes"}, "GiB", _GIB),
    DeviceMetric("GPU power", "gpu", {"": "power_watts"}, "W"),
    DeviceMetric("GPU temperature", "gpu", {"": "temperature_celsius"}, "°C"),
    DeviceMetric("SM clock", "gpu", {"": "sm_clock_mhz"}, "MHz"),
    DeviceMetric("PCIe", "gpu", _rates("sent", "received", prefix="pcie_"), "GB/s", 1e-9),
    DeviceMetric("NVLink", "gpu", _rates("sent", "received", prefix="nvlink_"), "GB/s", 1e-9),
    DeviceMetric("CPU cores", "cpu", {"": "utilization"}, "%", 100),
    DeviceMetric("Cores in use by each process", "process", {"": "utilization"}, "cores"),
    DeviceMetric("Memory of each process", "process", {"": "memory_used_bytes"}, "GiB", _GIB),
    DeviceMetric("Disk", "disk", _rates("read", "written"), "MB/s", 1e-6),
    DeviceMetric("Network", "network", _rates("sent", "received"), "MB/s", 1e-6),
)

# Lines of more cores cannot be distinguished; the plot shows their mean and extremes.
MAX_CORES = 12


def device_plots(run: Run, max_points: int = MAX_POINTS) -> list[Plot]:
    """Returns a plot of each of `DEVICE_METRICS`; the mean and extremes of many cores."""
    plots = [_plot(run, metric, max_points) for metric in DEVICE_METRICS]
    return [plot for plot in plots if plot.data]


def devices_in_words(run: Run) -> str:
    """Returns text such as "4 GPUs, 8 cores on node7"; empty if no device was measured."""
    hosts = sorted({host for host, _ in run.devices})
    kinds = [device.split("/")[0] for _, device in run.devices]
    counts = [
        f"{n} {noun}{'s' if n > 1 else ''}"
        for kind, noun in (("gpu", "GPU"), ("cpu", "core"))
        if (n := kinds.count(kind))
    ]
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{', '.join(counts) or 'measured'} on {where}" if hosts else ""


def _plot(run, metric, max_points):
    lines = _lines(run, metric)
    if metric.kind == "cpu" and len(lines) > MAX_CORES:
        lines = _mean_and_extremes(lines)
    num_names = len({device for device, *_ in lines})
    x_title = "minutes since training began"
    plot = Plot(metric.title, x_title, metric.unit, num_names, max_points, from_zero=True)
    orders = {name: order for order, name in enumerate(dict.fromkeys(name for name, *_ in lines))}
    for name, label, seconds, values in lines:
        style = Style.of_order(orders[name])
        is_second = label and label != next(iter(metric.fields))
        plot.add_line(
            name,
            seconds / 60,
            values * metric.scale,
            style.companion if is_second else style,
            what=label,
            hover=f"%{{y:.4g}} {metric.unit} at minute %{{x:.2f}}",
            in_legend=not is_second,
        )
    return plot


def _lines(run, metric):
    """Returns (device, label, seconds, values) of each line that has points."""
    several_hosts = len({host for host, _ in run.devices}) > 1
    lines = []
    for (host, device), records in run.devices.items():
        if device.split("/")[0] == metric.kind:
            name = f"{host}/{device}" if several_hosts else device
            for label, field in metric.fields.items():
                seconds, values = records.points("seconds", field)
                if len(values):
                    lines.append((name, label, seconds, values))
    return lines


def _mean_and_extremes(lines):
    """Returns the mean and extremes of all cores; interpolates missing samples."""
    longest = max((seconds for *_, seconds, _ in lines), key=len)
    table = np.array([np.interp(longest, seconds, values) for *_, seconds, values in lines])
    return [
        (f"{what} of {len(lines)} cores", "", longest, values)
        for what, values in [
            ("mean", table.mean(0)),
            ("highest", table.max(0)),
            ("lowest", table.min(0)),
        ]
    ]
