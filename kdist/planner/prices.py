"""What can be rented: VMs with their GPUs, what they cost, and the machine that each of them is.

    >>> offer = next(o for o in known_offers() if o.name == "n1-standard-4 + 4 x K80")
    >>> offer.machine.gpus_per_node, round(offer.usd_per_hour, 2)
    (4, 1.99)

Clouds price in several ways: a VM with its GPUs, a VM to which GPUs are added, or the host part of
a VM and its GPUs apart. Here all of them are one price of one VM.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Sequence

from kdist.planner.gpus import find_gpu
from kdist.planner.machines import Machine
from kdist.planner.tables import Reader, maybe, number, read_own_table, read_table, text

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
# VMs to which GPUs are added: Google's first generation only.
_TAKES_GPUS = re.compile(r"n1-standard-\d+$")
# "(8x V100)", "(4x K80)": GPUs that are in the price.
_WITH_GPUS = re.compile(r"\(([1-9]\d*)x ([^)]+)\)")
# Lambda's names: "gpu_8x_v100".
_OF_LAMBDA = re.compile(r"gpu_([1-9]\d*)x_(\w+)$")
# Google's network: 2 Gbit/s a vCPU, 10 at least (cloud.google.com/compute/docs/network-bandwidth).
_BY_VCPUS = ("n1-", "a2-")
_GBIT_S_PER_VCPU, _LEAST_GBIT_S = 2.0, 10.0


@dataclasses.dataclass(frozen=True)
class Offer:
    """A VM that can be rented, GPUs and all.

    Attributes:
        cloud: who rents it out.
        name: the VM's, with the GPUs added to it.
        machine: what it is.
        usd_per_hour: on demand, in US dollars.
        spot_usd_per_hour: as a VM that may be taken away; None where no price is known.
        as_of: when the price was read.
        source: where.
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
    """All VMs with GPUs of `tables/vm_prices.csv`, put together where the cloud sells parts."""
    return _offers(read_own_table("vm_prices.csv", _PRICES))


def read_offers(path: str | os.PathLike) -> tuple[Offer, ...]:
    """The VMs with GPUs of a user's own table, with the columns of kdist's `vm_prices.csv`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such table, or names no VM with GPUs that are known.
    """
    offers = _offers(read_table(path, _PRICES))
    if not offers:
        raise ValueError(
            f"{os.fspath(path)} has no VM with GPUs; write one as kind vm+gpu with its GPUs in the "
            "name, such as 'my-server (4x V100)'"
        )
    return offers


def _offers(rows) -> tuple[Offer, ...]:
    gpus = {(row["cloud"], row["gpu"]): row for row in read_own_table("vm_gpus.csv", _GPUS)}
    added = {
        (row["cloud"], row["item"]): row for row in rows if row["kind"].startswith("gpu add-on")
    }
    made: list[Offer] = []
    for row in rows:
        if row["kind"] == "vm+gpu":
            made += _whole(row, gpus)
        elif row["kind"].startswith("vm host part"):
            made += _host_part(row, gpus, added)
        elif row["kind"] == "vm" and _TAKES_GPUS.match(row["item"]):
            made += _with_added(row, gpus, added)
    cheapest = {}
    for offer in sorted(made, key=lambda offer: -offer.usd_per_hour):
        cheapest[offer.cloud, offer.name] = offer
    return tuple(cheapest.values())


def _whole(row, gpus) -> Iterator[Offer]:
    """A VM whose price has its GPUs in it."""
    found = _WITH_GPUS.search(row["item"]) or _OF_LAMBDA.match(row["item"])
    if not found:
        return
    count, kind = int(found[1]), found[2]
    known = gpus.get((row["cloud"], kind)) or _of_any_cloud(gpus, kind) or _by_its_maker(kind)
    if known:
        yield _offer(row, row["item"].partition(",")[0], count, known, ())


def _of_any_cloud(gpus, kind):
    """What is known of machines with this GPU in other clouds."""
    return next((row for (_, gpu), row in gpus.items() if gpu.lower() == kind.lower()), None)


def _by_its_maker(kind):
    """A GPU that no cloud's table has, but the table of GPUs: in PCIe slots, as servers have it."""
    if find_gpu(kind) is None:
        return None
    link = {"table_gpu": kind, "link": "pcie4", "peer_to_peer": None}
    return {**link, "max_vcpus_per_gpu": 8.0, "network_gbit_s": 10.0}


def _host_part(row, gpus, added) -> Iterator[Offer]:
    """A VM whose GPUs are charged on top: "a2-highgpu-4g (host only)" and four A100."""
    name = row["item"].partition(" ")[0]
    kind = "A100-40GB" if name.startswith("a2-highgpu") else None
    if (row["cloud"], kind) in added:
        count = int(name.removesuffix("g").rpartition("-")[2])
        parts = [added[row["cloud"], kind]] * count
        yield _offer(row, f"{name} ({count}x {kind})", count, gpus[row["cloud"], kind], parts)


def _with_added(row, gpus, added) -> Iterator[Offer]:
    """A VM with each number of each GPU that it can take."""
    for (cloud, kind), part in added.items():
        known = gpus.get((cloud, kind))
        if cloud != row["cloud"] or known is None or kind.startswith("A100"):
            continue
        for count in known["counts"]:
            # A vCPU for each GPU is the least that can keep it busy.
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
        network = min(network, max(_LEAST_GBIT_S, _GBIT_S_PER_VCPU * vcpus))
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
