"""The largest useful batch: `kdist tune --noise_scale`."""

import math

from absl import flags

from kdist.commands.training_run.on_tensorflow import prepare_training

FLAGS = flags.FLAGS
_BATCHES = 100


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
        scale = gradient_noise_scale(model, data, _BATCHES)
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
