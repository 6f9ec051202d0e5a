"""Tunes a training on this machine: its speed, its batch, and its learning rate.

  # the fastest settings in five minutes; all flags of kdist train describe the training
  kdist tune --model=lenet --dataset=digits --num_devices=2 --minutes=5 --output=tuned.json
  kdist train --model=lenet --dataset=digits --tuned=tuned.json

  # settings that change the result as well: the precision, and the batch
  kdist tune --model=resnet18 --dataset=fashion_mnist --search=precision,batch

  # the largest local batch that fits into 8 GB, and the smallest that is nearly as fast
  kdist tune --batch --model=my_code.py:build --dataset=my_code.py:load_data --memory_gb=8

  # a learning rate, with its plot; and the largest batch whose gradients are not mostly noise
  kdist tune --learning_rate --model=lenet --dataset=digits
  kdist tune --noise_scale --model=lenet --dataset=digits --epochs=4

Settings are measured in turns with those that the flags describe, since the speed of a machine
drifts. The table tells what each of them changes in the result. Trials run in processes of their
own, so that one that fails or needs too much memory ends nothing else. A knob whose flag is given
keeps its value. Nothing is saved but --output.

--batch tries up to five local batches. It prints the largest that fits, the smallest that has 90 %
of the highest rate, and what to change for the learning rate. A larger batch makes fewer updates
per epoch, so compare the accuracy as well.
"""

import itertools
import math
import sys

from absl import flags

import kdist
from kdist import program
from kdist.cluster import Cluster
from kdist.commands import train  # noqa: F401  # defines the flags of the training
from kdist.commands.training_run.on_tensorflow import checked_spec, prepare_training
from kdist.commands.tuning_run.batch import find_batch
from kdist.commands.tuning_run.speed import DEFAULT_KNOBS, KNOBS, find_settings
from kdist.commands.tuning_run.trials import given_flags
from kdist.strategy_spec import MULTI_PROCESS

FLAGS = flags.FLAGS
# Flags of `kdist train` without a meaning for trials, or that need other processes.
_UNSUPPORTED = ("plan", "tuned", "run_dir", "export", "mirror", "resume", "data_workers")
# Flag of a question -> flags that belong to it only. Without a question: fast settings.
_OF_QUESTIONS = {
    None: ("minutes", "search", "output"),
    "batch": ("max_batch",),
    "learning_rate_range": ("plot",),
    "noise_scale": (),
}
# Flags that the suggestion replaces: it holds for the global batch of the test.
_REPLACED = ("learning_rate", "scale_learning_rate", "base_batch_size")
# Batches of one measurement of the noise scale.
_NOISE_BATCHES = 100

with program.flag_group("Speed"):
    flags.DEFINE_float(
        "minutes",
        5.0,
        "Time for the search.",
        lower_bound=0.01,
        allow_override=True,  # that of kdist train, whose trials have no time budget
    )
    flags.DEFINE_list(
        "search",
        [],
        f"Knobs to search in addition to {', '.join(DEFAULT_KNOBS)}, or although their flag is "
        f"given: {', '.join(KNOBS)}. batch, devices, and accumulate change the local batch.",
    )
    flags.DEFINE_string(
        "output",
        None,
        "File for the fastest settings, for kdist train --tuned and create_strategy.",
    )

with program.flag_group("Batch size"):
    flags.DEFINE_boolean(
        "batch", False, "Find the largest and the fastest local batch instead of fast settings."
    )
    flags.DEFINE_float(
        "memory_gb",
        None,
        "Memory that may be used, in GB: of each GPU, or of the whole training on CPUs. By default "
        "all of a GPU, and nine tenths of what is free on this machine.",
        lower_bound=0.1,
        upper_bound=1e6,
    )
    flags.DEFINE_integer(
        "max_batch", None, "Largest local batch to try; by default the training examples.", 1
    )

with program.flag_group("Learning rate and useful batch"):
    flags.DEFINE_boolean(
        "learning_rate_range",
        False,
        "Suggest a learning rate by a range test; the same as --learning_rate without a number.",
    )
    flags.DEFINE_string("plot", "learning_rate.png", "File for the plot of the range test.")
    flags.DEFINE_boolean(
        "noise_scale",
        False,
        "Measure the gradient noise scale, the largest useful global batch, before and after each "
        "of --epochs.",
    )

flags.mark_bool_flags_as_mutual_exclusive(["batch", "learning_rate_range", "noise_scale"])
program.writes_file("output")
program.writes_file("plot", only_with="learning_rate_range")


