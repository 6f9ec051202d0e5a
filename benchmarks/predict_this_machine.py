"""Predicts training steps of models that are not part of the calibration, and times them.

  # about eight minutes; from the repository's root, on an idle machine
  python -m benchmarks.predict_this_machine

  # other models; the calibration is kept
  python -m benchmarks.predict_this_machine --models=lenet,inception --save=machine.json

  # the accuracy of an earlier calibration
  python -m benchmarks.predict_this_machine --calibration=machine.json

The machine is calibrated with small networks (`kdist.calibrate`). The models train a few
steps with `kdist.Model.fit`, mirrored, at each batch size, in turns with these networks, because
the speed of a virtual machine changes within minutes. A measured step is the median of its round,
and of several rounds the shortest counts, as in the calibration.
"""

import pathlib
import statistics
import sys
import time

from absl import flags

from kdist import program
from kdist.planner.measurements import Calibration, calibrated_step_seconds

FLAGS = flags.FLAGS

flags.DEFINE_list("models", ["resnet18", "mobilenet_v2", "vgg16"], "Models to predict.")
flags.DEFINE_list("local_batch_sizes", ["8", "16", "32"], "Examples per replica and step.")
flags.DEFINE_integer("num_devices", 2, "Replicas.", lower_bound=1)
flags.DEFINE_integer("rounds", 4, "Measurements per model and batch size.", lower_bound=1)
flags.DEFINE_string(
    "calibration", None, "File of an earlier calibration; by default the machine is calibrated."
)
flags.DEFINE_string("save", None, "File to write the calibration to; by default none.")


def build(name):
    """Returns the named model, a `kdist.Model`."""
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
    batches = program.read_numbers("local_batch_sizes")
    from kdist.calibrate import (
        Training,
        calibration_from_trainings,
        probe_trainings,
        strategy_of,
        time_in_turns,
    )

    calibration = FLAGS.calibration and Calibration.from_json(
        pathlib.Path(FLAGS.calibration).read_text(), FLAGS.calibration
    )
    tell = _teller()
    strategy = strategy_of(FLAGS.num_devices)
    probes = [] if calibration else probe_trainings(strategy, tell=tell)
    cases = [(name, batch) for name in FLAGS.models for batch in batches]
    trainings = []
    for name, batch in cases:
        trainings.append(Training(lambda name=name: build(name), batch, strategy))
        tell(f"built {name} at batch {batch}")
    time_in_turns([*probes, *trainings], FLAGS.rounds, tell)
    calibration = calibration or calibration_from_trainings(probes)
    if FLAGS.save:
        pathlib.Path(FLAGS.save).write_text(calibration.to_json())
    _show([name for name, _ in cases], trainings, calibration)


def _teller():
    began = time.monotonic()

    def tell(line):
        print(f"{line} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)

    return tell


def _show(names, trainings, calibration):
    print(
        f"{calibration.machine}, {calibration.replicas} replicas; its own networks are predicted "
        f"from the others within {calibration.probe_error:.1%} (median), "
        f"{calibration.max_probe_error:.0%} (maximum)\n"
    )
    print(f"{'model':14} {'batch':>5} {'predicted':>10} {'measured':>10} {'error':>7}")
    errors = []
    for name, training in zip(names, trainings, strict=True):
        batch, measured = training.local_batch, training.timed_workload().seconds
        predicted = calibrated_step_seconds(
            training.workload, calibration, batch, FLAGS.num_devices
        ).seconds
        errors.append(predicted / measured - 1)
        print(
            f"{name:14} {batch:5} {predicted * 1e3:7.1f} ms {measured * 1e3:7.1f} ms "
            f"{errors[-1]:+7.1%}"
        )
    sizes = [abs(error) for error in errors]
    print(f"\nmean absolute error {statistics.mean(sizes):.1%}, maximum {max(sizes):.1%}")


if __name__ == "__main__":
    program.run(main)
