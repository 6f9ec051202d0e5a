"""Machines: their GPUs, the links between GPUs, the network, and CPU cores."""

import csv
import dataclasses
import functools
import os
import re

from kdist.planner.tables.read import count, maybe, number, read_own_table, read_table, text

# Defaults where a table has no value: the cheapest network of a data center, and as many cores per
# GPU as a DGX-1.
DEFAULT_NODE_GBIT_S = 10.0
DEFAULT_CORES_PER_GPU = 5.0

# Names of clouds and their VMs, with hyphens instead of underscores.
_CLOUD = re.compile(
    r"vCPU|\b(gce|gcp|google[- ]cloud|ec2|aws|amazon|azure|ecs|alibaba)\b"
    r"|\b(a2|a3|g2|n1|n2|e2|c2)-"  # a2-highgpu-8g
    r"|\b(p2|p3|p3dn|p4d|p4de|p5|g4dn|g5)(\.|$)|\.\d*xlarge\b"  # p3.16xlarge
    r"|\bstandard[- ]n[a-z]*\d",  # Standard_ND96asr_v4
    re.IGNORECASE,
)
# Such as "pcie4", "PCIe Gen4 x16", "NVLink 3.0", "NVL pairs", and "nvswitch".
_LINK = re.compile(
    r"(pcie|nvlink|nvl|nvswitch)(?:[\s-]*(?:gen|v)?\s*(\d)(?:\.0)?(?:x\d+)?)?(?![a-z0-9])"
)
_GEFORCE = re.compile(r"\bRTX[\s-]*[2-5]0\d0", re.IGNORECASE)
# NVLink generation of each GPU.
_NVLINK_OF = {"P100": 1, "V100": 2, "A100": 3, "H100": 4, "H200": 4}


@dataclasses.dataclass(frozen=True)
class Link:
    """A kind of link between the GPUs of a node, and the PCIe link to their host.

    Bandwidths are per direction, in 10⁹ bytes per second: of all rings through one GPU, and of the
    16 PCIe lanes of one GPU. The generation is 3 for PCIe 3.0.
    """

    name: str
    ring_gb_s: float
    pcie_gb_s: float
    pcie_generation: int


