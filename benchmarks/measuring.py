"""Runs variants and their rivals alternately, each in processes of its own."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks.rivals.workload import Workload
from benchmarks.tables import Row

ROOT = pathlib.Path(__file__).parents[1]

# Large enough to hide the cost of a call from Python.
STEPS_PER_CALL = 20


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        rival: library or loop; the fastest variants of two rivals are compared.
        how: distinguishes this variant from others of the same rival.
        module: the script in `benchmarks.rivals`.
        options: fields of `Workload` that it sets.
        models: models that it applies to; None for all.
    """

    rival: str
    how: str
    module: str
    options: Mapping = dataclasses.field(default_factory=dict)
    models: Sequence[str] | None = None

    @property
    def name(self) -> str:
        return f"{self.rival}, {self.how}" if self.how else self.rival

    @property
    def needs_torch(self) -> bool:
        return self.module.startswith("torch")

    def of(self, workload: Workload) -> Workload:
        """Returns the workload of this variant. No call has more steps than are timed."""
        changed = dataclasses.replace(workload, **self.options)
        calls = min(changed.steps_per_call, changed.steps)
        return dataclasses.replace(changed, steps_per_call=calls)


_GROUPED = {"steps_per_call": STEPS_PER_CALL}
_ONE_THREAD = {"threads_per_operation": 1}
_IMAGE_MODELS = ("lenet", "resnet18")

VARIANTS = {
    "kdist": Variant("kdist fit", "", "kdist_fit"),
    "kdist_grouped": Variant("kdist fit", "", "kdist_fit", _GROUPED),
    "keras": Variant("Keras fit", "", "keras_fit"),
    "tf_guide": Variant("TensorFlow loop", "as in guides", "tf_loop", {"distributed_data": True}),
    "tf_loop": Variant("TensorFlow loop", "", "tf_loop", _ONE_THREAD),
    "tf_loop_grouped": Variant("TensorFlow loop", "", "tf_loop", _ONE_THREAD | _GROUPED),
    "torch": Variant("PyTorch DDP", "", "torch_ddp"),
    "torch_channels_last": Variant(
        "PyTorch DDP", "channels last", "torch_ddp", {"channels_last": True}, _IMAGE_MODELS
    ),
    "torch_compiled": Variant("PyTorch DDP", "compiled", "torch_ddp", {"compiled": True}),
}


@dataclasses.dataclass(frozen=True)
class Python:
    """Interpreters that run the rivals.

    Attributes:
        torch: one that can import torch, or None.
        timeout_seconds: time limit of one process.
    """

    torch: str | None
    timeout_seconds: float

    @classmethod
    def find(cls, torch: str | None, timeout_seconds: float) -> "Python":
        """Returns `torch`, or by default this interpreter, if it can import torch.

        Raises:
            ValueError: `torch` was named and cannot import torch.
        """
        if _imports_torch(torch or sys.executable):
            return cls(torch or sys.executable, timeout_seconds)
        if torch:
            raise ValueError(
                f"--torch_python={torch} cannot import torch; install it there "
                f"({torch} -m pip install torch numpy), or name another interpreter"
            )
        return cls(None, timeout_seconds)

    def answer(self, variant: Variant, workload: Workload) -> dict:
        """Runs the rival's script on this workload and returns its answer.

        Raises:
            RuntimeError: it failed or exceeded the time limit.
        """
        python = self.torch if variant.needs_torch else sys.executable
        given = json.dumps(dataclasses.asdict(variant.of(workload)))
        # Runs in the root, so that kdist is imported from this checkout.
        command = [python, "-m", f"benchmarks.rivals.{variant.module}", given]
        try:
            process = subprocess.run(
                command,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=self.timeout_seconds,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"{variant.name} took more than {self.timeout_seconds:.0f} s; give a larger "
                "--timeout, or fewer --steps"
            ) from error
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{variant.name} failed:\n{error.stderr[-3000:]}") from error
        return json.loads(process.stdout.strip().splitlines()[-1])


@functools.cache
def _imports_torch(python):
    try:
        return subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0
    except OSError:
        return False


def measure(
    variants: Mapping[str, Variant],
    workload: Workload,
    repetitions: int,
    python: Python,
    on_repetition: Callable[[int], None] = lambda number: None,
) -> tuple[list[Row], dict[str, str]]:
    """Returns a row per variant, and the versions of the libraries.

    A repetition runs every variant once, so that a slow phase of the machine affects all of them.
    Each repetition starts with another variant, so that no variant always follows the same one.
    """
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    versions: dict[str, str] = {}
    for number in range(repetitions):
        on_repetition(number)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            answer = python.answer(variants[name], workload)
            times[name].append(answer["ms_per_step"])
            versions.update(answer["versions"])
    rows = [
        Row(variant.rival, variant.name, variant.of(workload).steps_per_call, times[name])
        for name, variant in variants.items()
    ]
    return rows, versions
