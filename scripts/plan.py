"""Plans a training before anything is rented: which strategy, which machine, how long, how much.

  python scripts/plan.py --model=resnet50 --examples=1281167 --epochs=90 --max_usd=100

  # four K80s on an n1-standard-4: where does a step go, and what would a faster link change?
  python scripts/plan.py --model=mobilenet_v2 --input_shape=224,224,3 --examples=18610 --epochs=10 \
    --machine="n1-standard-4 + 4 x K80" --explain
  python scripts/plan.py … --link="nvlink2 nvswitch" --precision=mixed_float16 --accumulate=4

  # what was planned is what runs; what it measured sharpens the next plan
  python scripts/plan.py --model=resnet18 --examples=60000 --epochs=10 --output=plan.json
  python scripts/train.py --plan=plan.json --run_dir=runs/planned
  python scripts/plan.py --learn=runs/planned

  # a machine of which nobody has published figures: small networks are timed on it for two minutes
  python scripts/plan.py --calibrate=here.json --num_devices=2
  python scripts/plan.py --calibration=here.json --model=lenet --examples=60000

  # how far the predictions are off: against published rates, or rates of your own machines
  python scripts/plan.py --validate=scaling.csv --machines=machines.csv

It prints a ranked table, says why the first is first, and writes a page with the plots: time
against money, and efficiency against devices from 1 to 4,096. Nothing is rented, and TensorFlow is
not imported. Prices are those of kdist/planner/tables/vm_prices.csv, with their dates; --prices
takes your own.
"""

import functools
import json
import pathlib
import re

from absl import flags

import kdist
from kdist import planner, program
from kdist.planner import measurements
from kdist.planner.calibration import Calibration, calibrated_step_seconds
from kdist.run_directory import RunDirectory

FLAGS = flags.FLAGS

# What is to be trained.
flags.DEFINE_string("model", None, "A known model, such as resnet50; --model=list names all.")
flags.DEFINE_list("input_shape", None, "Of one example, such as 224,224,3; by default the model's.")
flags.DEFINE_integer("examples", None, "Of an epoch.")
flags.DEFINE_float("epochs", 1.0, "Times through the examples.")
flags.DEFINE_enum(
    "precision", "float32", ["float32", "mixed_bfloat16", "mixed_float16"], "Keras's dtype policy."
)
flags.DEFINE_enum("optimizer", "momentum", ["sgd", "momentum", "adam"], "Whose slots need memory.")
flags.DEFINE_boolean("jit_compile", False, "Compile the step with XLA.")
flags.DEFINE_string(
    "source_image",
    None,
    "Pixels of the JPEGs that are decoded, such as 500x375; none where examples lie in memory. By "
    "default 500x375 for models of photographs, and none for others.",
)

# On what.
flags.DEFINE_string("gpu", None, "Only machines with this GPU, such as V100.")
flags.DEFINE_string("cloud", None, "Only machines of this cloud: gcp, aws, azure or lambda.")
flags.DEFINE_string("machine", None, "Only machines with this in their names, such as dgx1.")
flags.DEFINE_string("link", None, "What if all GPUs were linked so: pcie4, 'nvlink3 nvswitch' …")
flags.DEFINE_string("machines", None, "A table of your own machines, as machines.csv.")
flags.DEFINE_string("prices", None, "A table of prices, in the place of vm_prices.csv.")
flags.DEFINE_float(
    "price_usd_per_hour",
    0.0,
    "What each of your own --machines costs, or a --machine of a published benchmark.",
    lower_bound=0.0,
)

# Within which limits.
flags.DEFINE_float("max_usd", None, "Of the whole run.")
flags.DEFINE_float("max_hours", None, "Of the whole run.")
flags.DEFINE_boolean(
    "spot", False, "On VMs that may be taken away: cheaper, with the restarts to be expected."
)
flags.DEFINE_integer("max_machines", 8, "Of one kind.")
flags.DEFINE_integer(
    "max_global_batch",
    None,
    "Examples behind an update. By default 1/156 of an epoch, at most 8192: with more, a model "
    "needs other learning rates and more epochs.",
)
flags.DEFINE_list("local_batch_sizes", None, "To choose from; by default powers of two, 8 to 1024.")
flags.DEFINE_integer("accumulate", None, "Micro-steps before an update; by default 1, 2, 4 or 8.")
flags.DEFINE_list(
    "strategies",
    ["one_device", "mirrored", "multi_worker"],
    "To choose from; parameter_server and local_sgd train in other ways and come only when asked.",
)
flags.DEFINE_enum(
    "rank",
    "auto",
    ["auto", "time", "money", "both"],
    "both is hours times dollars. auto: time with --max_usd alone, money with --max_hours alone.",
)

