"""Plans a training run: recommends a strategy and machine, and predicts time, memory, and cost.

  kdist plan --model=resnet50 --examples=1281167 --epochs=90 --max_usd=100

  # four K80s on an n1-standard-4: the time of each part of a step, and the effect of a faster link
  kdist plan --model=mobilenet_v2 --input_shape=224,224,3 --examples=18610 --epochs=10 \\
    --machine="n1-standard-4 + 4 x K80" --explain
  kdist plan … --link="nvlink2 nvswitch" --precision=mixed_float16 --accumulate=4

  # run the plan, and use its measurement to correct later predictions
  kdist plan --model=resnet18 --examples=60000 --epochs=10 --output=plan.json
  kdist train --plan=plan.json --run_dir=runs/planned
  kdist plan --learn=runs/planned

  # a machine without published figures: times small networks on it for two minutes
  kdist plan --calibrate=here.json --num_devices=2
  kdist plan --calibration=here.json --model=lenet --examples=60000

  # the step time that kdist tune measured, which also corrects the estimates of other batches
  kdist plan --tuned=tuned.json --model=lenet --examples=60000
  kdist plan --tuned=tuned.json --calibration=here.json --model=lenet --examples=60000

  # prediction errors against published rates, or rates of your own machines
  kdist plan --validate=rates.csv --machines=machines.csv

  # prices of today: those that SkyPilot has downloaded, or a table of your own
  kdist plan --update_prices=prices.csv
  kdist plan … --prices=prices.csv

It prints a ranked table, explains the first plan, and writes a page with plots: time against cost,
and efficiency against 1 to 4,096 devices. It rents nothing and does not import TensorFlow. Prices
and their dates are in kdist/planner/tables/vm_prices.csv; --prices replaces them.
"""

import dataclasses
import functools
import json
import pathlib
import re

from absl import flags

import kdist
from kdist import planner, program
from kdist.commands.compare import import_benchmark
from kdist.commands.training_run.compiled_model import MODELS, builds
from kdist.planner import measurements
from kdist.planner.measurements import Calibration, calibrated_step_seconds
from kdist.planner.selection.constraints import DEFAULT_STRATEGIES, price_rejections
from kdist.planner.tables import catalog, prices
from kdist.run_directory import RunDirectory, write_text
from kdist.tuning.settings import Tuned

FLAGS = flags.FLAGS

with program.flag_group("Model and data"):
    flags.DEFINE_string(
        "model", None, "Name of a known model, such as resnet50; --model=list prints all names."
    )
    flags.DEFINE_integer("examples", None, "Number of examples per epoch.")
    flags.DEFINE_float("epochs", 1.0, "Passes over the examples.", 0.0, 1e6)
    flags.DEFINE_list(
        "input_shape", None, "Shape of one example, such as 224,224,3; by default the model's own."
    )
    flags.DEFINE_string(
        "source_image",
        None,
        "Size of the JPEG images to decode, such as 500x375; none for examples that are in memory. "
        "By default 500x375 for models of photographs and none for others.",
    )

with program.flag_group("Budget and ranking"):
    flags.DEFINE_float("max_usd", None, "Maximum cost of the run, in US dollars.")
    flags.DEFINE_float("max_hours", None, "Maximum duration of the run, in hours.")
    flags.DEFINE_boolean(
        "spot", False, "Use spot VMs, including the cost of the restarts to expect."
    )
    flags.DEFINE_float(
        "preemptions_per_day",
        0.1,
        "Preemptions of one spot VM per day.",
        lower_bound=0.0,
        upper_bound=1e4,
    )
    flags.DEFINE_float(
        "checkpoint_mb_per_second",
        None,
        "Rate at which a checkpoint reaches a place that survives its spot VM; by default 66: to a "
        "disk and then to a bucket, at 125 MiB/s each.",
        upper_bound=1e6,
    )
    flags.DEFINE_enum(
        "rank",
        "auto",
        ["auto", "time", "money", "both"],
        "Order of the plans. both is hours × dollars. auto is time if only --max_usd is given, "
        "money if only --max_hours is given, otherwise both.",
    )
    flags.DEFINE_integer("top", 10, "Number of plans to print.", lower_bound=1)

