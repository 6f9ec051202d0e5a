"""Current prices from the catalog that SkyPilot keeps on a machine.

    found = read_catalog("~/.sky/catalogs")        # downloaded by SkyPilot; nothing is fetched here
    write_offers(found.offers, "prices.csv")       # for kdist plan --prices=prices.csv

SkyPilot has one file per cloud, `v8/aws/vms.csv`, whose rows are VMs per region and zone. Google's
VMs and GPUs have separate rows, which are added up within a region. The format is documented in
https://github.com/skypilot-org/skypilot-catalog.
"""

import collections
import dataclasses
import datetime
import os
import re
from pathlib import Path

from kdist.planner.tables.prices import Offer, PriceTable, assemble, cheapest
from kdist.planner.tables.read import Reader, maybe, price, read_table

DEFAULT_CATALOGS = "~/.sky/catalogs"
# Columns that are read. Clouds have others, such as GpuInfo and Arch, and some have no zones.
_COLUMNS: dict[str, Reader] = {
    "InstanceType": str,
    "AcceleratorName": str,
    "AcceleratorCount": maybe(price),
    "vCPUs": maybe(price),
    "Price": maybe(price),
    "SpotPrice": maybe(price),
    "Region": str,
}
# SkyPilot's names of GPUs that `vm_gpus.csv` names otherwise.
_GPUS = {"A100": "A100-40GB", "A100-80GB-SXM": "A100-80GB", "H100-SXM": "H100"}
_HOSTS_OF_GPUS = ("a2-", "a3-")


def read_catalog(directory: str | os.PathLike) -> PriceTable:
    """Reads the VMs with GPUs of a catalog: each in its cheapest region.

    The date of all prices is that of the oldest file.

    Args:
        directory: directory of the catalogs of several versions, of which the newest is read, or of
            one of them.

    Returns:
        The offers, and VMs that are left out because kdist's tables do not describe their GPUs.

    Raises:
        ValueError: there is no catalog, a column is missing, or a cell is invalid.

    Example:

        found = read_catalog("~/.sky/catalogs/v8")
    """
    newest = _newest_version(Path(directory).expanduser())
    files = sorted(newest.glob("*/vms.csv"))
    if not files:
        raise ValueError(
            f"{directory} has no files CLOUD/vms.csv; run a command of SkyPilot that downloads its "
            "catalog, such as sky show-gpus, or name the directory of a copy with --catalog"
        )
    oldest = datetime.date.fromtimestamp(min(file.stat().st_mtime for file in files))
    origin = {"source": f"SkyPilot catalog {newest.name}", "as_of": oldest.isoformat()}
    offers: list[Offer] = []
    left_out: dict[str, None] = {}
    for file in files:
        for region, rows in _by_region(read_table(file, _COLUMNS)).items():
            where = {"cloud": file.parent.name, "region": region}
            found = assemble([{**row, **where, **origin} for row in rows], servers=False)
            offers += found.offers
            left_out |= dict.fromkeys(found.left_out)
    table = PriceTable(cheapest(offers), ())
    # A VM without a price of its GPUs in one region may have one in another.
    return dataclasses.replace(table, left_out=tuple(vm for vm in left_out if table.lacks(vm)))


def _newest_version(directory):
    versions = [path for path in directory.glob("v*") if re.fullmatch(r"v\d+", path.name)]
    return max(versions, key=lambda path: int(path.name[1:]), default=directory)


def _by_region(rows):
    """Returns region -> rows of a table of prices; of each item the cheapest zone counts."""
    regions = collections.defaultdict(dict)
    for row in rows:
        item = _item(row)
        if item is None or not row["Price"]:  # VMs without GPUs, or sold as spot VMs alone
            continue
        name, kind, parts = item
        prices = {
            "usd_per_hour_on_demand": row["Price"] / parts,
            "usd_per_hour_spot": row["SpotPrice"] / parts if row["SpotPrice"] else None,
        }
        new = {"item": name, "kind": kind, "vcpus": row["vCPUs"] or None, **prices}
        known = regions[row["Region"]].setdefault(name, new)
        for which, usd in prices.items():
            known[which] = min((each for each in (known[which], usd) if each), default=None)
    return {region: list(items.values()) for region, items in regions.items()}


def _item(row):
    """Returns name, kind, and number of parts of a row's item in a table of prices, or None."""
    vm, gpu, count = row["InstanceType"], row["AcceleratorName"], row["AcceleratorCount"]
    gpu = _GPUS.get(gpu, gpu)
    if vm and gpu:
        return f"{vm} ({count or 0:g}x {gpu})", "vm+gpu", 1
    if gpu:
        return gpu, "gpu add-on, each", count or 1
    if vm.startswith(_HOSTS_OF_GPUS):
        return f"{vm} (host only)", "vm host part", 1
    return (vm, "vm", 1) if vm.startswith("n1-standard-") else None
