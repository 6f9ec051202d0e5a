"""Learning rate range test: `kdist tune --learning_rate`."""

from absl import flags

import kdist
from kdist.commands.training_run.next_steps import command
from kdist.commands.training_run.on_tensorflow import prepare_training
from kdist.commands.tuning_run.trials import given_flags

FLAGS = flags.FLAGS
# Flags that the suggestion replaces: it holds for the global batch of the test.
_REPLACED = ("learning_rate", "scale_learning_rate", "base_batch_size")


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
    print(f"  {command('train', *given_flags(*_REPLACED), f'--learning_rate={rate:g}')}")