with program.flag_group("Machines"):
    flags.DEFINE_string("gpu", None, "Restrict to machines with this GPU, such as V100.")
    flags.DEFINE_string("cloud", None, "Restrict to this cloud: gcp, aws, azure, or lambda.")
    flags.DEFINE_string(
        "machine", None, "Restrict to machines whose name contains this, such as dgx1."
    )
    flags.DEFINE_integer("max_machines", 8, "Maximum number of machines of one kind.")
    flags.DEFINE_string(
        "link",
        None,
        "Assume this link between GPUs on all machines, such as pcie4 or 'nvlink3 nvswitch'.",
    )
    flags.DEFINE_string(
        "machines", None, "Table of your own machines, in the form of machines.csv."
    )
    flags.DEFINE_string("prices", None, "Table of prices that replaces vm_prices.csv.")
    flags.DEFINE_string(
        "update_prices",
        None,
        "Write the prices of SkyPilot's --catalog to this file, for --prices, and exit.",
    )
    flags.DEFINE_string(
        "catalog",
        catalog.DEFAULT_CATALOGS,
        "Directory of the price catalog that SkyPilot downloaded, for --update_prices.",
    )
    flags.DEFINE_float(
        "price_usd_per_hour",
        0.0,
        "Price in US dollars per hour of each of your own --machines, or of a --machine of a "
        "published benchmark.",
        lower_bound=0.0,
    )

with program.flag_group("Strategy and batch"):
    flags.DEFINE_list(
        "strategies",
        list(DEFAULT_STRATEGIES),
        "Strategies to choose from. sharded lets replicas divide training state where whole ones "
        "do not fit or take longer. split is for models that do not fit one device, or are faster "
        "on several. parameter_server and local_sgd change the training, so they "
        "are considered only if they are listed here.",
    )
    flags.DEFINE_list(
        "local_batch_sizes",
        None,
        "Local batch sizes to choose from; by default powers of two from 8 to 1024.",
    )
    flags.DEFINE_integer(
        "max_global_batch",
        None,
        "Maximum number of examples per optimizer update. By default 1/156 of an epoch "
        "(8192 of ImageNet), at most 8192: larger batches need other learning rates and more "
        "epochs.",
    )
    flags.DEFINE_integer(
        "accumulate", None, "Micro-steps per optimizer update; by default 1, 2, 4, or 8."
    )
    flags.DEFINE_enum(
        "precision",
        "float32",
        ["float32", "mixed_bfloat16", "mixed_float16"],
        "Keras dtype policy.",
    )
    flags.DEFINE_enum(
        "optimizer",
        "momentum",
        ["sgd", "momentum", "adam"],
        "Optimizer, which determines the memory for its slots.",
    )
    flags.DEFINE_boolean("jit_compile", False, "Compile the training step with XLA.")

with program.flag_group("Output"):
    flags.DEFINE_boolean("explain", False, "Print each step of the cost model for the first plan.")
    flags.DEFINE_string("output", None, "File for the first plan, for `kdist train --plan`.")
    flags.DEFINE_string("page", "plan.html", "File for the page with plots; '' writes none.")

with program.flag_group("Measurements and validation"):
    flags.DEFINE_string(
        "measurements",
        measurements.DEFAULT_PATH,
        "Table of your own measured runs, which corrects predictions; '' for none.",
    )
    flags.DEFINE_string(
        "learn", None, "Run directory of a planned run whose rate is added to --measurements."
    )
    flags.DEFINE_string(
        "validate", None, "Table of measured rates to predict; prints the prediction errors."
    )
    flags.DEFINE_string(
        "trainings",
        None,
        "Table of training runs, in the form of time_to_accuracy.csv, whose hours and dollars are "
        "predicted.",
    )
    flags.DEFINE_string(
        "calibrate",
        None,
        "Time small networks on this machine and write the result to this file (needs "
        "kdist[calibrate]).",
    )
    flags.DEFINE_integer("num_devices", 1, "Number of devices for --calibrate.", 1, 256)
    flags.DEFINE_string(
        "calibration", None, "File that --calibrate wrote. Only its machine is considered."
    )
    flags.DEFINE_string(
        "tuned",
        None,
        "File that kdist tune --output wrote. Only its machine is considered, and its measured "
        "step time replaces the estimate.",
    )