# What is shown, and written.
flags.DEFINE_integer("top", 10, "How many plans are shown.", lower_bound=1)
flags.DEFINE_boolean("explain", False, "Show the arithmetic of the first plan, line by line.")
flags.DEFINE_string("output", None, "Write the first plan here, for scripts/train.py --plan.")
flags.DEFINE_string("page", "plan.html", "Write the page here; '' writes none.")

# What was measured.
flags.DEFINE_string(
    "measurements", measurements.DEFAULT_PATH, "Your own table of measured runs; '' for none."
)
flags.DEFINE_string("learn", None, "Add this planned run's measured rate to --measurements.")
flags.DEFINE_string("validate", None, "Predict the rates of this table, and say how far off.")
flags.DEFINE_string(
    "trainings", None, "Predict hours and dollars of this table, as time_to_accuracy.csv."
)
flags.DEFINE_string("calibrate", None, "Time small networks on this machine; write it here.")
flags.DEFINE_integer("num_devices", 1, "With --calibrate: devices that train together.", 1)
flags.DEFINE_string("calibration", None, "Plan for the machine of this file, and for no other.")
flags.mark_flags_as_mutual_exclusive(["machines", "prices"])
flags.mark_flags_as_mutual_exclusive(["learn", "validate", "calibrate", "trainings"])


# Models that scripts/train.py builds.
TRAINED = ("mlp", "lenet", "resnet18", "mobilenet_v2", "inception")


def main(_):
    if FLAGS.validate:
        print(planner.validate(FLAGS.validate, FLAGS.machines))
    elif FLAGS.trainings:
        print(planner.trainings_text(planner.check_trainings(FLAGS.trainings, machines())))
    elif FLAGS.calibrate:
        calibrate()
    elif FLAGS.learn:
        learn(RunDirectory(FLAGS.learn))
    elif FLAGS.model == "list":
        print("\n".join(planner.known_workloads()))
    elif FLAGS.model is None or FLAGS.examples is None:
        raise ValueError(
            "say what to train: --model=resnet50 --examples=1281167 --epochs=90 (--model=list "
            "names the known models; for one of your own call kdist.plan(model, examples=…))"
        )
    elif FLAGS.calibration:
        plan_here()
    else:
        plan()


def plan():
    """Prints plans, and writes the page."""
    planned = kdist.plan(
        FLAGS.model,
        examples=FLAGS.examples,
        epochs=FLAGS.epochs,
        input_shape=numbers("input_shape"),
        precision=FLAGS.precision,
        optimizer=FLAGS.optimizer,
        jit_compile=FLAGS.jit_compile,
        input_work=input_work(),
        offers=offers(),
        ranking=FLAGS.rank,
        measurements=FLAGS.measurements or None,
        **limits(),
    )
    print(planned.text(FLAGS.top))
    if FLAGS.explain:
        print(f"\n{planned.explain()}")
    if FLAGS.output:
        planned.best.save(FLAGS.output)
        print(f"plan: {FLAGS.output}{who_runs(planned.best)}")
    if FLAGS.page:
        print(f"page: {planned.write_page(FLAGS.page)}")


def who_runs(plan):
    """What a plan of a model that scripts/train.py cannot build is for."""
    if plan.model in TRAINED:
        return ""
    return (
        f" (scripts/train.py builds {', '.join(TRAINED)}; in a program of your own, "
        "create_strategy(kdist.planner.Plan.load(…)) takes it)"
    )


def limits():
    """The flags that limit a plan."""
    names = ("max_usd", "max_hours", "max_machines", "max_global_batch", "accumulate", "spot")
    chosen = {name: getattr(FLAGS, name) for name in names}
    if FLAGS.local_batch_sizes:
        chosen["local_batches"] = numbers("local_batch_sizes")
    return {**chosen, "strategies": tuple(FLAGS.strategies)}


def numbers(name):
    """The whole numbers of a flag that is a list; None without."""
    texts = getattr(FLAGS, name)
    if texts is None:
        return None
    try:
        return tuple(int(text) for text in texts)
    except ValueError:
        raise ValueError(f"--{name} is whole numbers with commas, not {','.join(texts)}") from None


