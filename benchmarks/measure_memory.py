"""Compares the peak memory of training steps on the CPU with the planner's prediction.

  # one case, some seconds; from the repository's root
  python -m benchmarks.measure_memory resnet18 28 16 float32 adam

  # all of them, some minutes
  python -m benchmarks.measure_memory

A case is a model (of kdist.models or keras.applications), the side of its images or the length of
its sequences, a batch size, a precision, and an optimizer. Each case trains some steps with
`model.fit` in a process of its own, in which `tests/planner/allocations.c` counts allocations. It
is compiled with Debian's packages gcc and libc6-dev.

The planner knows the buffers of oneDNN's kernels for AVX2; the kernels for AVX-512 use others. In
float32 the measured process uses AVX2 on every CPU, unless ONEDNN_MAX_CPU_ISA is set. DEFAULT
allows everything that the CPU supports.
"""

import ctypes
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).parents[1] / "tests" / "planner" / "allocations.c"
# The order of operations is random. More steps come closer to the worst order.
STEPS = 8
STEPS_OF_SMALL = 100  # of some milliseconds each
SMALL = {"lenet", "mlp", "inception", "transformer"}
CHANNELS = {"lenet": 1, "resnet18": 1, "mlp": 1, "inception": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """One measured training: model, side or length, examples per step, dtype policy, optimizer."""

    model: str
    size: int
    batch: int
    precision: str
    optimizer: str

    def __str__(self):
        return " ".join(str(value) for value in dataclasses.astuple(self))


CASES = (
    Case("lenet", 28, 64, "float32", "sgd"),
    Case("mlp", 28, 64, "float32", "adam"),
    Case("transformer", 128, 32, "float32", "adamw"),
    Case("transformer", 64, 16, "mixed_bfloat16", "adam"),
    Case("inception", 28, 32, "float32", "adam"),
    Case("resnet18", 28, 16, "float32", "adam"),
    Case("resnet18", 28, 8, "mixed_bfloat16", "momentum"),
    Case("MobileNetV2", 96, 32, "float32", "rmsprop"),
    Case("MobileNetV2", 64, 16, "mixed_float16", "sgd"),
    Case("MobileNetV2", 64, 16, "mixed_bfloat16", "sgd"),
    Case("ResNet50", 96, 8, "float32", "momentum"),
    Case("VGG16", 64, 8, "float32", "sgd"),
    Case("DenseNet121", 64, 16, "float32", "adamw"),
    Case("EfficientNetB0", 96, 8, "float32", "adam"),
    # Chosen before any of them was measured:
    Case("ResNet50", 64, 8, "float32", "adam"),
    Case("MobileNetV2", 64, 32, "float32", "sgd"),
    Case("resnet18", 28, 32, "float32", "adam"),
    Case("transformer", 64, 64, "float32", "sgd"),
    Case("Xception", 96, 8, "float32", "momentum"),
    Case("DenseNet121", 64, 8, "float32", "sgd"),
)


def compiled(folder: pathlib.Path) -> pathlib.Path:
    """Returns the counting library, compiled into `folder`."""
    library = folder / "allocations.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-lpthread"]
    subprocess.run(command, check=True, timeout=60)
    return library


def measure(case: Case, library: pathlib.Path) -> dict:
    """Returns the "measured" and "predicted" bytes of a case, and the "lines" of the prediction."""
    counting = {
        "LD_PRELOAD": str(library),
        "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
        "TF_ENABLE_ONEDNN_OPTS": "1",  # as in a program that imports kdist first
    }
    if case.precision == "float32":  # oneDNN supports bfloat16 on AVX-512 only
        counting["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
    command = [sys.executable, "-m", "benchmarks.measure_memory", "--here", *str(case).split()]
    run = subprocess.run(
        command,
        env={**os.environ, **counting},
        cwd=SOURCE.parents[2],
        timeout=600,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def train(case: Case) -> dict:
    """Trains in this process, which has loaded the counting library."""
    import keras

    import kdist
    from kdist.planner import read_workload
    from kdist.planner.cost.memory import estimate_memory

    peak = ctypes.CDLL(None).allocations_peak
    peak.restype = ctypes.c_long
    strategy = kdist.create_strategy("one_device")
    keras.config.set_dtype_policy(case.precision)
    with strategy.scope():
        model = _model(case)
        model.compile(_optimizer(case.optimizer), "sparse_categorical_crossentropy")
    keras.config.set_dtype_policy("float32")
    shape, dtype = model.inputs[0].shape[1:], model.inputs[0].dtype

    model.fit(_batches(case, shape, dtype), verbose=0)
    measured = peak()
    needed = estimate_memory(read_workload(model), case.batch, optimizer=case.optimizer)
    return {"measured": measured, "predicted": needed.total, "lines": needed.parts()}


def _batches(case, shape, dtype):
    """Returns batches of which exactly one is prefetched, as the planner assumes.

    The runtime's own prefetching depends on the load of the machine: up to six batches were queued.
    """
    import tensorflow as tf

    def batch(step):  # one operation, so that its temporaries do not count as the step's
        values = tf.fill([case.batch, *shape], tf.cast(step % 10, dtype))
        return values, tf.zeros([case.batch], tf.int32)

    steps = STEPS_OF_SMALL if case.model in SMALL else STEPS
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    data = tf.data.Dataset.range(steps).map(batch).prefetch(1)
    return data.apply(tf.data.experimental.assert_cardinality(steps)).with_options(options)


def _model(case):
    import keras

    import kdist

    if case.model in kdist.models.BUILDERS:
        image = (case.size, case.size, CHANNELS.get(case.model, 3))
        return kdist.models.create(
            case.model,
            input_shape=(case.size,) if case.model == "transformer" else image,
            num_classes=10,
            precision=case.precision,
        )
    application = getattr(keras.applications, case.model)
    image = (case.size, case.size, 3)
    return kdist.Model.of(application(input_shape=image, weights=None, classes=10))


def _optimizer(name):
    import keras

    if name == "momentum":
        return keras.optimizers.SGD(0.01, momentum=0.9)
    return keras.optimizers.get(name)


def _print(case, found):
    measured, predicted = found["measured"], found["predicted"]
    parts = ", ".join(f"{name} {size / 1e6:.1f}" for name, size, _ in found["lines"])
    print(
        f"{case!s:45}{measured / 1e6:8.1f} MB measured {predicted / 1e6:8.1f} predicted "
        f"{predicted / measured:6.3f} ({parts})",
        flush=True,
    )


def main():
    """Prints one case, or all of them."""
    arguments = sys.argv[1:]
    here = arguments[:1] == ["--here"]
    fields = arguments[1:] if here else arguments
    cases = CASES
    if fields:
        model, size, batch, precision, optimizer = fields
        cases = (Case(model, int(size), int(batch), precision, optimizer),)
    if here:
        print(json.dumps(train(cases[0])))
        return
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(pathlib.Path(folder))
        for case in cases:
            _print(case, measure(case, library))


if __name__ == "__main__":
    main()
