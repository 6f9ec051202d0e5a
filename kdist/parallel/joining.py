"""The plain model that a split one is: on one device, with whole weights, without kdist.

    plain = kdist.parallel.joined(model)
    plain.predict(x)

`SplitModel.export` writes it, so that what is served knows nothing of the devices trained on.
"""

import keras
import tensorflow as tf

from kdist.model import Model
from kdist.parallel import copies
from kdist.parallel import tensor as tensor_parallel
from kdist.parallel.split_plan import is_nested, operations_by_name
from kdist.training.keras_internals import recompute_constants
from kdist.training.together import outside_of_strategy


def joined(model: keras.Model, device: str | None = None) -> keras.Model:
    """A model of plain Keras, not compiled, with what a split model has learned.

    Names, configuration, dtype policies, trainability, weights and states of generators of random
    numbers are the split model's; later training of one leaves the other as it is. It belongs to
    no strategy, also where this is called in a scope.

    Args:
        model: what `split` gave. Classes of layers of your own stay yours.
        device: where the weights are, such as "CPU:0" for a model that fits on no accelerator.
            Defaults to where TensorFlow puts new variables.

    Raises:
        TypeError: the model is not split.
    """
    if not getattr(model, "is_split", False):
        raise TypeError(
            f"{model.name!r} is not split: joined takes what kdist.parallel.split gave; any other "
            "model is whole already"
        )
    return outside_of_strategy(lambda: _joined(model, device))


def _joined(model, device):
    originals = operations_by_name(model)
    kinds = {type(each) for each in originals.values() if not is_nested(each)}
    own = {kind.__name__: kind for kind in kinds if kind.__module__.partition(".")[0] != "keras"}
    with tf.device(device):
        plain = _plain_class(type(model)).from_config(model.get_config(), custom_objects=own)
        for division, variable in zip(
            tensor_parallel.plain_variables(model), plain.variables, strict=True
        ):
            variable.assign(division.whole())
        recompute_constants(plain)
    for name, copy in operations_by_name(plain).items():
        if isinstance(originals[name], tensor_parallel.ShardedLayer):
            copy.trainable = originals[name].trainable
        elif isinstance(copy, keras.layers.Layer) and not is_nested(copy):
            copies.give_trainability(copy, originals[name])
    return plain


def _plain_class(split_class):
    """The class that was split, without what kdist has added to it."""
    kinds = (kind for kind in split_class.__mro__ if issubclass(kind, keras.Model))
    return next(k for k in kinds if not issubclass(k, Model) and not vars(k).get("is_placed"))
