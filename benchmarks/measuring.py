"""What is timed against what, and how: each variant in processes of its own, in turn."""

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

# As many as make calls from Python count next to nothing.
STEPS_PER_CALL = 20


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        rival: who; the fastest variants of two rivals are compared.
        how: what tells this variant from others of the same rival.
        module: the script in `benchmarks.rivals`.
        options: fields of `Workload` that it sets.
        models: those that it makes sense for; None for all.
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
        """The workload as this variant does it; no call has more steps than are timed."""
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
    """Which interpreters run the rivals.

    Attributes:
        torch: one that can import torch; None if there is none.
        timeout_seconds: after which a process is given up.
    """

    torch: str | None
    timeout_seconds: float

    @classmethod
    def find(cls, torch: str | None, timeout_seconds: float) -> "Python":
        """`torch` or, if it is None, this interpreter, if it can import torch.

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
        """What the rival's script says about this workload.

        Raises:
            RuntimeError: it failed, or was too slow.
        """
        python = self.torch if variant.needs_torch else sys.executable
        given = json.dumps(dataclasses.asdict(variant.of(workload)))
        # From the root, so that kdist is that of this checkout, whatever is installed.
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
    """A row for each variant, and the versions of the libraries.

    A repetition runs every variant once, so that a slow phase of the machine hits all of them; each
    begins with another one, so that none always follows the same.
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