flags.mark_flags_as_mutual_exclusive(["machines", "prices"])
flags.mark_flags_as_mutual_exclusive(
    ["learn", "validate", "calibrate", "trainings", "update_prices"]
)
for table in ("machines", "prices", "validate", "trainings"):
    program.reads_file(table, "give the path of a table (CSV)")
program.reads_file("calibration", "create it with --calibrate")
program.reads_file("tuned", "create it with kdist tune --output")
program.writes_file("output")
program.writes_file("update_prices")
program.writes_file("page", unless=[""])
program.writes_file("calibrate")


def main(_):
    if FLAGS.validate:
        print(validation("validate", "--validate").validate(FLAGS.validate, FLAGS.machines))
    elif FLAGS.trainings:
        trainings = validation("time_to_accuracy", "--trainings")
        print(trainings.trainings_text(trainings.check_trainings(FLAGS.trainings, machines())))
    elif FLAGS.calibrate:
        calibrate()
    elif FLAGS.update_prices:
        update_prices()
    elif FLAGS.learn:
        learn(RunDirectory(FLAGS.learn))
    elif FLAGS.model == "list":
        print("\n".join(planner.known_workloads()))
    elif FLAGS.model is None:
        raise ValueError(
            "pass a model: --model=resnet50 --examples=1281167 --epochs=90 (--model=list prints "
            "the known models; for your own model call kdist.plan(model, examples=…))"
        )
    elif FLAGS.examples is None:
        # A wrong name of the model comes first.
        planner.resolve_workload(FLAGS.model, program.read_numbers("input_shape"))
        raise ValueError(
            "pass the number of training examples, such as --examples=60000, and the number of "
            "passes over them, such as --epochs=10"
        )
    elif FLAGS.calibration or FLAGS.tuned:
        plan_here()
    else:
        plan()


def validation(name, flag):
    """Returns a module of benchmarks/planner_validation, which is not installed with kdist.

    Raises:
        ValueError: there is no clone of the repository.
    """
    return import_benchmark(f"planner_validation.{name}", flag)


def plan():
    """Prints the plans, and writes the page."""
    table = prices.read_prices(FLAGS.prices) if FLAGS.prices else None
    planned = kdist.plan(
        FLAGS.model,
        examples=FLAGS.examples,
        epochs=FLAGS.epochs,
        input_shape=program.read_numbers("input_shape"),
        precision=FLAGS.precision,
        optimizer=FLAGS.optimizer,
        jit_compile=FLAGS.jit_compile,
        input_work=input_work(),
        offers=offers(table),
        ranking=FLAGS.rank,
        measurements=FLAGS.measurements or None,
        preemptions=preemptions(),
        **limits(),
    )
    if table:
        left_out = price_rejections(table, FLAGS.prices)
        planned = dataclasses.replace(planned, rejected=(*planned.rejected, *left_out))
    print(planned.text(FLAGS.top))
    if hint := how_to_run(planned.best):
        print(hint)
    if FLAGS.explain:
        print(f"\n{planned.explain()}")
    if FLAGS.output:
        planned.best.save(FLAGS.output)
        print(f"plan: {FLAGS.output}")
    if FLAGS.page:
        print(f"page: {planned.write_page(FLAGS.page)}")


def how_to_run(plan):
    """Returns a hint for the plan of a model that `kdist train` cannot build."""
    if builds(plan.model):
        return ""
    return (
        f"kdist train builds {', '.join(MODELS)}, and keras.applications; for your own model pass "
        "--model=FILE.py:FUNCTION, or in your own program kdist.planner.Plan.load(…) to "
        "create_strategy"
    )


