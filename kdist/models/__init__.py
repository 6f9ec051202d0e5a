"""Model builders: called inside a strategy's scope, they give a `kdist.Model`.

    with strategy.scope():
        model = kdist.models.resnet18(input_shape=(28, 28, 1), num_classes=10)
        model = kdist.models.create("lenet", input_shape=(28, 28, 1), num_classes=10)

Image models take pixels from 0 to 255, uint8 or float, of shape (B, H, W, C): images stay bytes
until they are on the device, where the model's first layer scales them. Class probabilities,
of shape (B, num_classes), and logits are float32 under every precision. Every builder takes
`sync_batch_norm` and `precision`; saved models open in plain Keras.

Where Keras computes with JAX (KERAS_BACKEND=jax), builders give plain Keras models, for
`kdist.parallel.Mesh`; BatchNorm is then over the whole batch in any case.
"""

import difflib

from kdist.model import Model
from kdist.models.inception import inception
from kdist.models.lenet import lenet
from kdist.models.mlp import mlp
from kdist.models.mobilenet import mobilenet_v2
from kdist.models.resnet import resnet18
from kdist.models.transformer import transformer

BUILDERS = {
    builder.__name__: builder
    for builder in (mlp, lenet, resnet18, mobilenet_v2, inception, transformer)
}

__all__ = ["BUILDERS", "create", *BUILDERS]


def create(name: str, **arguments) -> Model:
    """Builds the model called `name`; `arguments` are its builder's.

    Raises:
        ValueError: there is no such model, or its builder refuses an argument.
    """
    if name not in BUILDERS:
        close = difflib.get_close_matches(str(name), BUILDERS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"unknown model {name!r}{hint} There are {', '.join(BUILDERS)}")
    return BUILDERS[name](**arguments)
