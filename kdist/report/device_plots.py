"""Plots of what the devices of one run did, from `devices.jsonl`: one a metric, a line a device.

for plot in device_plots(run, max_points=2000):
    plot.figure.show()
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kdist.report.plots import Plot, Style
from kdist.report.runs import Run
from kdist.report.thinning import MAX_POINTS

_GIB = 2.0**-30


@dataclasses.dataclass(frozen=True)
class Metric:
    """What is plotted of a kind of device.

    Attributes:
        title: of the plot.
        kind: of the device, as its name begins: "gpu" for "gpu/0".
        fields: label of a line -> field of `devices.jsonl`; one field needs no label.
        unit: of the y-axis.
        scale: what the field is multiplied by to be in this unit.
    """

    title: str
    kind: str
    fields: Mapping[str, str]
    unit: str
    scale: float = 1.0


def _rates(*directions, prefix=""):
    return {direction: f"{prefix}{direction}_bytes_per_second" for direction in directions}


METRICS = (
    Metric("GPU utilization", "gpu", {"": "utilization"}, "%", 100),
    Metric("GPU memory utilization", "gpu", {"": "memory_utilization"}, "% of the time", 100),
    Metric("GPU memory used", "gpu", {"": "memory_used_bytes"}, "GiB", _GIB),
    Metric("GPU power", "gpu", {"": "power_watts"}, "W"),
    Metric("GPU temperature", "gpu", {"": "temperature_celsius"}, "°C"),
    Metric("SM clock", "gpu", {"": "sm_clock_mhz"}, "MHz"),
    Metric("PCIe", "gpu", _rates("sent", "received", prefix="pcie_"), "GB/s", 1e-9),
    Metric("NVLink", "gpu", _rates("sent", "received", prefix="nvlink_"), "GB/s", 1e-9),
    Metric("CPU cores", "cpu", {"": "utilization"}, "%", 100),
    Metric("Cores in use by each process", "process", {"": "utilization"}, "cores"),
    Metric("Memory of each process", "process", {"": "memory_used_bytes"}, "GiB", _GIB),
    Metric("Disk", "disk", _rates("read", "written"), "MB/s", 1e-6),
    Metric("Network", "network", _rates("sent", "received"), "MB/s", 1e-6),
)

# Lines of more cores cannot be told apart; their mean and extremes can.
MAX_CORES = 12


def device_plots(run: Run, max_points: int = MAX_POINTS) -> list[Plot]:
    """A plot for each of `METRICS` that the run has; of many cores mean, lowest and highest."""
    plots = [_plot(run, metric, max_points) for metric in METRICS]
    return [plot for plot in plots if plot.data]


def devices_in_words(run: Run) -> str:
    """Such as "4 GPUs, 8 cores on node7"; empty if no device was measured."""
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
    """(device, label, seconds, values) of each line that has points."""
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
    """All cores are sampled together; where one missed a sample, it is looked up between two."""
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