def limits():
    """Returns the constraints of the flags."""
    names = ("max_usd", "max_hours", "max_machines", "max_global_batch", "accumulate", "spot")
    chosen = {name: getattr(FLAGS, name) for name in names}
    if FLAGS.local_batch_sizes:
        chosen["local_batches"] = program.read_numbers("local_batch_sizes")
    return {**chosen, "strategies": tuple(FLAGS.strategies)}


def preemptions():
    """Returns the behavior of spot VMs that the flags describe."""
    rate = program.read_rate("checkpoint_mb_per_second")
    saving = {} if rate is None else {"save_bytes_per_second": rate * 1e6}
    return planner.Spot(FLAGS.preemptions_per_day / 24, **saving)


def input_work():
    """Returns the input work of --source_image, or None."""
    if FLAGS.source_image is None:
        return None
    work = planner.resolve_workload(FLAGS.model, program.read_numbers("input_shape"))
    if FLAGS.source_image == "none":
        return planner.InputWork(host_bytes=work.input_bytes)
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", FLAGS.source_image):
        raise ValueError(f"--source_image={FLAGS.source_image} is neither WIDTHxHEIGHT nor none")
    if len(work.input_shape) != 3:
        raise ValueError(f"{FLAGS.model} has no image input; leave --source_image out")
    width, height = map(int, FLAGS.source_image.split("x"))
    return planner.InputWork(
        source_megapixels=width * height / 1e6,
        model_megapixels=work.input_shape[0] * work.input_shape[1] / 1e6,
        decoder="tf.data",
    )


def offers(table):
    """Returns the offers of machines that the flags select, of a `PriceTable` or None."""
    found = table.offers if table else planner.known_offers()
    if FLAGS.machines:
        own = planner.read_machines(FLAGS.machines).values()
        found = planner.make_offers(own, FLAGS.price_usd_per_hour)
    return planner.select_offers(
        found,
        gpu=FLAGS.gpu,
        cloud=FLAGS.cloud,
        machine=FLAGS.machine,
        usd_per_hour=FLAGS.price_usd_per_hour,
        link=FLAGS.link,
    )


def update_prices():
    """Writes the prices of SkyPilot's catalog to --update_prices."""
    found = planner.read_catalog(FLAGS.catalog)
    planner.write_offers(found.offers, FLAGS.update_prices)
    dated = prices.prices_text(found.offers)
    print(f"{len(found.offers)} machines in {FLAGS.update_prices}. {dated}")
    if found.left_out:
        print(
            f"{len(found.left_out)} VMs left out, about whose GPUs, or number of GPUs, kdist has "
            f"no data, such as {', '.join(found.left_out[:3])}"
        )
    print(f"use it: kdist plan --prices={FLAGS.update_prices}")


def learn(run):
    """Adds the measured rate of a planned run to the user's table."""
    plan, rate = planned_run(run)
    row = planner.make_measurement(plan, rate)
    path = measurements.add_measurement(row, FLAGS.measurements or measurements.DEFAULT_PATH)
    print(
        f"{row.model} on {row.gpu}: {row.examples_per_second:,.1f} examples/s, "
        f"{row.predicted_examples_per_second:,.1f} predicted; added to {pathlib.Path(path)}"
    )


def planned_run(run):
    """Returns the plan and the measured examples per second of a finished run.

    Raises:
        ValueError: the run does not exist, or ran on other devices than planned.
    """
    try:
        summary = json.loads(run.summary.read_text())
        plan, rate = summary["plan"], summary["examples_per_second"]
        devices, replicas = summary["devices"], summary["num_replicas"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{run.path} holds no finished planned run ({error!r}); create one with "
            "kdist train --plan=plan.json --run_dir=…"
        ) from None
    plan = planner.Plan.from_dict(plan, run.summary)
    if replicas != plan.layout.data or not all("GPU" in name for name in devices):
        raise ValueError(
            f"{run.path} was planned for {plan.layout.devices} × {plan.machine.gpu} and ran "
            f"on {', '.join(devices)}, so it does not measure the plan"
        )
    return plan, rate


