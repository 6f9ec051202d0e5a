"""Cloud VMs with GPUs: their prices and machines.

Clouds sell a VM including its GPUs, GPUs as an addition to a VM, or the host part of a VM and its
GPUs separately. An `Offer` has one price for the whole VM in each case.
"""

import calendar
import csv
import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from kdist.planner.tables.gpus import find_gpu
from kdist.planner.tables.machines import Machine
from kdist.planner.tables.read import Reader, maybe, number, read_own_table, read_table, text
from kdist.run_directory import replacing

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
# VMs whose GPUs are charged on top, and their GPUs.
_HOST_PART = re.compile(r"(a2-highgpu|a2-megagpu|a2-ultragpu|a3-highgpu)-(\d+)g\b")
_GPU_OF_HOST = {"a2-ultragpu": "A100-80GB", "a3-highgpu": "H100"}
# GPUs included in the price: "(8x V100)", or "+ 4 x K80" as in the names of offers.
_WITH_GPUS = re.compile(r"(?:\(|\+ )([1-9]\d*) ?x ([^)]+)\)?")
# Names of Lambda's VMs: "gpu_8x_v100".
_LAMBDA_NAME = re.compile(r"gpu_([1-9]\d*)x_(\w+)$")
# Google's network: 2 Gbit/s per vCPU, 10 or more (cloud.google.com/compute/docs/network-bandwidth).
_BY_VCPUS = ("n1-", "a2-")
_GBIT_S_PER_VCPU, _MIN_GBIT_S = 2.0, 10.0
_MONTHS = [name.lower() for name in calendar.month_abbr[1:]]
OWN_TABLE = "vm_prices.csv"


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
        table: path of the table that has the price; "" for the user's own machines.
        region: region of the price; "" where unknown.

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
    table: str = ""
    region: str = ""


@dataclasses.dataclass(frozen=True)
class CpuHost:
    """A VM without GPUs and its price.

    Attributes:
        cloud: the provider.
        name: name of the VM.
        vcpus: number of its vCPUs.
        usd_per_hour: on-demand price in US dollars per hour.
    """

    cloud: str
    name: str
    vcpus: float
    usd_per_hour: float


