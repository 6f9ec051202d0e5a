"""Predicts training steps of models that this machine never ran, then runs them.

  # about five minutes; from the repository's root, on a machine that does nothing else
  python -m benchmarks.predict_this_machine

  # with a calibration of this machine that is there already; other models
  python -m benchmarks.predict_this_machine --calibration=machine.json --models=lenet,inception

The machine is calibrated by networks made for that (`kdist.planner.probes`), then each model trains
a few steps by `kdist.Model.fit`, mirrored, at each batch; all in processes of their own. A measured
step is the median of its round; of several rounds the shortest counts, as in the calibration.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import time

from absl import flags

from kdist import program
from kdist.planner.calibration import Calibration, calibrated_step_seconds
from kdist.planner.workload import Workload

FLAGS = flags.FLAGS
ROOT = pathlib.Path(__file__).parents[1]

flags.DEFINE_list("models", ["resnet18", "mobilenet_v2", "vgg16"], "That are predicted.")
flags.DEFINE_list("local_batch_sizes", ["8", "16", "32"], "Examples a replica takes in a step.")
flags.DEFINE_integer("num_devices", 2, "Replicas.", lower_bound=1)
flags.DEFINE_integer("rounds", 3, "How often each is timed.", lower_bound=1)
flags.DEFINE_string(
    "calibration",
    None,
    "File of this machine's calibration: read if it is there, written if not. None: calibrate anew "
    "and keep nothing.",
)
flags.DEFINE_float("timeout", 900, "Seconds after which a process is given up.", lower_bound=1)
flags.DEFINE_enum("only", None, ["calibrate", "measure"], "What the processes are told.")

# Seconds of training in each round.
SECONDS = 1.0


def build(name):
    """A model of this name; a `kdist.Model`."""
    import keras

    from kdist import Model, models

    if name == "resnet18":
        return models.resnet18(input_shape=(32, 32, 3), num_classes=10)
    if name == "mobilenet_v2":
        return models.mobilenet_v2(input_shape=(96, 96, 3), num_classes=10)
    if name == "vgg16":
        return Model.of(keras.applications.VGG16(weights=None, input_shape=(32, 32, 3), classes=10))
    if name == "densenet121":
        return Model.of(
            keras.applications.DenseNet121(weights=None, input_shape=(32, 32, 3), classes=10)
        )
    return models.create(name, input_shape=(28, 28, 1), num_classes=10)


def main(_):
    if FLAGS.only == "calibrate":
        print(_calibrated().to_json())
        return
    if FLAGS.only == "measure":
        print(json.dumps(_measured(FLAGS.models[0])))
        return
    calibration = _calibration()
    print(
        f"{calibration.machine}, {calibration.replicas} replicas; its own networks are predicted "
        f"from the others within {calibration.probe_error:.1%} (median), "
        f"{calibration.max_probe_error:.0%} (the worst)\n"
    )
    print(f"{'model':14} {'batch':>5} {'predicted':>10} {'measured':>10} {'error':>7}")
    errors = []
    for name in FLAGS.models:
        for answer in json.loads(_child("measure", f"--models={name}")):
            errors.append(_row(name, answer, calibration))
    print(f"\nmean absolute error {statistics.mean(errors):.1%}, the largest {max(errors):.1%}")


def _row(name, answer, calibration):
    """Prints a row; the error, as a fraction of what was measured."""
    workload, batch = Workload.from_json(answer["workload"]), answer["local_batch"]
    predicted = calibrated_step_seconds(workload, calibration, batch, FLAGS.num_devices).seconds
    measured = min(answer["seconds"])
    error = predicted / measured - 1
    print(
        f"{name:14} {batch:5} {predicted * 1e3:7.1f} ms {measured * 1e3:7.1f} ms {error:+7.1%}",
        flush=True,
    )
    return abs(error)


def _calibration():
    path = FLAGS.calibration and pathlib.Path(FLAGS.calibration)
    if path and path.exists():
        return Calibration.from_json(path.read_text(), path)
    calibration = Calibration.from_json(_child("calibrate"), "the process that calibrates")
    if path:
        path.write_text(calibration.to_json())
    return calibration


def _calibrated():
    from kdist.planner.measuring import calibrate

    began = time.monotonic()

    def tell(line):
        print(f"{line} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)

    return calibrate(FLAGS.num_devices, FLAGS.rounds, tell=tell)


def _measured(name):
    """One model's steps at each batch, in turn."""
    import kdist
    from kdist.planner.measuring import Training

    strategy = kdist.create_strategy("mirrored", FLAGS.num_devices)
    batches = [int(batch) for batch in FLAGS.local_batch_sizes]
    trainings = [Training(lambda: build(name), batch, strategy) for batch in batches]
    for _ in range(FLAGS.rounds):
        for training in trainings:
            training.time(SECONDS)
    return [
        {
            "workload": training.workload.to_json(),
            "local_batch": batch,
            "seconds": training.seconds,
        }
        for training, batch in zip(trainings, batches, strict=True)
    ]


def _child(task, *more):
    """What a process of its own, told the same, has to say.

    Raises:
        RuntimeError: it failed, or was too slow.
    """
    same = [
        f"--local_batch_sizes={','.join(FLAGS.local_batch_sizes)}",
        f"--num_devices={FLAGS.num_devices}",
        f"--rounds={FLAGS.rounds}",
    ]
    command = [sys.executable, "-m", __spec__.name, f"--only={task}", *same, *more]
    try:
        process = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=FLAGS.timeout, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"--only={task} was too slow; give a larger --timeout") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"--only={task} failed with exit code {error.returncode}") from error
    return process.stdout


if __name__ == "__main__":
    program.run(main)
