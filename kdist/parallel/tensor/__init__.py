"""Layers whose weights are divided over the devices of a stage (tensor parallelism).

After Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section 3, who divide the first of two
matrices by its columns and the second by its rows: what lies between them stays divided, and the
devices meet once, where the partial sums of the second are added up.

Each divided layer keeps the name, the configuration and, in files, the class and the weights of
the plain one.
"""

from kdist.parallel.tensor.activations import Divided, call_divided, stay_divided
from kdist.parallel.tensor.attention import ShardedMultiHeadAttention
from kdist.parallel.tensor.checks import check_division
from kdist.parallel.tensor.embedding import ShardedEmbedding
from kdist.parallel.tensor.linear import SHARDED_LINEARS
from kdist.parallel.tensor.optimizers import check_optimizer
from kdist.parallel.tensor.shards import DividedVariable, ShardedLayer, Shards
from kdist.parallel.tensor.slots import keep_plain_slots_in_files, plain_slots
from kdist.parallel.tensor.weights import get_plain_weights, plain_variables, set_plain_weights

__all__ = [
    "Divided",
    "DividedVariable",
    "ShardedLayer",
    "call_divided",
    "check_division",
    "check_optimizer",
    "get_plain_weights",
    "keep_plain_slots_in_files",
    "plain_slots",
    "plain_variables",
    "set_plain_weights",
    "sharded",
    "stay_divided",
]

_KINDS = {
    kind.plain: kind for kind in (*SHARDED_LINEARS, ShardedEmbedding, ShardedMultiHeadAttention)
}


def sharded(layer, how: str, strategy, first: int, stays_divided: bool) -> ShardedLayer:
    """A divided layer like `layer`, built, with zeros for weights.

    Args:
        layer: built; `check_division` has found no fault with it.
        how: "column", "row" or "heads".
        strategy: a GroupStrategy.
        first: the number, within a group, of the device of the first shard.
        stays_divided: whether it gives its output as a tuple, a part a device.
    """
    copy = _KINDS[type(layer)].from_config(layer.get_config())
    copy.shards = Shards(strategy, first, how, stays_divided)
    copy.build_from_config(layer.get_build_config())
    copy.trainable = layer.trainable
    return copy
