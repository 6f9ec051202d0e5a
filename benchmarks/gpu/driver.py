"""Compares what kdist reads of the GPU by NVML with what `nvidia-smi` prints, under load.

python -m benchmarks.gpu.driver
"""

import contextlib
import subprocess
import threading

from benchmarks.gpu import spec
from kdist.telemetry.devices.nvml import NvmlSampler

# The driver's periods of utilization take up to a second.
_LOAD_SECONDS = 2.0

# Field of kdist's record -> (field of nvidia-smi, its factor, relative tolerance). Memory and the
# name must agree. The others are read some milliseconds later.
FIELDS = {
    "memory_total_bytes": ("memory.total", 2**20, 0.02),
    "memory_used_bytes": ("memory.used", 2**20, 0.05),
    "utilization": ("utilization.gpu", 0.01, 0.3),
    "power_watts": ("power.draw", 1, 0.3),
    "temperature_celsius": ("temperature.gpu", 1, 0.1),
    "sm_clock_mhz": ("clocks.sm", 1, 0.2),
}


def main():
    """Prints a row for each field."""
    with _load():
        try:
            texts = _nvidia_smi()
        except (OSError, subprocess.SubprocessError) as error:
            print(f"nvidia-smi cannot be run: {error}")
            return
        sampler = NvmlSampler()
        record = next(iter(sampler.sample()), {})
        sampler.close()
    for (field, (name, factor, tolerance)), text in zip(FIELDS.items(), texts, strict=True):
        ours = record.get(field)
        try:
            theirs = float(text) * factor
        except ValueError:  # "[N/A]", on GPUs that lack the measurement.
            theirs = None
        agree = ours is theirs is None
        if ours is not None and theirs is not None:
            agree = abs(ours - theirs) <= tolerance * max(abs(theirs), 1e-9)
        spec.print_row(field=field, kdist=ours, nvidia_smi=theirs, nvidia_smi_field=name, ok=agree)


def _nvidia_smi():
    names = ",".join(name for name, _, _ in FIELDS.values())
    shown = subprocess.run(
        ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    return shown.splitlines()[0].split(",")


@contextlib.contextmanager
def _load():
    """Multiplies matrices on the first device until the block ends."""
    import tensorflow as tf

    matrix, ends = tf.random.normal((2048, 2048)), threading.Event()

    def multiply():
        while not ends.is_set():
            float(tf.reduce_sum(matrix @ matrix))

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        ends.wait(_LOAD_SECONDS)
        yield
    finally:
        ends.set()
        thread.join()


if __name__ == "__main__":
    main()
