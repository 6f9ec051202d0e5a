"""GPUs and their peak rates from data sheets; each row of the table names its source."""

import dataclasses
import functools
import re

from kdist.planner.tables.read import maybe, number, read_own_table, text

# Boards whose names contain that of a known GPU but whose data differ; "1g.5gb" is a MIG slice.
_OTHER_BOARDS = re.compile(
    r"\b(Ti|Super|Laptop|Mobile|Max-Q|4090 D|NVL|FHHL|MIG|\d+g\.\d+gb)\b", re.IGNORECASE
)
# "80GB" and "80 GB", but not "128 GB RAM", "128 GB of host memory" and "128 GB DDR4".
_GIGABYTES = re.compile(
    r"(?<![\d.])(\d+) ?GB\b(?! *(?:of )?(?:RAM|DDR|host|system|main|CPU))", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: name in the table.
        float32_tflops: peak of the regular cores in float32, 10¹² FLOP/s; None where unknown.
        tf32_tflops: peak of the tensor cores in TF32; None without TF32.
        float16_tflops: dense peak of the tensor cores in float16; None where unknown.
        fp16_tensor_cores: whether tensor cores compute float16.
        memory_gb: memory in 10⁹ bytes, as in the data sheet; None where unknown.
        bandwidth_gb_s: memory bandwidth in 10⁹ bytes per second; None where unknown.

    Example:

        >>> find_gpu("NVIDIA A100-SXM4-80GB").memory_gb
        80.0
    """

    name: str
    float32_tflops: float | None
    tf32_tflops: float | None
    float16_tflops: float | None
    fp16_tensor_cores: bool
    memory_gb: float | None
    bandwidth_gb_s: float | None

    def peak_flops(self, precision: str) -> float | None:
        """Returns the peak FLOP/s under a Keras dtype policy; None where unknown.

        TensorFlow computes float32 convolutions and matrix products in TF32 if the GPU supports it.
        GPUs without TF32 (before Ampere) have no bfloat16 either.

        Args:
            precision: name of a Keras dtype policy, such as "mixed_bfloat16".

        Returns:
            Peak FLOP/s.

        Example:

            >>> find_gpu("NVIDIA A100-SXM4-80GB").peak_flops("mixed_bfloat16")
            312000000000000.0
        """
        if precision.endswith("bfloat16"):
            teraflops = self.float16_tflops if self.tf32_tflops else None
        elif precision.endswith("float16"):
            teraflops = self.float16_tflops
        else:
            teraflops = self.tf32_tflops or self.float32_tflops
        return None if teraflops is None else teraflops * 1e12


@functools.cache
def known_gpus() -> tuple[Gpu, ...]:
    """Returns all rows of `tables/gpus.csv`.

    Returns:
        The known GPUs.

    Example:

        >>> "T4" in [gpu.name for gpu in known_gpus()]
        True
    """
    rows = read_own_table(
        "gpus.csv",
        {
            "gpu": text,
            "fp32_tflops": maybe(number),
            "tf32_tflops": maybe(number),
            # A number, possibly with a note: "21 (no tensor cores)".
            "fp16_tflops_dense": str,
            "memory_gb": maybe(number),
            "memory_bandwidth_gb_s": maybe(number),
        },
    )
    return tuple(_gpu(*row.values()) for row in rows)


def _gpu(name, float32, tf32, float16, memory, bandwidth):
    """Returns the GPU of a row; `float16` may have the note "(no tensor cores)"."""
    value, _, note = float16.partition(" ")
    peak = number(value) if value else None
    return Gpu(name, float32, tf32, peak, bool(value) and not note, memory, bandwidth)


def find_gpu(name: str) -> Gpu | None:
    """Finds a GPU by the name that its driver or a cloud uses.

    If boards of one kind differ, names with "PCIe" match the PCIe board and others the one with
    NVLink. A memory size in the name ("Tesla V100-SXM2-32GB") selects a row and replaces its size.
    A K80 is one of its two dies, unless the name has "board" or 24 GB. Boards that share a name
    with a row but not its data are unknown: "RTX 3090 Ti", GPUs of laptops, "H100 NVL", and MIG
    slices. Underscores count as spaces.

    Args:
        name: such as "NVIDIA H100 PCIe".

    Returns:
        The GPU, or None if it is unknown.

    Example:

        >>> find_gpu("Tesla V100-SXM2-32GB").memory_gb
        32.0
    """
    exact = next((gpu for gpu in known_gpus() if gpu.name == name), None)
    if exact:
        return exact
    name = name.replace("_", " ")
    rows = [gpu for gpu in known_gpus() if re.search(rf"\b{_model(gpu.name)}\b", name, re.I)]
    if not rows or _OTHER_BOARDS.search(name):
        return None
    on_pcie = bool(re.search("pci[- ]?e", name, re.I))
    whole_board = bool(re.search(r"\bboard\b", name, re.I))
    memory = _stated_memory(name, rows)

    def mismatches(gpu):
        return (
            ("PCIe" in gpu.name) != on_pcie,
            gpu.memory_gb != memory,
            ("board" in gpu.name) != whole_board,
        )

    # The first of the best matches, as False sorts before True.
    found = min(rows, key=mismatches)
    return dataclasses.replace(found, memory_gb=memory) if memory else found


def _stated_memory(name, rows):
    """Returns the memory in GB in a board's name, or None; ignores the memory of the host.

    Boards are sold with up to twice the memory of a row, such as V100 with 16 and with 32 GB.
    """
    most = 2 * max(gpu.memory_gb or 0 for gpu in rows)
    stated = (float(size) for size in _GIGABYTES.findall(name))
    return next((memory for memory in stated if memory <= most), None)


def _model(name):
    """Returns the pattern of a row's kind: "A100" for "A100 40GB SXM", or "RTX 3090"."""
    words = name.split()
    return r"[\s-]*".join(words[:2]) if words[0] == "RTX" else words[0]
