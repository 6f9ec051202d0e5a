"""GPUs and their peaks, as their makers state them; every row of the table names its source.

find_gpu("NVIDIA A100-SXM4-80GB").peak_flops("mixed_bfloat16")   # 3.12e14
"""

import dataclasses
import functools
import re

from kdist.planner.tables import maybe, number, read_own_table, text

# Boards that have a known GPU's name and something more, and other figures; "1g.5gb" is a part of
# an A100.
_OTHER_BOARDS = re.compile(
    r"\b(Ti|Super|Laptop|Mobile|Max-Q|4090 D|NVL|FHHL|MIG|\d+g\.\d+gb)\b", re.IGNORECASE
)
# "80GB" and "80 GB", but not "128 GB RAM", "128 GB of host memory" and "128 GB DDR4".
_GIGABYTES = re.compile(
    r"(?<![\d.])(\d+) ?GB\b(?! *(?:of )?(?:RAM|DDR|host|system|main|CPU))", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: in the table.
        float32_tflops: of the ordinary cores.
        tf32_tflops: of the tensor cores on float32 numbers; None where there are none.
        float16_tflops: of the tensor cores, dense.
        fp16_tensor_cores: whether float16 is faster for being computed by tensor cores.
        memory_gb: of its memory, in 10⁹ bytes as its maker counts; None where not known.
        bandwidth_gb_s: of its memory, 10⁹ bytes a second; None where not known.
    """

    name: str
    float32_tflops: float | None
    tf32_tflops: float | None
    float16_tflops: float | None
    fp16_tensor_cores: bool
    memory_gb: float | None
    bandwidth_gb_s: float | None

    def peak_flops(self, precision: str) -> float | None:
        """Floating-point operations a second under a Keras dtype policy; None where not known.

        TensorFlow computes float32 convolutions and products in TF32 where a GPU has it. Without
        TF32 (before Ampere) there is no bfloat16 either.
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
    """All rows of `tables/gpus.csv`."""
    rows = read_own_table(
        "gpus.csv",
        {
            "gpu": text,
            "fp32_tflops": maybe(number),
            "tf32_tflops": maybe(number),
            # "21 (no tensor cores)" is a figure with a note.
            "fp16_tflops_dense": str,
            "memory_gb": maybe(number),
            "memory_bandwidth_gb_s": maybe(number),
        },
    )
    return tuple(_gpu(*row.values()) for row in rows)


def _gpu(name, float32, tf32, float16, memory, bandwidth):
    """A row; its float16 is a figure with or without the note "(no tensor cores)"."""
    figure, _, note = float16.partition(" ")
    peak = number(figure) if figure else None
    return Gpu(name, float32, tf32, peak, bool(figure) and not note, memory, bandwidth)


def find_gpu(name: str) -> Gpu | None:
    """The row for a GPU as its driver names it, such as "NVIDIA H100 PCIe"; None if there is none.

    Where boards of one kind differ, a name with "PCIe" is that board, and any other the one with
    NVLink; the row with the memory that the name states comes first, and what the name states
    ("Tesla V100-SXM2-32GB") counts. A K80 is one of its dies, unless the name has "board" or 24 GB.
    Boards that share a name with a row, but not its figures, have none: "RTX 3090 Ti", laptops'
    GPUs, "H100 NVL", parts of a GPU (MIG). Underscores count as spaces.
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

    def misfits(gpu):
        return (
            ("PCIe" in gpu.name) != on_pcie,
            gpu.memory_gb != memory,
            ("board" in gpu.name) != whole_board,
        )

    # The first of those that fit best: False comes before True.
    found = min(rows, key=misfits)
    return dataclasses.replace(found, memory_gb=memory) if memory else found


def _stated_memory(name, rows):
    """The GB of a board that its name states, or None; a host's memory does not count.

    Boards of one kind are sold with up to twice the memory of a row: V100 with 16 and with 32 GB.
    """
    most = 2 * max(gpu.memory_gb or 0 for gpu in rows)
    stated = (float(figure) for figure in _GIGABYTES.findall(name))
    return next((memory for memory in stated if memory <= most), None)


def _model(name):
    """The part of a row's name that tells the kind: "A100" of "A100 40GB SXM", "RTX 3090"."""
    words = name.split()
    return r"[\s-]*".join(words[:2]) if words[0] == "RTX" else words[0]