def main(_):
    _check_flags()
    questions = {
        "batch": find_batch,
        "learning_rate_range": find_learning_rate,
        "noise_scale": find_useful_batch,
        None: find_settings,
    }
    questions[_question()]()


def _question():
    """Returns the flag that asks for something else than fast settings, or None."""
    return next((name for name in _OF_QUESTIONS if name and FLAGS[name].value), None)


def _check_flags():
    for name in _UNSUPPORTED:
        if FLAGS[name].present:
            raise ValueError(f"--{name} has no meaning for kdist tune; leave it out")
    for question, names in _OF_QUESTIONS.items():
        for name in names if question != _question() else ():
            if FLAGS[name].present:
                remedy = f"add --{question}" if question else f"leave --{_question()} out"
                raise ValueError(f"--{name} has no effect here; {remedy}, or leave --{name} out")
    program.check_items("search", KNOBS)
    if FLAGS.backend != "tensorflow":
        raise ValueError(f"--backend={FLAGS.backend} is not supported by kdist tune")
    if FLAGS.strategy in (*MULTI_PROCESS, "tpu"):
        raise ValueError(
            f"--strategy={FLAGS.strategy}: kdist tune measures one machine; leave it out, and use "
            "the settings on each"
        )
    if not Cluster.resolve().is_alone:
        raise ValueError(
            "this process belongs to a job, and kdist tune measures one machine; run it outside of "
            "the job, without TF_CONFIG, and use the settings on each machine"
        )
    checked_spec()  # here, since trials that fail are reported later


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    sys.argv = [sys.argv[0], *_with_questions(sys.argv[1:])]
    program.run(main)


def _with_questions(arguments):
    """Returns the arguments with --learning_rate_range for --learning_rate without a number."""
    return [
        "--learning_rate_range" if argument == "--learning_rate" and after[:1] == "-" else argument
        for argument, after in itertools.pairwise([*arguments, "--"])
    ]


def find_learning_rate():
    """Tries learning rates, prints the suggestion with its reason, and writes --plot."""
    strategy, data = prepare_training()
    from kdist.commands.training_run.compiled_model import compiled_model

    search = kdist.callbacks.LearningRateRange()
    model = compiled_model(strategy, data, rate=FLAGS.learning_rate)
    print(f"trying learning rates with a global batch of {data.batch.global_size} …", flush=True)
    rate = float(f"{search.run(model, data):.2g}")
    print(
        f"tried {len(search.rates)} rates up to {search.rates[-1]:.2g}\n"
        f"suggested learning rate: {rate:g}, with {FLAGS.optimizer} and this batch: {search.reason}"
    )
    try:
        search.plot().figure.savefig(FLAGS.plot)
        print(f"plot: {FLAGS.plot}")
    except ImportError as error:
        print(f"no plot: {error}")
    print(f"  {program.command('train', *given_flags(*_REPLACED), f'--learning_rate={rate:g}')}")


def find_useful_batch():
    """Trains for --epochs, and prints the gradient noise scale before and after each of them."""
    strategy, data = prepare_training()
    from kdist.commands.training_run.compiled_model import compiled_model
    from kdist.tuning import gradient_noise_scale

    model = compiled_model(strategy, data)
    print(f"\n{'examples':>10} {'noise scale':>12}  95 % interval", flush=True)
    for epoch in range(FLAGS.epochs + 1):
        if epoch:
            model.fit(data, epochs=epoch, initial_epoch=epoch - 1, verbose=0)
        scale = gradient_noise_scale(model, data, _NOISE_BATCHES)
        low, high = map(_text, scale.interval)
        examples = epoch * data.steps_per_epoch * data.batch.global_size
        print(f"{examples:10,} {_text(scale.batch):>12}  {low} to {high}", flush=True)
    present = data.batch.global_size
    if math.isinf(scale.batch):
        print(
            "\nnoise hides the gradient at batches of this size: measure again with a larger "
            f"--local_batch_size; batches of up to {present:,} examples and more are useful"
        )
        return
    print(
        f"\nlargest useful global batch: about {_text(scale.batch)} examples after {FLAGS.epochs} "
        f"epoch(s); the present one has {present:,}\n"
        "With this batch, training takes about twice the steps and twice the examples of what is "
        "possible at best. Smaller batches need fewer examples, and larger ones hardly fewer "
        "steps. The scale grows while the loss falls."
    )


def _text(number):
    return "unknown" if math.isinf(number) else f"{max(number, 0.0):,.0f}"