def machines():
    """Returns {name: machine} of the built-in table and of --machines."""
    own = planner.read_machines(FLAGS.machines) if FLAGS.machines else {}
    return planner.known_machines() | own


def calibrate():
    """Times small networks on this machine and writes the calibration."""
    program.check_backend("--calibrate")
    from kdist.calibrate import calibrate as measure  # imports TensorFlow

    found = measure(FLAGS.num_devices, tell=functools.partial(print, flush=True))
    write_text(FLAGS.calibrate, found.to_json())
    print(
        f"{found.machine}, {found.replicas} devices: the error of predicting one network "
        f"from the others is {found.probe_error:.0%} (median) and {found.max_probe_error:.0%} "
        f"(maximum); {FLAGS.calibrate}"
    )


def plan_here():
    """Prints the step time per local batch on one machine: measured, estimated, or both."""
    tuned = tuned_of_this_model() if FLAGS.tuned else None
    machine, replicas, steps = estimates_here() if FLAGS.calibration else ("", 0, {})
    if tuned is not None:
        machine, note = machine or tuned.machine, "measured by kdist tune"
        if steps and replicas != tuned.replicas:
            raise ValueError(
                f"{FLAGS.tuned} has {tuned.replicas} replicas, and {FLAGS.calibration} has "
                f"{replicas}; tune or calibrate with --num_devices of the other"
            )
        local, replicas = tuned.settings["local_batch_size"], tuned.replicas
        seconds = local * replicas / tuned.examples_per_second
        if steps:
            estimate = estimates_here((local,))[2][local][0]
            note += f"; the estimate was {estimate * 1e3:.1f} ms, which corrects other batches"
            factor = seconds / estimate
            steps = {batch: (step * factor, parts) for batch, (step, parts) in steps.items()}
        steps[local] = seconds, note
    print(f"{FLAGS.model} on {machine}, {replicas} devices")
    print(f"{'batch':>6}{'step':>12}{'examples/s':>12}{'hours':>9}  of it")
    for batch, (seconds, remark) in sorted(steps.items()):
        rate = batch * replicas / seconds
        hours = FLAGS.examples * FLAGS.epochs / rate / 3600
        print(f"{batch:6}{seconds * 1e3:9.1f} ms{rate:12,.1f}{hours:9.3f}  {remark}")


def estimates_here(batches=None):
    """Returns the machine of --calibration, its replicas, and estimates by local batch.

    Args:
        batches: local batches; by default those of the flags.

    Returns:
        (machine, replicas, {local batch: (seconds of a step, its parts as text)}).
    """
    path = pathlib.Path(FLAGS.calibration)
    calibration = Calibration.from_json(path.read_text(), path)
    work = planner.resolve_workload(FLAGS.model, program.read_numbers("input_shape"))
    batches = batches or limits().get("local_batches", planner.Constraints().local_batches)
    steps = {}
    for batch in batches:
        step = calibrated_step_seconds(
            work, calibration, batch, calibration.replicas, FLAGS.precision
        )
        parts = sorted(step.parts.items(), key=lambda part: -part[1])
        shares = [f"{name} {part / step.seconds:.0%}" for name, part in parts]
        steps[batch] = step.seconds, ", ".join(shares)
    return calibration.machine, calibration.replicas, steps


def tuned_of_this_model():
    """Returns the settings of --tuned.

    Raises:
        ValueError: they are of another model or precision, or have no measured rate.
    """
    tuned = Tuned.load(FLAGS.tuned)
    if not tuned.examples_per_second or "local_batch_size" not in tuned.settings:
        raise ValueError(f"{FLAGS.tuned} has no measured rate; write it again with kdist tune")
    for name, found in (
        ("model", tuned.model),
        ("precision", tuned.settings.get("precision", FLAGS.precision)),
    ):
        if found != FLAGS[name].value:
            raise ValueError(
                f"--{name}={FLAGS[name].value}: {FLAGS.tuned} is of {found}; pass --{name}={found}"
            )
    return tuned


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    program.run(main)
