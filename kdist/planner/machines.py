"""Machines: which GPUs they have, how these are linked, and what feeds them.

known_machines()["dgx1-v100-32gb"].ring_bytes_per_s   # 1.25e11
"""

import csv
import dataclasses
import functools
import os
import re

from kdist.planner.tables import count, maybe, number, read_own_table, read_table, text

# What a machine of which nothing else is said is taken to have: the cheapest network of a data
# centre, and as many cores for each GPU as a DGX-1.
DEFAULT_NODE_GBIT_S = 10.0
DEFAULT_CORES_PER_GPU = 5.0

# How clouds and their VMs are named; underscores are hyphens here.
_CLOUD = re.compile(
    r"vCPU|\b(gce|gcp|google[- ]cloud|ec2|aws|amazon|azure|ecs|alibaba)\b"
    r"|\b(a2|a3|g2|n1|n2|e2|c2)-"  # a2-highgpu-8g
    r"|\b(p2|p3|p3dn|p4d|p4de|p5|g4dn|g5)(\.|$)|\.\d*xlarge\b"  # p3.16xlarge
    r"|\bstandard[- ]n[a-z]*\d",  # Standard_ND96asr_v4
    re.IGNORECASE,
)
# "pcie4", "PCIe Gen4 x16", "NVLink 3.0", "NVL pairs", "nvswitch", and what follows them.
_LINK = re.compile(
    r"(pcie|nvlink|nvl|nvswitch)(?:[\s-]*(?:gen|v)?\s*(\d)(?:\.0)?(?:x\d+)?)?(?![a-z0-9])"
)
_GEFORCE = re.compile(r"\bRTX[\s-]*[2-5]0\d0", re.IGNORECASE)
# The generation of a GPU's NVLink.
_NVLINK_OF = {"P100": 1, "V100": 2, "A100": 3, "H100": 4, "H200": 4}


@dataclasses.dataclass(frozen=True)
class Link:
    """One kind of link between the GPUs of a node, and the PCIe that leads to their host.

    Attributes:
        name: in the table.
        ring_gb_s: 10⁹ bytes a second each way that rings through one GPU reach.
        pcie_gb_s: 10⁹ bytes a second each way of the 16 lanes of PCIe of one GPU.
        pcie_generation: 3 for PCIe 3.0.
    """

    name: str
    ring_gb_s: float
    pcie_gb_s: float
    pcie_generation: int


@dataclasses.dataclass(frozen=True)
class Machine:
    """One kind of node, or a cluster of such nodes.

    Attributes:
        name: in the table.
        gpu: as `kdist.planner.find_gpu` knows it.
        gpus_per_node: how many; a K80's two dies are two.
        link: a name of `known_links()`, and after it what is said of their topology. Without a
            generation, "pcie" is PCIe 3.0, and "nvlink" or "nvswitch" that of the GPU.
        peer_to_peer: whether GPUs reach each other's memory without the host; None where not known.
        node_gbit_s: 10⁹ bits a second of all network ports of a node; None where not known.
        cpu_cores: of a node, or vCPUs where it is a cloud's; None where not known.
        note: what else is said of it.
        cores_are_vcpus: whether `cpu_cores` are a cloud's vCPUs; None to tell it by name and note.
    """

    name: str
    gpu: str
    gpus_per_node: int
    link: str
    peer_to_peer: bool | None = None
    node_gbit_s: float | None = None
    cpu_cores: float | None = None
    note: str = ""
    cores_are_vcpus: bool | None = None

    @property
    def kind_of_link(self) -> Link:
        """The row of links.csv.

        Raises:
            ValueError: `link` begins with no known link.
        """
        found = known_links().get(_link_name(self.link, self.gpu))
        if found is None:
            raise ValueError(
                f"the link of the machine {self.name!r} is {self.link!r}, of which no link is "
                f"known for a {self.gpu}; begin it with one of {', '.join(known_links())}"
            )
        return found

    @property
    def ring_bytes_per_s(self) -> float:
        """Each way that a ring through one GPU reaches; over PCIe where only pairs have NVLink."""
        link = self.kind_of_link
        return (link.pcie_gb_s if self._linked_pairs else link.ring_gb_s) * 1e9

    @property
    def pcie_bytes_per_s(self) -> float:
        """Each way between one GPU and its host."""
        return self.kind_of_link.pcie_gb_s * 1e9

    @property
    def pcie_generation(self) -> int:
        """3 for PCIe 3.0; it also tells how old the host's processors are."""
        return self.kind_of_link.pcie_generation

    @property
    def nvlink(self) -> bool:
        """Whether a ring over all GPUs of a node goes over more than PCIe.

        Where NVLink bridges link pairs, a ring over more than two GPUs has to leave them over
        PCIe. So such a node of more than two counts as one with PCIe, even for jobs on one pair.
        """
        return _link_name(self.link, self.gpu).startswith("nvlink") and not self._linked_pairs

    @property
    def _linked_pairs(self):
        """Whether bridges link no more than two of several GPUs."""
        bridges = re.search(r"\b(bridge[sd]?|pairs?|pairwise|nvl)\b", self.link, re.IGNORECASE)
        return self.gpus_per_node > 2 and bool(bridges)

    @property
    def cube_mesh(self) -> bool:
        """Whether two GPUs have only some of their links to each other, as in a DGX-1."""
        return bool(re.search("cube[ -]mesh", self.link, re.IGNORECASE))

    @property
    def direct(self) -> bool:
        """Whether GPUs exchange without going through the memory of the host.

        Where the table does not say: GeForce RTX cards do not over PCIe, all others do.
        """
        if self.peer_to_peer is None:
            return self.nvlink or not _GEFORCE.search(self.gpu.replace("_", " "))
        return self.peer_to_peer

    @property
    def paired_dies(self) -> bool:
        """Whether two of the GPUs share a board and its power, as a K80's do."""
        return bool(re.search(r"K80|\bdies?\b", self.gpu))

    @property
    def vcpus(self) -> bool:
        """Whether `cores` counts hyperthreads, as clouds do; the cores of the default are whole."""
        if self.cpu_cores is None or self.cores_are_vcpus is not None:
            return self.cpu_cores is not None and bool(self.cores_are_vcpus)
        return any(_CLOUD.search(said.replace("_", "-")) for said in (self.name, self.note))

    @property
    def cores(self) -> float:
        """`cpu_cores`, or five for each GPU where they are not known."""
        return self.cpu_cores or DEFAULT_CORES_PER_GPU * self.gpus_per_node

    @property
    def network_bytes_per_s(self) -> float:
        """Each way of all network ports of a node; 10 Gbit/s where they are not known."""
        return (self.node_gbit_s or DEFAULT_NODE_GBIT_S) / 8 * 1e9


