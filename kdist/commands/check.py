"""Reports what works on this machine: versions, devices, and one training step per strategy.

  kdist check
  kdist check --strategies=mirrored --num_devices=4

  # throughput of an input pipeline alone: the upper limit of any training that reads from it
  kdist check --input --dataset=path/to/PetImages --operations="resize(160, 160)"

  # replicas that divide the optimizer's state: bytes on each device
  kdist check --layout=data=4,shard=weights --model=resnet18

  # a split model: the device of each layer, weight, and operation in one step
  kdist check --layout=data=2,branch=2 --model=inception

Exits with 0 if every requested strategy works. Without --strategies, one_device and mirrored are
required; central_storage and tpu are tried and reported.
"""

import importlib.metadata
import json
import os
import platform
import subprocess

from absl import flags

import kdist
from kdist import program, testing
from kdist.commands.training_run.compiled_model import MODELS
from kdist.commands.training_run.datasets import load_by_name
from kdist.commands.training_run.flag_checks import check_data, check_split
from kdist.hardware import parse_devices
from kdist.launch import child_python
from kdist.strategy_spec import resolve

FLAGS = flags.FLAGS

with program.flag_group("Strategies"):
    flags.DEFINE_list(
        "strategies", None, "Strategies that must work; one_device and mirrored by default."
    )
    flags.DEFINE_integer(
        "num_devices",
        None,
        "Number of devices for mirrored; all GPUs by default, or 2 logical CPUs without a GPU.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "timeout_seconds", 300, "Time limit for each strategy, in seconds.", lower_bound=1
    )

with program.flag_group("Input pipeline (--input)"):
    flags.DEFINE_boolean("input", False, "Measure an input pipeline alone, without training.")
    flags.DEFINE_string("dataset", "fashion_mnist", "See --dataset of `kdist train`.")
    flags.DEFINE_string("data_dir", None, "See --data_dir of `kdist train`.")
    flags.DEFINE_boolean("download", True, "Whether to download a missing dataset.")
    flags.DEFINE_string("operations", "", "See --operations of `kdist train`.")
    flags.DEFINE_integer("batch_size", 128, "Global batch size.", lower_bound=1)
    flags.DEFINE_float("seconds", 5.0, "Duration of the measurement, in seconds.", lower_bound=0.1)

with program.flag_group("Split models and sharded replicas (--layout)"):
    flags.DEFINE_string(
        "layout",
        None,
        "Inspect a split model, or sharded replicas; see --layout of `kdist train` for the format.",
    )
    flags.DEFINE_string("split", "auto", "See --split of `kdist train`.")
    flags.DEFINE_string("model", "inception", "See --model of `kdist train`.")
    flags.DEFINE_list("input_shape", ["28", "28", "1"], "Shape of one example: 224,224,3.")
    flags.DEFINE_integer("num_classes", 10, "Number of classes of the model.", lower_bound=2)

REQUIRED = ["one_device", "mirrored"]
OPTIONAL = ["central_storage", "tpu"]
PACKAGES = ["kdist", "tensorflow", "keras", "numpy", "tensorflow-datasets", "wandb", "absl-py"]

# Each strategy runs in its own process, so that a failure cannot affect the next one.
ONE_STEP = """
import json, sys
import kdist, keras, numpy as np, tensorflow as tf
name, devices = json.loads(sys.argv[1])
try:
    gpus = tf.config.list_physical_devices("GPU")
    if name == "mirrored" and devices is None:
        devices = len(gpus) or 2
    strategy = kdist.create_strategy(name, devices if name == "mirrored" else None)
    with strategy.scope():
        model = kdist.models.lenet(input_shape=(28, 28, 1), num_classes=10)
        model.compile("sgd", "sparse_categorical_crossentropy")
    images = np.zeros((8, 28, 28, 1), "uint8")
    loss = model.fit(images, np.arange(8), batch_size=8, verbose=0).history["loss"][0]
    print(json.dumps([bool(np.isfinite(loss)), ", ".join(kdist.strategies.device_names(strategy))]))
except Exception as error:
    print(json.dumps([False, str(error).strip().splitlines()[-1] or type(error).__name__]))
"""

DEVICES = """
import json, kdist, tensorflow as tf
gpus = [tf.config.experimental.get_device_details(g).get("device_name", g.name)
        for g in tf.config.list_physical_devices("GPU")]
print(json.dumps(gpus))
"""


program.accept_urls("dataset", "data_dir")
program.reads_file("split", "write the placement to it, or use --split=auto", unless=["auto"])


def main(_):
    """Returns the exit code: 0 if everything that was asked for works."""
    if FLAGS.input and FLAGS.layout is not None:
        raise ValueError("--input and --layout are two different checks; pass one of them")
    if FLAGS.input:
        return check_input()
    program.check_backend()
    if FLAGS.layout is not None:
        return check_layout()
    parse_devices(FLAGS.num_devices)
    for name in FLAGS.strategies or ():
        resolve(name)
    print(f"python {platform.python_version()} on {platform.platform()}")
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    gpus = testing.python(DEVICES, environment=child_python.variables())
    print(f"{os.cpu_count()} CPU cores; {len(gpus)} GPUs{': ' if gpus else ''}{', '.join(gpus)}")
    required = FLAGS.strategies or REQUIRED
    optional = [] if FLAGS.strategies else OPTIONAL
    works = {name: check(name) for name in required + optional}
    failed = [name for name in required if not works[name]]
    if failed:
        print(f"does not work here: {', '.join(failed)}")
        return 1
    print(f"works: {', '.join(name for name in works if works[name])}")
    return 0