def input_work():
    """What --source_image says of the data; None without."""
    if FLAGS.source_image is None:
        return None
    work = planner.workload_of(FLAGS.model, numbers("input_shape"))
    if FLAGS.source_image == "none":
        return planner.InputWork(host_bytes=work.input_bytes)
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", FLAGS.source_image):
        raise ValueError(f"--source_image is WIDTHxHEIGHT or none, not {FLAGS.source_image}")
    if len(work.input_shape) != 3:
        raise ValueError(f"{FLAGS.model} takes no images; leave --source_image out")
    width, height = map(int, FLAGS.source_image.split("x"))
    return planner.InputWork(
        source_megapixels=width * height / 1e6,
        model_megapixels=work.input_shape[0] * work.input_shape[1] / 1e6,
        decoder="tf.data",
    )


def offers():
    """The machines that the flags leave to choose from."""
    found = planner.read_offers(FLAGS.prices) if FLAGS.prices else planner.known_offers()
    if FLAGS.machines:
        own = planner.read_machines(FLAGS.machines).values()
        found = planner.own_offers(own, FLAGS.price_usd_per_hour)
    return planner.choose(
        found,
        gpu=FLAGS.gpu,
        cloud=FLAGS.cloud,
        machine=FLAGS.machine,
        usd_per_hour=FLAGS.price_usd_per_hour,
        link=FLAGS.link,
    )


def learn(run):
    """Adds what a planned run has measured to the user's table."""
    plan, rate = planned_run(run)
    row = planner.learned(plan, rate)
    path = measurements.add(row, FLAGS.measurements or measurements.DEFAULT_PATH)
    print(
        f"{row.model} on {row.gpu}: {row.examples_per_second:,.1f} examples/s, "
        f"{row.predicted_examples_per_second:,.1f} predicted; added to {pathlib.Path(path)}"
    )


def planned_run(run):
    """The plan of a run that has ended, and its examples a second.

    Raises:
        ValueError: there is no such run, or it ran on other devices than were planned.
    """
    try:
        summary = json.loads(run.summary.read_text())
        plan, rate = summary["plan"], summary["examples_per_second"]
        devices, replicas = summary["devices"], summary["num_replicas"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{run.path} holds no planned run that has ended ({error!r}); train one with "
            "scripts/train.py --plan=plan.json --run_dir=…"
        ) from None
    plan = planner.Plan.from_dict(plan, run.summary)
    if replicas != plan.layout.batch.replicas or not all("GPU" in name for name in devices):
        raise ValueError(
            f"{run.path} was planned for {plan.layout.batch.replicas} × {plan.machine.gpu} and ran "
            f"on {', '.join(devices)}: it says nothing of what was planned"
        )
    return plan, rate


def machines():
    """Kdist's own machines and those of --machines, by name."""
    own = planner.read_machines(FLAGS.machines) if FLAGS.machines else {}
    return planner.known_machines() | own


def calibrate():
    """Times small networks on this machine."""
    from kdist.planner.measuring import calibrate as measure  # imports TensorFlow

    found = measure(FLAGS.num_devices, tell=functools.partial(print, flush=True))
    pathlib.Path(FLAGS.calibrate).write_text(found.to_json())
    print(
        f"{found.machine}, {found.replicas} devices: each network is predicted from the others "
        f"with an error of {found.probe_error:.0%} at the median, {found.max_probe_error:.0%} at "
        f"most; {FLAGS.calibrate}"
    )


def plan_here():
    """Prints the time of each batch on a machine that was calibrated."""
    path = pathlib.Path(FLAGS.calibration)
    calibration = Calibration.from_json(path.read_text(), path)
    work = planner.workload_of(FLAGS.model, numbers("input_shape"))
    print(f"{work.name} on {calibration.machine}, {calibration.replicas} devices")
    print(f"{'batch':>6}{'step':>12}{'examples/s':>12}{'hours':>9}  of it")
    for batch in limits().get("local_batches", planner.Limits().local_batches):
        step = calibrated_step_seconds(
            work, calibration, batch, calibration.replicas, FLAGS.precision
        )
        rate = batch * calibration.replicas / step.seconds
        hours = FLAGS.examples * FLAGS.epochs / rate / 3600
        parts = sorted(step.parts.items(), key=lambda part: -part[1])
        print(
            f"{batch:6}{step.seconds * 1e3:9.1f} ms{rate:12,.1f}{hours:9.3f}  "
            + ", ".join(f"{name} {part / step.seconds:.0%}" for name, part in parts)
        )


if __name__ == "__main__":
    program.run(main)