@functools.cache
def known_links() -> dict[str, Link]:
    """All rows of `tables/links.csv` by name."""
    columns = {"link": text, "ring_gb_s": number, "pcie_gb_s": number, "pcie_generation": count}
    return {row["link"]: Link(*row.values()) for row in read_own_table("links.csv", columns)}


def known_machines() -> dict[str, Machine]:
    """All rows of `tables/machines.csv` by name."""
    return _machines(read_own_table("machines.csv", _COLUMNS), "machines.csv")


def read_machines(path: str | os.PathLike) -> dict[str, Machine]:
    """The machines of a CSV file with the columns of kdist's own machines.csv, by name.

    A column `vcpus` (yes, no, or empty to tell it by name) may say what `cpu_cores` counts. A link
    that is not known is refused when its rate is asked for, so that other machines can be used.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column is missing, a cell is wrong, or two machines have one name.
    """
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        says_vcpus = "vcpus" in next(csv.reader(file), [])
    columns = {**_COLUMNS, "vcpus": _yes_or_no} if says_vcpus else _COLUMNS
    return _machines(read_table(path, columns), os.fspath(path))


def _machines(rows, source):
    machines: dict[str, Machine] = {}
    for row in rows:
        name = row.pop("machine")
        if name in machines:
            raise ValueError(f"{source} has two machines named {name!r}; give each its own name")
        vcpus = row.pop("vcpus", None)
        row["note"] = row["note"] or ""
        machines[name] = Machine(name, **row, cores_are_vcpus=vcpus)
    return machines


def _link_name(link, gpu):
    """The name in links.csv of what a machine's `link` begins with; it may not be there."""
    words = link.lower().split()
    if not words or words[0] in known_links():
        return words[0] if words else ""
    found = _LINK.match(" ".join(words))
    if not found:
        return words[0]
    kind, generation = found.groups()
    if kind == "pcie":
        return f"pcie{generation or 3}"
    if kind == "nvswitch" or not generation:
        generation = next((own for name, own in _NVLINK_OF.items() if name in gpu.upper()), "")
    return f"nvlink{generation}"


def _yes_or_no(cell):
    if cell in ("", "unknown"):
        return None
    if cell not in ("yes", "no"):
        raise ValueError(f"is {cell!r}, where yes, no or unknown is needed")
    return cell == "yes"


_COLUMNS = {
    "machine": text,
    "gpu": text,
    "gpus_per_node": count,
    "link": text,
    "peer_to_peer": _yes_or_no,
    "node_gbit_s": maybe(number),
    "cpu_cores": maybe(number),
    "note": maybe(text),
}