@dataclasses.dataclass(frozen=True)
class PriceTable:
    """Offers of a table of prices, and the VMs that are left out.

    Attributes:
        offers: VMs with GPUs.
        left_out: names of VMs whose GPUs, or number of them, are not in `tables/vm_gpus.csv`.
    """

    offers: tuple[Offer, ...]
    left_out: tuple[str, ...]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Clouds and names of the VMs, without their GPUs."""
        return frozenset(_vm(f"{offer.cloud} {offer.name}") for offer in self.offers)

    def lacks(self, vm: str) -> bool:
        """Returns whether no offer is of this VM, such as `"gcp a2-highgpu-8g (8x A100-40GB)"`."""
        return _vm(vm) not in self.names


def _vm(name):
    return name.partition(" (")[0]


@functools.cache
def known_cpu_hosts() -> tuple[CpuHost, ...]:
    """Returns all VMs without GPUs of `tables/vm_prices.csv`.

    Example:

        >>> sorted({host.cloud for host in known_cpu_hosts()})
        ['gcp']
    """
    return tuple(
        CpuHost(row["cloud"], row["item"], row["vcpus"], row["usd_per_hour_on_demand"])
        for row in read_own_table(OWN_TABLE, _PRICES)
        if row["kind"] == "vm" and row["vcpus"]
    )


@functools.cache
def known_offers() -> tuple[Offer, ...]:
    """Returns all VMs with GPUs of `tables/vm_prices.csv`.

    Returns:
        The offers. VMs that a cloud sells in parts are assembled.

    Example:

        >>> min(offer.usd_per_hour for offer in known_offers()) > 0
        True
    """
    return assemble(read_own_table(OWN_TABLE, _PRICES), OWN_TABLE).offers


def read_offers(path: str | os.PathLike) -> tuple[Offer, ...]:
    """Reads the VMs with GPUs of a table with the columns of kdist's own `vm_prices.csv`.

    Args:
        path: path of the CSV file.

    Returns:
        The offers.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a column is missing or unknown, a cell is invalid, or no VM has known GPUs.

    Example:

        offers = kdist.planner.read_offers("prices.csv")
    """
    return read_prices(path).offers


def read_prices(path: str | os.PathLike) -> PriceTable:
    """Returns `read_offers(path)`, and which VMs of the table are left out."""
    found = assemble(read_table(path, _PRICES, strict=True), os.fspath(path))
    if not found.offers:
        raise ValueError(
            f"{os.fspath(path)} has no VM with GPUs; give one the kind vm+gpu and its GPUs in the "
            "name, such as 'my-server (4x V100)'"
        )
    return found


def write_offers(offers: Iterable[Offer], path: str | os.PathLike) -> None:
    """Writes a table of prices that `read_offers` reads.

    Args:
        offers: VMs with GPUs.
        path: path of the CSV file, which is replaced.

    Raises:
        OSError: the file cannot be written.

    Example:

        kdist.planner.write_offers(found.offers, "prices.csv")
    """
    with replacing(path) as file:
        writer = csv.writer(file)
        writer.writerow(_PRICES)
        for each in offers:
            prices = [
                None if usd is None else round(usd, 6)
                for usd in (each.usd_per_hour, each.spot_usd_per_hour)
            ]
            machine = each.machine.cpu_cores, None  # the host's memory decides nothing
            row = (each.cloud, each.name, "vm+gpu", each.region, *prices, *machine)
            writer.writerow((*row, each.source, each.as_of))


def prices_text(offers: Iterable[Offer]) -> str:
    """Returns one date of the prices of all offers, the oldest, and their source, in a sentence.

    Offers of the user's own machines have no date; without other offers the text is empty.
    """
    dated = [offer for offer in offers if offer.as_of]
    if not dated:
        return ""
    oldest = min(_date(offer.as_of) for offer in dated)
    later = " or later" if len({offer.as_of for offer in dated}) > 1 else ""
    tables, sources = ({getattr(each, of) for each in dated} for of in ("table", "source"))
    where = [", ".join(sorted(tables - {""}))] if tables - {""} else []
    where.append(sources.pop() if len(sources) == 1 else "sources are in its rows")
    if OWN_TABLE in tables:
        where.append("kdist plan --update_prices writes current ones")
    return f"Prices of {oldest}{later}: {'; '.join(where)}."


def _date(text):
    """Returns the first date in a text, such as "2026-11-25", "2026-03", or "2022"."""
    if day := re.search(r"20\d\d-\d\d-\d\d", text):
        return day[0]
    year = re.search(r"20\d\d", text)
    month = re.match(rf"({'|'.join(_MONTHS)})\w* 20", text, re.I)
    number = f"-{_MONTHS.index(month[1].lower()) + 1:02}" if month else ""
    return f"{year[0]}{number}" if year else text


def assemble(rows: Sequence[dict], table: str = "", servers: bool = True) -> PriceTable:
    """Returns the VMs with GPUs of rows of a table: of each name the cheapest.

    With `servers`, GPUs that no cloud of `vm_gpus.csv` has are assumed to be in PCIe slots.
    """
    gpus = {(row["cloud"], row["gpu"]): row for row in read_own_table("vm_gpus.csv", _GPUS)}
    added = {
        (row["cloud"], row["item"]): row for row in rows if row["kind"].startswith("gpu add-on")
    }
    offers: list[Offer] = []
    left_out = []
    assembled = {"vm+gpu": functools.partial(_whole, servers=servers)}
    for row in rows:
        if row["kind"] == "vm" and _ACCEPTS_GPUS.match(row["item"]):
            offers += _with_added(row, gpus, added)
        elif row["kind"] == "vm+gpu" or row["kind"].startswith("vm host part"):
            found = list(assembled.get(row["kind"], _host_part)(row, gpus, added))
            offers += found
            if not found:
                left_out.append(f"{row['cloud']} {row['item']}")
    offers = [dataclasses.replace(offer, table=table) for offer in offers]
    return PriceTable(cheapest(offers), tuple(dict.fromkeys(left_out)))


def cheapest(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """Returns the cheapest offer of each cloud and name, the most expensive first."""
    found = {}
    for offer in sorted(offers, key=lambda offer: -offer.usd_per_hour):
        found[offer.cloud, offer.name] = offer
    return tuple(found.values())


def _whole(row, gpus, added, servers) -> Iterator[Offer]:
    """Yields the offer of a VM whose price includes its GPUs."""
    found = _WITH_GPUS.search(row["item"]) or _LAMBDA_NAME.match(row["item"])
    if not found:
        return
    count, kind = int(found[1]), found[2]
    known = gpus.get((row["cloud"], kind)) or _in_any_cloud(gpus, kind)
    known = known or (_in_a_server(kind) if servers else None)
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
    found = _HOST_PART.match(row["item"])
    if not found:
        return
    kind, count = _GPU_OF_HOST.get(found[1], "A100-40GB"), int(found[2])
    known = gpus.get((row["cloud"], kind))
    if known and (row["cloud"], kind) in added and count in known["counts"]:
        parts = [added[row["cloud"], kind]] * count
        yield _offer(row, f"{found[0]} ({count}x {kind})", count, known, parts)


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
        region=row["region"],
    )


def _machine(row, name, count, known) -> Machine:
    vcpus, network = row["vcpus"], known["network_gbit_s"]
    if not row["item"].startswith(_BY_VCPUS):
        # A smaller VM of a kind has a part of the network of the largest.
        part = count / max(known.get("counts", (count,)))
        network = min(network, max(_MIN_GBIT_S, network * part))
    else:
        network = min(network, max(_MIN_GBIT_S, _GBIT_S_PER_VCPU * (vcpus or 0)))
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