def check_input():
    """Returns 0, after reading batches for --seconds and printing the throughput."""
    check_data(FLAGS.dataset)
    train, _ = load_by_name(
        FLAGS.dataset,
        batch=kdist.Batch(FLAGS.batch_size),
        operations=FLAGS.operations,
        data_dir=FLAGS.data_dir,
        download=FLAGS.download,
    )
    print(f"{FLAGS.dataset}: reading batches of {FLAGS.batch_size} for {FLAGS.seconds:g} s")
    found = kdist.data.measure(train, FLAGS.seconds)
    megabytes = found.batch_bytes / 1e6
    print(
        f"{found.examples_per_second:,.0f} examples/s, in {found.batches} batches of "
        f"{megabytes:,.2f} MB; first batch after {found.first_batch_seconds:.2f} s"
    )
    print(
        "a training run that needs fewer examples per second does not wait for this input pipeline"
    )
    return 0


def check_layout():
    """Returns 0, after training one step of a split model on zeros and printing the placement."""
    program.check_name("model", FLAGS.model, (*MODELS, "transformer"))
    check_split()
    layout, shape = kdist.Layout.parse(FLAGS.layout), program.read_numbers("input_shape")
    spec = resolve(layout)
    if layout.shard is not None:
        return check_shards(spec, layout, shape)
    import numpy as np

    from kdist.parallel.inspect.operation_devices import profile_devices

    strategy = kdist.strategies.build(spec)
    plain = kdist.models.create(FLAGS.model, input_shape=shape, num_classes=FLAGS.num_classes)
    with strategy.scope():
        model = kdist.parallel.split(
            plain, kdist.parallel.resolve_placement(plain, layout, FLAGS.split)
        )
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    rows = 2 * layout.data * layout.micro_batches
    found = profile_devices(model, np.zeros((rows, *shape), "uint8"), np.zeros(rows, "int32"))
    print(f"{FLAGS.model} {shape}, {plain.count_params():,} parameters, {layout}, Adam")
    for name, place in model.places.items():
        print(f"  {name:40} device {place} of each replica")
    print(
        f"\n{'device':8} {'weights':>8} {'MB':>8} {'slots MB':>9} {'forward':>8} {'backward':>9} "
        f"{'other':>7} {'received':>9} {'held MB':>9} {'live':>5}"
    )
    for row in found:
        print(
            f"{row.device:8} {row.weights:8} {row.weight_bytes / 1e6:8.2f} "
            f"{row.slot_bytes / 1e6:9.2f} {row.forward:8} {row.backward:9} {row.other:7} "
            f"{row.received:9} {held(row):>9} {row.live_micro_batches:5}"
        )
    print("forward, backward, other: operations of one step; received: tensors from other devices")
    print(
        f"held: peak bytes of activations stored for the backward pass ({rows} examples); live: "
        "the number of micro-batches they belong to"
    )
    return 0


def check_shards(spec, layout, shape):
    """Returns 0, after printing the bytes of a model's training state on each device."""
    from kdist.training.sharding.memory import state_bytes, whole_bytes

    with kdist.strategies.build(spec).scope():
        model = kdist.models.create(FLAGS.model, input_shape=shape, num_classes=FLAGS.num_classes)
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
        model.optimizer.build(model.trainable_variables)
    print(f"{FLAGS.model} {shape}, {model.count_params():,} parameters, {layout}, Adam")
    print(f"\n{'device':8} {'weights MB':>11} {'optimizer MB':>13} {'gathered MB':>12}")
    for device, held in state_bytes(model).items():
        print(
            f"{device:8} {held.weights / 1e6:11.2f} {held.optimizer / 1e6:13.2f} "
            f"{held.gathered / 1e6:12.2f}"
        )
    weights = sum(map(whole_bytes, model.weights)) / 1e6
    slots = 2 * sum(map(whole_bytes, model.trainable_variables)) / 1e6
    print(
        f"without shard={layout.shard}: weights {weights:.2f} MB and optimizer {slots:.2f} MB on "
        "each device"
    )
    if layout.shard == "weights":
        print("gathered: the two largest weights and all biases, which a step holds at a time")
    return 0


def held(row):
    """Returns megabytes of activations; "?" if their size is unknown."""
    return "?" if row.activation_bytes is None else f"{row.activation_bytes / 1e6:.3f}"


def version(package):
    """Returns the installed version, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def check(name):
    """Returns whether one training step works under the strategy, and prints the outcome."""
    try:
        arguments = [json.dumps([name, FLAGS.num_devices])]
        works, details = testing.python(
            ONE_STEP, arguments, child_python.variables(), FLAGS.timeout_seconds
        )
    except AssertionError as error:  # the process died and could not report it
        works, details = False, str(error).strip().splitlines()[-1]
    except subprocess.TimeoutExpired:
        works, details = False, f"no answer within {FLAGS.timeout_seconds} s (--timeout_seconds)"
    print(f"  {name:16} {'works' if works else 'no':6} {details}", flush=True)
    return works


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    program.run(main)
