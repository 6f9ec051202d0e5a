"""Model builders, to be called inside a strategy's scope.

    with strategy.scope():
        model = kdist.models.resnet18(input_shape=(28, 28, 1), num_classes=10)
        model = kdist.models.create("lenet", input_shape=(28, 28, 1), num_classes=10)

Image models accept uint8 or float pixels from 0 to 255, of shape (B, H, W, C); their first layer
scales them on the device. Class probabilities (B, num_classes) and logits are float32 under every
precision. Every builder accepts `sync_batch_norm` and `precision`. Saved models load without kdist.

With Keras's JAX backend (KERAS_BACKEND=jax) builders return plain Keras models for
`kdist.parallel.Mesh`, and BatchNormalization always uses the whole batch.
"""

import difflib

from kdist.model import Model
from kdist.models.images import inception, lenet, mlp, mobilenet_v2, resnet18
from kdist.models.transformer import Perplexity, transformer

BUILDERS = {
    builder.__name__: builder
    for builder in (mlp, lenet, resnet18, mobilenet_v2, inception, transformer)
}

__all__ = ["BUILDERS", "Perplexity", "create", *BUILDERS]


def create(name: str, **arguments) -> Model:
    """Builds a model by name.

    Args:
        name: name of a builder: mlp, lenet, resnet18, mobilenet_v2, inception, or transformer.
        **arguments: arguments of the builder, among them for all builders:

            - `input_shape`: shape of one example, (H, W, C) or (T,).
            - `num_classes`: number of classes.
            - `sync_batch_norm`: whether BatchNormalization statistics are computed over all
              replicas. Defaults to False.
            - `rescale` (image models): factor that pixels are multiplied by, or None. Defaults to
              1/255.
            - `precision`: Keras dtype policy. Defaults to "float32".
            - `name`: name of the model. Defaults to the name of the builder.

    Returns:
        A `kdist.Model` (with JAX, a `keras.Model`).

    Raises:
        ValueError: the name is unknown, or an argument is invalid.

    Example:

        model = kdist.models.create("lenet", input_shape=(28, 28, 1), num_classes=10)
    """
    if name not in BUILDERS:
        close = difflib.get_close_matches(str(name), BUILDERS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"unknown model {name!r}{hint} Available are {', '.join(BUILDERS)}")
    return BUILDERS[name](**arguments)
