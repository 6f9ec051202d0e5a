"""Cloud VMs with GPUs: their prices and machines.

Clouds sell a VM including its GPUs, GPUs as an addition to a VM, or the host part of a VM and its
GPUs separately. An `Offer` has one price for the whole VM in each case.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Sequence

from kdist.planner.tables.gpus import find_gpu
from kdist.planner.tables.machines import Machine
from kdist.planner.tables.read import Reader, maybe, number, read_own_table, read_table, text

_PRICES: dict[str, Reader] = {
    "cloud": text,
    "item": text,
    "kind": text,
    "region": str,
    "usd_per_hour_on_demand": number,
    "usd_per_hour_spot": maybe(number),
    "vcpus": maybe(number),
    "memory_gb": maybe(number),
    "source": text,
    "as_of": text,
}
_GPUS: dict[str, Reader] = {
    "cloud": text,
    "gpu": text,
    "table_gpu": text,
    "counts": lambda cell: tuple(map(int, cell.split())),
    "max_vcpus_per_gpu": number,
    "link": text,
    "peer_to_peer": lambda cell: cell == "yes",
    "network_gbit_s": number,
}
# VMs that GPUs can be added to: Google's first generation only.
_ACCEPTS_GPUS = re.compile(r"n1-standard-\d+$")
# GPUs included in the price: "(8x V100)", "(4x K80)".
_WITH_GPUS = re.compile(r"\(([1-9]\d*)x ([^)]+)\)")
# Names of Lambda's VMs: "gpu_8x_v100".
_LAMBDA_NAME = re.compile(r"gpu_([1-9]\d*)x_(\w+)$")
# Google's network: 2 Gbit/s per vCPU, 10 or more (cloud.google.com/compute/docs/network-bandwidth).
_BY_VCPUS = ("n1-", "a2-")
_GBIT_S_PER_VCPU, _MIN_GBIT_S = 2.0, 10.0


@dataclasses.dataclass(frozen=True)
class Offer:
    """A VM with GPUs and its price.

    Attributes:
        cloud: the provider.
        name: name of the VM, with the GPUs added to it.
        machine: its GPUs, links, network, and cores.
        usd_per_hour: on-demand price in US dollars per hour.
        spot_usd_per_hour: price as a preemptible VM; None where unknown.
        as_of: date of the price.
        source: source of the price.

    Example:

        >>> offer = next(o for o in known_offers() if o.name == "n1-standard-4 + 4 x K80")
        >>> offer.machine.gpus_per_node, round(offer.usd_per_hour, 2)
        (4, 1.99)
    """

    cloud: str
    name: str
    machine: Machine
    usd_per_hour: float
    spot_usd_per_hour: float | None
    as_of: str
    source: str


@functools.cache
def known_offers() -> tuple[Offer, ...]:
    """Returns all VMs with GPUs of `tables/vm_prices.csv`.

    Returns:
        The offers. VMs that a cloud sells in parts are assembled.

    Example:

        >>> min(offer.usd_per_hour for offer in known_offers()) > 0
        True
    """
    return _offers(read_own_table("vm_prices.csv", _PRICES))


def read_offers(path: str | os.PathLike) -> tuple[Offer, ...]:
    """Reads the VMs with GPUs of a table with the columns of kdist's own `vm_prices.csv`.

    Args:
        path: path of the CSV file.

    Returns:
        The offers.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a column is missing, a cell is invalid, or no VM has known GPUs.

    Example:

        offers = kdist.planner.read_offers("prices.csv")
    """
    offers = _offers(read_table(path, _PRICES))
    if not offers:
        raise ValueError(
            f"{os.fspath(path)} has no VM with GPUs; give one the kind vm+gpu and its GPUs in the "
            "name, such as 'my-server (4x V100)'"
        )
    return offers


def _offers(rows) -> tuple[Offer, ...]:
    gpus = {(row["cloud"], row["gpu"]): row for row in read_own_table("vm_gpus.csv", _GPUS)}
    added = {
        (row["cloud"], row["item"]): row for row in rows if row["kind"].startswith("gpu add-on")
    }
    offers: list[Offer] = []
    for row in rows:
        if row["kind"] == "vm+gpu":
            offers += _whole(row, gpus)
        elif row["kind"].startswith("vm host part"):
            offers += _host_part(row, gpus, added)
        elif row["kind"] == "vm" and _ACCEPTS_GPUS.match(row["item"]):
            offers += _with_added(row, gpus, added)
    cheapest = {}
    for offer in sorted(offers, key=lambda offer: -offer.usd_per_hour):
        cheapest[offer.cloud, offer.name] = offer
    return tuple(cheapest.values())


def _whole(row, gpus) -> Iterator[Offer]:
    """Yields the offer of a VM whose price includes its GPUs."""
    found = _WITH_GPUS.search(row["item"]) or _LAMBDA_NAME.match(row["item"])
    if not found:
        return
    count, kind = int(found[1]), found[2]
    known = gpus.get((row["cloud"], kind)) or _in_any_cloud(gpus, kind) or _in_a_server(kind)
    if known:
        yield _offer(row, row["item"].partition(",")[0], count, known, ())


def _in_any_cloud(gpus, kind):
    """Returns the data of machines with this GPU in other clouds."""
    return next((row for (_, gpu), row in gpus.items() if gpu.lower() == kind.lower()), None)


def _in_a_server(kind):
    """Returns the data of a server with a GPU that no cloud has, in PCIe slots."""
    if find_gpu(kind) is None:
        return None
    link = {"table_gpu": kind, "link": "pcie4", "peer_to_peer": None}
    return {**link, "max_vcpus_per_gpu": 8.0, "network_gbit_s": 10.0}


def _host_part(row, gpus, added) -> Iterator[Offer]:
    """Yields the offer of a VM whose GPUs cost extra: "a2-highgpu-4g (host only)" and four A100."""
    name = row["item"].partition(" ")[0]
    kind = "A100-40GB" if name.startswith("a2-highgpu") else None
    if (row["cloud"], kind) in added:
        count = int(name.removesuffix("g").rpartition("-")[2])
        parts = [added[row["cloud"], kind]] * count
        yield _offer(row, f"{name} ({count}x {kind})", count, gpus[row["cloud"], kind], parts)


def _with_added(row, gpus, added) -> Iterator[Offer]:
    """Yields the offers of a VM with each GPU type and number of GPUs that it supports."""
    for (cloud, kind), part in added.items():
        known = gpus.get((cloud, kind))
        if cloud != row["cloud"] or known is None or kind.startswith("A100"):
            continue
        for count in known["counts"]:
            # A GPU needs at least one vCPU.
            if count <= row["vcpus"] <= known["max_vcpus_per_gpu"] * count:
                yield _offer(row, f"{row['item']} + {count} x {kind}", count, known, [part] * count)


def _offer(row, name, count, known, parts: Sequence[dict]) -> Offer:
    spot = [part["usd_per_hour_spot"] for part in (row, *parts)]
    oldest = min([row, *parts], key=lambda part: re.findall(r"20\d\d", part["as_of"])[:1])
    return Offer(
        cloud=row["cloud"],
        name=name,
        machine=_machine(row, name, count, known),
        usd_per_hour=sum(part["usd_per_hour_on_demand"] for part in (row, *parts)),
        spot_usd_per_hour=None if None in spot else sum(spot),
        as_of=oldest["as_of"],
        source=row["source"],
    )


def _machine(row, name, count, known) -> Machine:
    vcpus, network = row["vcpus"], known["network_gbit_s"]
    if row["item"].startswith(_BY_VCPUS):
        network = min(network, max(_MIN_GBIT_S, _GBIT_S_PER_VCPU * vcpus))
    return Machine(
        name=f"{row['cloud']} {name}",
        gpu=known["table_gpu"],
        gpus_per_node=count,
        link=known["link"],
        peer_to_peer=known["peer_to_peer"],
        node_gbit_s=network,
        cpu_cores=vcpus or known["max_vcpus_per_gpu"] * count,
        note="vCPU: a cloud counts hyperthreads",
    )
