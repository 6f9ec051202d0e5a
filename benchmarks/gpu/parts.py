"""Parts of the GPU benchmark, each a process of its own, the most telling first."""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from benchmarks.gpu import spec

ROOT = pathlib.Path(__file__).parents[2]
PROFILE = "profile"

_RIVALS = "keras", "torch", "jax"
# Rows of the equality suite that differ most on GPUs: reductions, cuDNN, XLA, and 16 bits.
_FEATURES = (
    "clipnorm",
    "Adam",
    "synchronised BatchNorm, uneven batch",
    "uneven batch, odd remainder",
    "embedding, Adam",
    "masked loss",
    "custom train_step",
    "steps_per_execution",
    "jit_compile",
    "accumulate",
    "EMA",
    "mixed_bfloat16",
    "mixed_float16, overflow",
)


@dataclasses.dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: name for `--only`.
        title: heading on the page.
        command: program and arguments.
        seconds: time limit.
    """

    name: str
    title: str
    command: Sequence[str]
    seconds: float


def all_parts(
    tiny: bool, pythons: Mapping[str, str], device: str, most: int | None = None
) -> list[Part]:
    """Returns all parts in the order in which they run.

    Args:
        tiny: run small sizes on the CPU.
        pythons: "torch" and "jax" -> an interpreter that imports the library. Others are omitted.
        device: "GPU" or "CPU", of the equality suite.
        most: largest number of variants in each part that trains. Defaults to all.
    """
    # Right numbers before fast ones.
    parts = [
        _equality("float32", tiny, device),
        _module("driver", "NVML and nvidia-smi", 90, "benchmarks.gpu.driver"),
    ]
    for model in spec.SIZES:
        parts.append(_training("kdist", model, tiny, sys.executable, most))
        for rival in _RIVALS:
            python = sys.executable if rival == "keras" else pythons.get(rival)
            if python:
                parts.append(_training(rival, model, tiny, python, most))
        if model == "resnet50":
            parts.append(_module("check", "What works: kdist check", 180, "kdist", "check"))
            parts.append(_equality("float64", tiny, device))
        if model == "transformer":
            parts += [_profile(tiny), _sharding(tiny), _serving(tiny), _tune(tiny)]
    return parts


def _module(name, title, seconds, *arguments):
    return Part(name, title, [sys.executable, "-m", *arguments], seconds)


def _training(library, model, tiny, python, most):
    module = "torch_training" if library == "torch" else "keras_training"
    task = spec.Task(library, model, tiny, most=most)
    command = [python, "-m", f"benchmarks.gpu.{module}", task.to_json()]
    return Part(f"train-{model}-{library}", f"Training: {model}, {library}", command, 300)


def _equality(floatx, tiny, device):
    return _module(
        f"equality-{floatx}",
        f"The same numbers as on one device, {floatx}",
        300,
        "benchmarks.equivalence.compare",
        f"--device={device}",
        f"--floatx={floatx}",
        f"--features={','.join(_FEATURES[:1] if tiny else _FEATURES)}",
        "--libraries=kdist",
        f"--replicas={'2' if tiny else '1,2,4'}",
        "--layouts=mirrored",
        f"--jobs={1 if tiny else min(10, os.cpu_count() or 4)}",
    )


def _profile(tiny):
    """Returns the part that shows the kernels of a step; the runner picks the slowest row."""
    task = spec.Task("kdist", "resnet50", tiny, only=0, profile=True)
    module = "benchmarks.gpu.keras_training"
    return _module(PROFILE, "Kernels of the slowest row", 180, module, task.to_json())


def for_slowest_row(part: Part, rows: Sequence[Mapping], tiny: bool) -> Part:
    """Returns the profile of kdist's row that is furthest behind the best rival of its model.

    Without a row that has a rival, the part is returned as it is.
    """
    behind = []
    for row in rows:
        same = [r for r in rows if r.get("model") == row.get("model") and "ms_per_step" in r]
        rivals = [
            r["ms_per_step"]
            for r in same
            if r["library"] != "kdist" and r["variant"] == row["variant"]
        ]
        if row.get("library") == "kdist" and "ms_per_step" in row and rivals:
            behind.append((row["ms_per_step"] / min(rivals), row["model"], row["variant"]))
    if not behind:
        return part
    _, model, variant = max(behind)
    only = [str(each) for each in spec.VARIANTS["kdist"]].index(variant)
    task = spec.Task("kdist", model, tiny, only, profile=True)
    return dataclasses.replace(part, command=[*part.command[:-1], task.to_json()])


def _sharding(tiny):
    size = ["--depth=1", "--width=16", "--tokens=8", "--turns=1"]
    if not tiny:
        size = ["--width=768", "--tokens=128", "--turns=3", "--logical_gpu_megabytes=9000"]
    title = "Sharded replicas on logical GPUs of one card: memory, not speed"
    return _module("sharding", title, 240, "benchmarks.sharding", *size)


def _serving(tiny):
    seconds = ["--seconds=1", "--warm_up_seconds=0.2"] if tiny else ["--seconds=5"]
    return _module(
        "serving",
        "Serving: latency and requests per second",
        240,
        "benchmarks.serving_load",
        "--contenders=kdist,unbatched",
        f"--models={'small_resnet' if tiny else 'mobilenet_v2'}",
        f"--clients={'2' if tiny else '1,32'}",
        "--rounds=1",
        *seconds,
    )


def _tune(tiny):
    model = ["--model=lenet", "--max_batch=64"] if tiny else ["--model=resnet18"]
    return _module(
        "tune",
        "kdist tune",
        240,
        "kdist",
        "tune",
        "--batch",
        "--dataset=digits",
        "--num_devices=1",
        *model,
    )
