"""Plots of `devices.jsonl` of one run: one plot per metric, one line per device."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kdist.report.plots import MAX_POINTS, Plot, Style
from kdist.report.runs import Run

_GIB = 2.0**-30


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


METRICS = (
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
    """Returns a plot of each of `METRICS`; the mean and extremes of many cores."""
    plots = [_plot(run, metric, max_points) for metric in METRICS]
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
