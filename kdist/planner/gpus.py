"""GPUs and their peaks, as their makers state them; every row of the table names its source.

find_gpu("NVIDIA A100-SXM4-80GB").peak_flops("mixed_bfloat16")   # 3.12e14
"""

import dataclasses
import functools
import re

from kdist.planner.tables import maybe, number, read_own_table, text


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: in the table.
        float32_tflops: of the ordinary cores.
        tf32_tflops: of the tensor cores on float32 numbers; None where there are none.
        float16_tflops: of the tensor cores, dense.
    """

    name: str
    float32_tflops: float | None
    tf32_tflops: float | None
    float16_tflops: float | None

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
            "fp16_tflops_dense": maybe(lambda cell: number(cell.partition(" ")[0])),
        },
    )
    return tuple(Gpu(*row.values()) for row in rows)


def find_gpu(name: str) -> Gpu | None:
    """The row for a GPU as its driver names it, such as "NVIDIA H100 PCIe"; None if there is none.

    Where boards of one kind differ, a name with "PCIe" is that board, and any other the one with
    NVLink.
    """
    rows = [gpu for gpu in known_gpus() if re.search(rf"\b{_model(gpu.name)}\b", name, re.I)]
    on_pcie = "pcie" in name.lower()
    return next((gpu for gpu in rows if ("PCIe" in gpu.name) == on_pcie), rows[0] if rows else None)


def _model(name):
    """The part of a row's name that tells the kind: "A100" of "A100 40GB SXM", "RTX 3090"."""
    words = name.split()
    return r"\s*".join(words[:2]) if words[0] == "RTX" else words[0]