@dataclasses.dataclass(frozen=True)
class Machine:
    """A kind of node, or a cluster of such nodes.

    Attributes:
        name: name in the table.
        gpu: name that `kdist.planner.find_gpu` knows.
        gpus_per_node: number of GPUs; the two dies of a K80 count as two.
        link: a name of `known_links()`, optionally followed by the topology. Without a generation,
            "pcie" means PCIe 3.0, and "nvlink" or "nvswitch" mean the generation of the GPU.
        peer_to_peer: whether GPUs can access each other's memory; None where unknown.
        node_gbit_s: bandwidth of all network ports of a node, 10⁹ bits per second; None where
            unknown.
        cpu_cores: number of cores of a node, or of vCPUs in a cloud; None where unknown.
        note: other information.
        cores_are_vcpus: whether `cpu_cores` are vCPUs; None derives it from name and note.

    Example:

        >>> machine = known_machines()["dgx1-v100-32gb"]
        >>> machine.gpus_per_node, machine.ring_bytes_per_s
        (8, 125000000000.0)
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
        """The row of `tables/links.csv`.

        Raises:
            ValueError: `link` does not start with the name of a known link.
        """
        found = known_links().get(_link_name(self.link, self.gpu))
        if found is None:
            raise ValueError(
                f"the link of the machine {self.name!r} is {self.link!r}, which is unknown for a "
                f"{self.gpu}; start it with one of {', '.join(known_links())}"
            )
        return found

    @property
    def ring_bytes_per_s(self) -> float:
        """Ring bandwidth per direction of one GPU; that of PCIe if only pairs have NVLink."""
        link = self.kind_of_link
        return (link.pcie_gb_s if self._linked_pairs else link.ring_gb_s) * 1e9

    @property
    def pcie_bytes_per_s(self) -> float:
        """Bandwidth per direction between one GPU and its host."""
        return self.kind_of_link.pcie_gb_s * 1e9

    @property
    def pcie_generation(self) -> int:
        """PCIe generation, such as 3, which also indicates the age of the host's processors."""
        return self.kind_of_link.pcie_generation

    @property
    def nvlink(self) -> bool:
        """True if a ring over all GPUs of a node uses NVLink.

        If NVLink bridges connect pairs, a ring over more than two GPUs also needs PCIe. Such a node
        counts as one with PCIe, even for jobs on one pair.
        """
        return _link_name(self.link, self.gpu).startswith("nvlink") and not self._linked_pairs

    @property
    def _linked_pairs(self):
        """True if bridges connect only pairs of several GPUs."""
        bridges = re.search(r"\b(bridge[sd]?|pairs?|pairwise|nvl)\b", self.link, re.IGNORECASE)
        return self.gpus_per_node > 2 and bool(bridges)

    @property
    def cube_mesh(self) -> bool:
        """True if each pair of GPUs shares only some of their links, as in a DGX-1."""
        return bool(re.search("cube[ -]mesh", self.link, re.IGNORECASE))

    @property
    def direct(self) -> bool:
        """True if GPUs exchange data without the memory of the host.

        Where the table has no value, this is true unless GeForce RTX cards use PCIe.
        """
        if self.peer_to_peer is None:
            return self.nvlink or not _GEFORCE.search(self.gpu.replace("_", " "))
        return self.peer_to_peer

    @property
    def paired_dies(self) -> bool:
        """True if two GPUs share a board and its power, as in a K80."""
        return bool(re.search(r"K80|\bdies?\b", self.gpu))

    @property
    def vcpus(self) -> bool:
        """True if `cores` counts hyperthreads, as in clouds; default cores are physical."""
        if self.cpu_cores is None or self.cores_are_vcpus is not None:
            return self.cpu_cores is not None and bool(self.cores_are_vcpus)
        return any(_CLOUD.search(text.replace("_", "-")) for text in (self.name, self.note))

    @property
    def cores(self) -> float:
        """`cpu_cores`, or five per GPU where unknown."""
        return self.cpu_cores or DEFAULT_CORES_PER_GPU * self.gpus_per_node

    @property
    def network_bytes_per_s(self) -> float:
        """Bandwidth per direction of all network ports of a node; 10 Gbit/s where unknown."""
        return (self.node_gbit_s or DEFAULT_NODE_GBIT_S) / 8 * 1e9


@functools.cache
def known_links() -> dict[str, Link]:
    """Returns all rows of `tables/links.csv` by name."""
    columns = {"link": text, "ring_gb_s": number, "pcie_gb_s": number, "pcie_generation": count}
    return {row["link"]: Link(*row.values()) for row in read_own_table("links.csv", columns)}


def known_machines() -> dict[str, Machine]:
    """Returns all rows of `tables/machines.csv` by name.

    Returns:
        Name -> machine.

    Example:

        >>> known_machines()["dgx1-v100-32gb"].gpu
        'V100 SXM2 32GB'
    """
    return _machines(read_own_table("machines.csv", _COLUMNS), "machines.csv")


def read_machines(path: str | os.PathLike) -> dict[str, Machine]:
    """Reads a table of machines with the columns of kdist's own `tables/machines.csv`.

    An optional column `vcpus` (yes, no, or empty to derive it from the name) tells whether
    `cpu_cores` counts vCPUs. Unknown links raise an error only when they are used, so that other
    machines can be used.

    Args:
        path: path of the CSV file.

    Returns:
        Name -> machine.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a column is missing, a cell is invalid, or two machines have the same name.

    Example:

        machines = kdist.planner.read_machines("machines.csv")
    """
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        has_vcpus = "vcpus" in next(csv.reader(file), [])
    columns = {**_COLUMNS, "vcpus": _yes_or_no} if has_vcpus else _COLUMNS
    return _machines(read_table(path, columns), os.fspath(path))


def _machines(rows, source):
    machines: dict[str, Machine] = {}
    for row in rows:
        name = row.pop("machine")
        if name in machines:
            raise ValueError(f"{source} has two machines named {name!r}; use distinct names")
        vcpus = row.pop("vcpus", None)
        row["note"] = row["note"] or ""
        machines[name] = Machine(name, **row, cores_are_vcpus=vcpus)
    return machines


def _link_name(link, gpu):
    """Returns the name in `links.csv` that a machine's `link` starts with; it may be unknown."""
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
        raise ValueError(f"is {cell!r}, but must be yes, no, or unknown")
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
