"""What --plan says, beside the other flags and the data."""

from absl import flags

import kdist

FLAGS = flags.FLAGS


def follow_plan():
    """The plan of --plan, whose flags are set; None without.

    Raises:
        ValueError: a flag on the command line says otherwise.
    """
    if FLAGS.plan is None:
        return None
    plan = kdist.planner.Plan.load(FLAGS.plan)
    layout = plan.layout
    planned = {
        "model": plan.model,
        "strategy": layout.strategy,
        "num_devices": layout.devices,
        "local_batch_size": layout.local_batch,
        "accumulate": layout.accumulate,
        "local_steps": layout.local_steps,
        "epochs": int(plan.epochs),
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "jit_compile": plan.jit_compile,
    }
    for name, value in planned.items():
        if FLAGS[name].present and FLAGS[name].value != value:
            raise ValueError(
                f"--{name}={FLAGS[name].value}, and {FLAGS.plan} is for {value}; leave the flag "
                "out, or plan anew with scripts/plan.py"
            )
        FLAGS[name].value = value
    if plan.epochs != int(plan.epochs):
        raise ValueError(f"{FLAGS.plan} is for {plan.epochs} epochs; plan whole ones")
    if FLAGS.devices:
        raise ValueError(f"{FLAGS.plan} says the devices; leave --devices out")
    return plan


def say_differences(plan, train):
    """Where the data are others than those that were planned for."""
    for what, planned, there in (
        ("examples an epoch", plan.examples, train.num_examples),
        ("a shape of", plan.input_shape, tuple(train.image_shape)),
    ):
        if planned != there:
            print(f"planned for {what} {planned}, the data have {there}: times will differ")
